"""The queue between rollout workers and learner: credit, order and exactly once, in a Ray actor.

    worker   lease -> (rollout, score) -> put or fail     waits for credit; unblocked by `publish`
    learner  take -> (train) -> push -> publish           waits for groups; unblocked by `put`
    driver   poll, forfeit, renew, expire_now, ...        watches both; calls the actor itself

It carries groups that the worker has packed once: the leader takes their metadata, and the
learner's workers fetch the trajectories that they train. The actor has references to those
(cluster/queue/payload.py). The run's step rule chooses the groups of a step, and does not prefer
fast (short) groups over slow ones. A repeated `put` or `take` changes nothing.

The actor may be killed at any time: give it max_restarts=-1 and max_task_retries=-1. It comes back
with its ledger, from the journal, and with the delivered groups that were on disk (cluster/store);
the others are leased again. So are those which a learner finds to be lost with their node. Every
wait is a row of short polls, so a call that Ray repeats hangs nobody.
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

# How much longer a call may take, beyond the caller's deadline: the actor may be restarting.
_RESTART_S = 60.0
# Most groups that are put in one call.
_MOST_PUTS = 64


class QueueClosed(RuntimeError):
    """The run is ending; there is nothing more to take."""


class QueueTimeout(RuntimeError):
    """A deadline passed. The message says who waited on whom, and for what."""


class GroupQueue:
    """The learner's end of the queue. Pickles: every end holds the same queue."""

    def __init__(self, actor: Any, *, timeout_s: float) -> None:
        """
        Args:
            actor: handle of a `GroupQueueActor`.
            timeout_s: how long any end waits for another.
        """
        self.actor, self.timeout_s = actor, timeout_s
        self._epoch: int | None = None
        self._pushing = False
        self._opened: Opened = {}  # ahead, in this process

    def take(self, trained: TrainedGroups) -> StepGroups:
        """The next step after the groups that `trained` accounts for.

        A repeated call returns the same step, until `publish` reports weights that contain it, or
        `lose` reports that groups are lost.

        Raises:
            QueueClosed.
            QueueTimeout: names the groups that are missing.
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

    def foresee(
        self, trained: TrainedGroups, known: Collection[int], whole: bool
    ) -> list[TrajectoryGroupMeta] | None:
        """Metadata of the groups that the step after `trained` would take in the current state.

        Waits up to 2 s for groups that are not `known`; with `whole`, for the complete step.
        A forecast without side effects, which may run concurrently with all other calls. None: the
        step was taken, or the queue is closed.
        """
        return self._get(self.actor.foresee.remote(trained, frozenset(known), whole, POLL_S))

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        """Fetches trajectories of groups that were taken, or will be (`ahead`); each of the
        learner's workers its own.

        Raises:
            QueueTimeout: some node does not answer.
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
                f"waited {self.timeout_s:.0f} s for groups from the object store of another node: "
                "it hangs, or its network does"
            ) from None
        if ahead:
            self._opened = {**before, **opened}
        gone = {place.group_id for place in places} - payloads.keys()
        lost |= dict.fromkeys(sorted(gone), "the queue holds it no longer")
        return Fetched(found_in(opened, payloads, places), lost)

    def lose(self, ids: Collection[int], reason: str) -> None:
        """Trajectories of these groups, which were taken, are lost: the groups are leased again."""
        logger.warning("groups %s are lost, and leased again: %s", sorted(ids), reason)
        self._get(self.actor.lose.remote(list(ids), reason))

    def push(self, version: int, trained: TrainedGroups) -> None:
        """Weights that account for `trained` are on their way to the policy engines.

        The step after it may be taken; slots are freed by `publish`.
        """
        self._pushing = True
        self._get(self.actor.push.remote(version, trained, self._epoch))

    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Weights that account for `trained` are on every policy engine.

        Frees their slots and drops their payloads. After a rewind, what a lost learner published
        changes nothing. May be called beside `take`.
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
        f"the queue did not answer for {seconds:.0f} s: its actor hangs, or its node is gone"
    )


class WorkerEnd:
    """A rollout worker's end of a `GroupQueue`, all waits asynchronous. Pickles before its use.

    Puts that are made while one is under way travel together.
    """

    def __init__(self, queue: GroupQueue, worker: str, *, whole: bool = False) -> None:
        """
        Args:
            worker: the name that the driver forfeits it by.
            whole: one worker of the learner trains on all of a group, so that it is one part.
        """
        self._part_bytes = sys.maxsize if whole else PART_BYTES
        self._queue = queue
        self._worker = worker
        self._token = ""
        self._requests = 0
        self._outbox: list[tuple[Delivery, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._sampled: dict[int, Delivery] = {}  # of leased groups: those that are there

    async def lease(self, max_groups: int) -> list[Lease]:
        """Up to `max_groups` groups to work on, and as many more as the worker delivers meanwhile.

        At least one; none once the queue is closed.

        Waits for credit while every group is leased, since one may have to be leased again.

        How long a step, an evaluation or another worker's group may take is for the driver to say:
        while that looks at the queue, the wait goes on.

        Raises:
            QueueTimeout: groups of the run have yet to start, and for `timeout_s` no weights were
                published and no driver looked.
        """
        timeout_s = self._queue.timeout_s
        deadline, progress = time.monotonic() + timeout_s, None
        while True:
            poll_s = max(0.0, min(POLL_S, deadline - time.monotonic()))
            asked = self._queue.actor.lease.remote(
                self._worker, max_groups, self._request(), poll_s
            )
            try:
                answer: LeaseAnswer = await self._call(asked)
            except asyncio.CancelledError:
                await self._give_back(asked)
                raise
            if answer.leases or answer.closed:
                for lease in answer.leases:  # what was kept of an earlier lease is of no use
                    self._sampled.pop(lease.group_id, None)
                self._sampled |= answer.sampled
                return answer.leases
            if answer.all_started or progress not in (None, answer.progress):
                deadline = time.monotonic() + timeout_s
            progress = answer.progress
            if time.monotonic() >= deadline:
                raise QueueTimeout(
                    f"waited {timeout_s:.0f} s for the learner to publish and free slots, and no "
                    "driver looked at the queue"
                )

    async def _give_back(self, asked: Any) -> None:
        """The queue leases to a call that is not awaited any more, too."""
        answer: LeaseAnswer = await self._call(asked)
        if ids := [lease.group_id for lease in answer.leases]:
            await self._call(self._queue.actor.expire_now.remote(ids, f"{self._worker} left"))

    def _request(self) -> str:
        """Names a call, so that Ray's repetition of it leases nothing more."""
        self._token = self._token or secrets.token_hex(4)
        self._requests += 1
        return f"{self._token}-{self._requests}"

    async def put(self, lease: Lease, meta: TrajectoryGroupMeta, columns: GroupColumns) -> None:
        """Deliver a group. Returns once the queue has it, or has dropped it as a repeat.

        Raises:
            QueueTimeout: the queue does not answer.
        """
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
            except Exception as error:  # it belongs to those who put
                for arrived in _not_cancelled(batch):
                    arrived.set_exception(error)
            finally:
                for delivery in deliveries:
                    withdraw(delivery)
            for arrived in _not_cancelled(batch):
                arrived.set_result(None)

    async def sampled(self, lease: Lease) -> TrajectoryGroup | None:
        """The group of a lease, if it is there and is to be scored again; None: it is to be made,
        or was lost with its node."""
        if (delivery := self._sampled.pop(lease.group_id, None)) is None:
            return None
        return await asyncio.to_thread(opened_whole, delivery, self._queue.timeout_s)

    async def fail(self, lease: Lease, reason: str) -> None:
        """The group's own rollout failed; it is tried again, or set aside."""
        await self._call(self._queue.actor.fail.remote(self._worker, lease, reason))

    async def inside(self, problems: Mapping[int, str]) -> None:
        """Reports the groups in an environment's or a reward's code: if the worker dies, they
        are suspects. Returns once the queue knows."""
        await self._call(self._queue.actor.inside.remote(self._worker, problems))

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
