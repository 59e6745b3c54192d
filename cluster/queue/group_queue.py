"""Queue between rollout workers and learner, in a Ray actor: credit, order, and exactly once.

    worker   lease -> (rollout, score) -> put or fail     waits for credit; unblocked by `publish`
    learner  take -> (train) -> push -> publish           waits for groups; unblocked by `put`
    driver   poll, forfeit, renew, expire_now, ...        observes both; calls the actor directly

Workers pack each group once. The learner's leader takes the metadata of groups, and each of the
learner's workers fetches the trajectories that it trains. The actor holds only references to the
trajectories (cluster/queue/payload.py). The run's step rule chooses the groups of a step, and does
not prefer fast (short) groups over slow ones. A repeated `put` or `take` has no effect.

The actor may be killed at any time: give it max_restarts=-1 and max_task_retries=-1. It restarts
with its ledger, from the journal, and with the delivered groups that were on disk (cluster/store).
All other groups are leased again, as are groups that a learner reports as lost with their node.
Every wait is a series of short polls, so that a call which Ray repeats blocks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cluster.handles import calls, errors
from cluster.queue.payload import (
    PART_BYTES,
    Delivery,
    Opened,
    Payload,
    found_in,
    in_arguments,
    offered,
    open_parts,
    opened_whole,
    withdraw,
)
from cluster.queue.queue_actor import POLL_S, LeaseAnswer
from distill.columns import GroupColumns
from distill.records import (
    Fetched,
    Lease,
    StepGroups,
    TrainedGroups,
    TrajectoryGroupMeta,
    TrajectoryId,
)
from distill.types import TrajectoryGroup

logger = logging.getLogger(__name__)

# Seconds added to the caller's deadline, because the actor may be restarting.
_RESTART_S = 60.0
# Maximum number of groups that are put in one call.
_MOST_PUTS = 64


class QueueClosed(RuntimeError):
    """Raised by `take` when the queue has been closed."""


class QueueTimeout(RuntimeError):
    """Raised if a deadline has passed. The message names both sides and the expected event."""


class GroupQueue:
    """Learner's side of the queue. Can be pickled: all copies refer to the same actor."""

    def __init__(self, actor: Any, *, timeout_s: float) -> None:
        """`timeout_s` is the deadline in seconds of every wait for another side."""
        self.actor, self.timeout_s = actor, timeout_s
        self._epoch: int | None = None
        self._pushing = False
        self._opened: Opened = {}  # parts that this process has fetched ahead

    def take(self, trained: TrainedGroups) -> StepGroups:
        """Take the next step after the groups that `trained` accounts for.

        A repeated call returns the same step, until `publish` reports weights that contain the
        step, or `mark_lost` reports that groups are lost.

        Raises:
            QueueClosed: the queue was closed.
            QueueTimeout: the step is not complete; the message names the missing groups.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            poll_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            taken: StepGroups | list[int] | None = self._get(
                self.actor.take.remote(trained, poll_s, self._pushing)
            )
            if taken is None:
                raise QueueClosed("the queue was closed")
            if isinstance(taken, StepGroups):
                self._epoch = taken.epoch
                return taken
            if time.monotonic() >= deadline:
                raise QueueTimeout(
                    f"waited {self.timeout_s:.0f} s for groups {taken[:8]} from the rollout workers"
                )

    def peek(
        self, trained: TrainedGroups, known: Collection[int], whole: bool
    ) -> list[TrajectoryGroupMeta] | None:
        """Forecast the step after `trained`: metadata of the groups that it would take now.

        Wait up to 2 s for groups that are not `known`; with `whole`, for the complete step. The
        call has no side effects, and may run concurrently with all other calls.

        Returns:
            None if the step was taken, or the queue is closed.
        """
        return self._get(self.actor.peek.remote(trained, frozenset(known), whole, POLL_S))

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        """Fetch trajectories of groups that were taken or, with `ahead`, will be taken.

        Raises:
            QueueTimeout: a node does not answer.
        """
        before = self._opened
        if not ahead:
            self._opened = {}
        if not places:
            return Fetched({}, {})
        payloads: dict[int, Payload] = self._get(self.actor.payloads.remote(places))
        try:
            opened, lost = open_parts(payloads, before, self.timeout_s)
        except errors.GetTimeoutError:
            raise QueueTimeout(
                f"waited {self.timeout_s:.0f} s for groups from the object store of another "
                "node: it or its network hangs"
            ) from None
        if ahead:
            self._opened = {**before, **opened}
        gone = {place.group_id for place in places} - payloads.keys()
        lost |= dict.fromkeys(sorted(gone), "the queue holds it no longer")
        return Fetched(found_in(opened, payloads, places), lost)

    def mark_lost(self, lost: Mapping[int, str]) -> None:
        """Report that trajectories of taken groups are lost, with reasons by group id.

        The groups are leased again.
        """
        reason = "; ".join(sorted(set(lost.values())))
        logger.warning("groups %s are lost and leased again: %s", sorted(lost), reason)
        self._get(self.actor.mark_lost.remote(list(lost), reason))

    def push(self, version: int, trained: TrainedGroups) -> None:
        """Report that a push of weights that account for `trained` has begun.

        The next step may then be taken. `publish` frees the slots.
        """
        self._pushing = True
        self._get(self.actor.push.remote(version, trained, self._epoch))

    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Report that weights that account for `trained` are on every policy engine.

        This frees the slots of their groups and drops the payloads. May be called concurrently with
        `take`.
        """
        self._get(self.actor.publish.remote(version, trained, self._epoch))
        self._pushing = False

    def _get(self, reference: Any) -> Any:
        seconds = self.timeout_s + _RESTART_S
        try:
            return calls.get(reference, timeout=seconds)
        except errors.GetTimeoutError:
            raise _silent(seconds) from None


def _silent(seconds: float) -> QueueTimeout:
    return QueueTimeout(
        f"the queue did not answer for {seconds:.0f} s: its actor hangs, or its node is lost"
    )


class WorkerEnd:
    """Rollout worker's side of a `GroupQueue`, with asynchronous waits.

    Can be pickled before its first use. Groups that are put while a call is in progress are sent
    together in the next call.
    """

    def __init__(self, queue: GroupQueue, worker: str, *, whole: bool = False) -> None:
        """
        Args:
            worker: name of the worker, as the driver uses it in `forfeit`.
            whole: pack each group as one part, for a single learner worker.
        """
        self._part_bytes = sys.maxsize if whole else PART_BYTES
        self._queue = queue
        self._worker = worker
        self._outbox: list[tuple[Delivery, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._sampled: dict[int, Delivery] = {}  # leased groups that only need new scores

    async def lease(self, max_groups: int) -> list[Lease]:
        """Lease up to `max_groups` groups; wait until there is at least one.

        While this call waits, groups that the worker delivers raise the limit. While all groups of
        the run have started, the call waits, too, because a group may have to be leased again. The
        driver bounds the duration of steps, evaluations and other groups, so the wait continues as
        long as the driver polls the queue.

        Returns:
            The leases; an empty list if the queue is closed.

        Raises:
            QueueTimeout: groups of the run have not started, and for `timeout_s` no weights were
                published and no driver polled the queue.
        """
        timeout_s = self._queue.timeout_s
        deadline, progress = time.monotonic() + timeout_s, None
        while True:
            poll_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            request = secrets.token_hex(5)  # if Ray repeats the call, the same groups are leased
            asked = self._queue.actor.lease.remote(self._worker, max_groups, request, poll_s)
            try:
                answer: LeaseAnswer = await self._call(asked)
            except asyncio.CancelledError:
                await self._give_back(asked)
                raise
            if answer.leases or answer.closed:
                for lease in answer.leases:  # deliveries of earlier leases are obsolete
                    self._sampled.pop(lease.group_id, None)
                self._sampled |= answer.sampled
                return answer.leases
            if answer.all_started or progress not in (None, answer.progress):
                deadline = time.monotonic() + timeout_s
            progress = answer.progress
            if time.monotonic() >= deadline:
                raise QueueTimeout(
                    f"waited {timeout_s:.0f} s for the learner to publish and free slots; no "
                    "driver polled the queue"
                )

    async def _give_back(self, asked: Any) -> None:
        """End the leases of a cancelled call, which the queue answers nevertheless."""
        answer: LeaseAnswer = await self._call(asked)
        if ids := [lease.group_id for lease in answer.leases]:
            await self._call(self._queue.actor.expire_now.remote(ids, f"{self._worker} left"))

    async def put(self, lease: Lease, meta: TrajectoryGroupMeta, columns: GroupColumns) -> None:
        """Deliver a group; return when the queue has stored it, or dropped it as a duplicate."""
        assert meta.group_id == lease.group_id
        parts = columns.parts(self._part_bytes)
        arrived = asyncio.get_running_loop().create_future()
        self._outbox.append((offered(self._queue.actor, lease, meta, parts), arrived))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await arrived

    async def _send(self) -> None:
        while self._outbox:
            batch, self._outbox = self._outbox[:_MOST_PUTS], self._outbox[_MOST_PUTS:]
            deliveries = [delivery for delivery, _ in batch]
            arguments = in_arguments(deliveries)
            try:
                await self._call(self._queue.actor.deliver.remote(self._worker, *arguments))
            except Exception as error:  # raised by the `put` calls of this batch
                for arrived in _not_cancelled(batch):
                    arrived.set_exception(error)
            finally:
                for delivery in deliveries:
                    withdraw(delivery)
            for arrived in _not_cancelled(batch):
                arrived.set_result(None)

    async def sampled(self, lease: Lease) -> TrajectoryGroup | None:
        """The sampled group of a lease that only needs new scores.

        None if the group must be sampled, or if its payload was lost with its node.
        """
        if (delivery := self._sampled.pop(lease.group_id, None)) is None:
            return None
        return await asyncio.to_thread(opened_whole, delivery, self._queue.timeout_s)

    async def fail(self, lease: Lease, reason: str) -> None:
        """Report that the group's rollout failed; the group is leased again, or set aside."""
        await self._call(self._queue.actor.fail.remote(self._worker, lease, reason))

    async def report_user_code(self, problems: Mapping[int, str]) -> None:
        """Report the groups that run environment or reward code; return when it is recorded.

        If the worker dies, these groups become suspects.
        """
        await self._call(self._queue.actor.report_user_code.remote(self._worker, problems))

    async def _call(self, reference: Any) -> Any:
        seconds = self._queue.timeout_s + _RESTART_S
        try:
            return await asyncio.wait_for(reference, seconds)
        except TimeoutError:
            raise _silent(seconds) from None


def _not_cancelled(
    batch: Sequence[tuple[Delivery, asyncio.Future[None]]],
) -> list[asyncio.Future[None]]:
    return [arrived for _, arrived in batch if not arrived.done()]
