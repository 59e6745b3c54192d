"""The queue between rollout workers and learner: Ray's own, with credit, order and once-only puts.

    worker   lease -> (rollout, score) -> put          waits for credit; unblocked by `release`
    learner  take -> (train) -> publish -> release     waits for groups; unblocked by `put`

It carries `TrajectoryGroup` and nothing else. Puts are idempotent by group id. Groups come out in
order of id whatever order they arrive in, so fast (short) groups do not crowd out slow ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.util.queue import Queue, _QueueActor

from cluster.ledger import Ledger
from distill.errors import DataError
from distill.types import TrajectoryGroup


class QueueClosed(RuntimeError):
    """The run is ending; there is nothing more to take."""


class QueueTimeout(RuntimeError):
    """A deadline passed. The message says who waited on whom, and for what."""


class _GroupQueueActor(_QueueActor):
    """Ray's queue actor behind a `Ledger`: out-of-order groups are parked until their turn."""

    def __init__(self, maxsize: int, ledger: Ledger) -> None:
        super().__init__(maxsize)
        self._ledger = ledger
        self._parked: dict[int, TrajectoryGroup] = {}
        self._changed = asyncio.Condition()
        self._closed = False

    async def lease(self, max_groups: int, timeout: float) -> list[int]:
        """Ids to work on, waiting for credit; empty once the queue is closed or the run leased."""
        leased: list[int] = []

        def ready() -> bool:
            leased.extend(self._ledger.lease(max_groups))
            return bool(leased) or self._closed or self._ledger.exhausted

        await self._wait(ready, timeout, lambda: "for the learner to publish and free slots")
        return leased

    async def put(self, item: TrajectoryGroup, timeout: float | None = None) -> None:
        """Raises DataError unless `item` is a TrajectoryGroup. A repeated id is dropped."""
        if not isinstance(item, TrajectoryGroup):
            raise DataError(f"the queue carries TrajectoryGroup, not {type(item).__name__}")
        async with self._changed:
            if self._ledger.deliver(item.group_id):
                self._parked[item.group_id] = item
                for group_id in self._ledger.in_order():
                    # never full: the credit window is the queue's size
                    self.queue.put_nowait(self._parked.pop(group_id))
                self._changed.notify_all()

    async def take(self, num_groups: int, timeout: float) -> list[TrajectoryGroup]:
        """The next `num_groups` groups, all of them or none.

        Raises:
            QueueClosed, QueueTimeout.
        """
        await self._wait(
            lambda: self._closed or self.qsize() >= num_groups,
            timeout,
            lambda: f"for groups {self._ledger.missing()[:8]} from the rollout workers",
        )
        if self._closed:
            raise QueueClosed("the queue was closed")
        return self.get_nowait_batch(num_groups)

    async def release(self, num_groups: int) -> None:
        async with self._changed:
            self._ledger.release(num_groups)
            self._changed.notify_all()

    async def close(self) -> None:
        """Ends every wait: leases come back empty, takes raise QueueClosed."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _wait(
        self, ready: Callable[[], bool], timeout: float, what: Callable[[], str]
    ) -> None:
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(ready), timeout)
            except TimeoutError:
                raise QueueTimeout(f"waited {timeout:.0f} s {what()}") from None


class GroupQueue(Queue):
    """`ray.util.queue.Queue` of trajectory groups. Pickles: both ends hold the same object."""

    def __init__(
        self, ledger: Ledger, maxsize: int, timeout_s: float, actor_options: dict[str, Any]
    ) -> None:
        # Ray's constructor hard-codes its actor class, so it is not called.
        self.maxsize = maxsize
        self.timeout_s = timeout_s
        actor_class = ray.remote(_GroupQueueActor)
        self.actor: Any = actor_class.options(**actor_options).remote(maxsize, ledger)

    # the learner's end

    def take(self, num_groups: int) -> list[TrajectoryGroup]:
        """See `_GroupQueueActor.take`."""
        return ray.get(self.actor.take.remote(num_groups, self.timeout_s))

    def release(self, num_groups: int) -> None:
        """Frees slots; call it once every policy engine acknowledged the new weights."""
        ray.get(self.actor.release.remote(num_groups), timeout=self.timeout_s)

    def close(self) -> None:
        ray.get(self.actor.close.remote(), timeout=self.timeout_s)


class WorkerEnd:
    """The workers' end of a `GroupQueue`, all waits asynchronous."""

    def __init__(self, queue: GroupQueue) -> None:
        self._queue = queue

    async def lease(self, max_groups: int) -> list[int]:
        return await self._queue.actor.lease.remote(max_groups, self._queue.timeout_s)

    async def put(self, group: TrajectoryGroup) -> None:
        await self._queue.actor.put.remote(group)
