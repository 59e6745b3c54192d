"""The queue between rollout workers and learner: Ray's own, with credit, order and exactly once.

    worker   lease -> (rollout, score) -> put or fail     waits for credit; unblocked by `publish`
    learner  take -> (train) -> push -> publish           waits for groups; unblocked by `put`
    driver   poll, forfeit, expire_now, rewind, commit    watches both

It carries `TrajectoryGroup` and nothing else, packed once by the worker and unpacked once by the
learner. Groups come out in order of id whatever order they arrive in, so fast (short) groups do not
crowd out slow ones; a repeated `put` or `take` changes nothing.

The actor may be killed at any time: give it max_restarts=-1 and max_task_retries=-1. It comes back
with its ledger, from the journal, and without payloads: groups that were delivered and not yet
published are leased again. Every wait is a row of short polls, so a call that Ray repeats hangs
nobody.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import ray
from ray.exceptions import GetTimeoutError
from ray.util.queue import Queue, _QueueActor

from cluster.journal import Journal, replay
from cluster.ledger import Ledger, QueueStatus
from cluster.payload import pack, unpack
from distill.delivery import Lease, Taken, TrainedGroups
from distill.errors import DataError
from distill.types import TrajectoryGroup

# Longest a call waits in the actor, seconds.
_POLL_S = 2.0
# How much longer a call may take, beyond the caller's deadline: the actor may be restarting.
_RESTART_S = 60.0
# How often leases are looked over, seconds.
_EXPIRE_EVERY_S = 1.0
# Puts that go in one call: as many as wait, up to this size.
_MAX_PUT_BYTES = 64 << 20

Value = TypeVar("Value")


class QueueClosed(RuntimeError):
    """The run is ending; there is nothing more to take."""


class QueueTimeout(RuntimeError):
    """A deadline passed. The message says who waited on whom, and for what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeaseAnswer:
    """`progress` changes whenever weights are published or lost; see `WorkerEnd.lease`."""

    leases: list[Lease]
    closed: bool
    all_started: bool
    progress: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakeAnswer:
    """`payloads` is None if the step is not ready."""

    payloads: list[bytes] | None
    set_aside: dict[int, str]
    missing: list[int]
    closed: bool
    epoch: int


class _GroupQueueActor(_QueueActor):
    """Ray's queue actor behind a `Ledger`: groups are parked until weights contain them."""

    def __init__(
        self, run: str, trained: TrainedGroups, settings: Mapping[str, Any], journal: str
    ) -> None:
        """`run` names this queue: a journal that ends with it is this one's, and is continued."""
        super().__init__(0)
        before = replay(journal)
        self._journal = Journal(journal)
        self._closed = False
        if before.run == run and before.ledger is not None:
            self._ledger, self._closed = before.ledger, before.ended
            self._ledger.record = self._journal.record
            self._ledger.recover()
        else:
            epoch = before.epoch + 1
            self._journal.record(
                "start", run=run, epoch=epoch, settings=dict(settings), **trained.to_json()
            )
            self._journal.sync()
            self._ledger = Ledger(
                trained=trained, epoch=epoch, record=self._journal.record, **settings
            )
        self._payloads: dict[int, bytes] = {}
        # Leases become possible, or a step ready: two crowds, woken apart.
        self._may_start, self._may_train = asyncio.Condition(), asyncio.Condition()
        self._looked_over = time.monotonic()

    # the workers' end

    async def lease(
        self, worker: str, max_groups: int, request: str, poll_s: float
    ) -> _LeaseAnswer:
        await self._expire()
        leases = await _until(
            self._may_start,
            lambda: self._closed or self._ledger.lease(worker, max_groups, request),
            poll_s,
        )
        return _LeaseAnswer(
            leases=leases if isinstance(leases, list) else [],
            closed=self._closed,
            all_started=self._ledger.all_started,
            progress=(self._ledger.epoch, self._ledger.published),
        )

    async def deliver(self, worker: str, leases: Sequence[Lease], *payloads: bytes) -> None:
        # Arguments of their own: each of at most 100 kB travels in the call, without the store.
        with self._journal.together():
            for lease, payload in zip(leases, payloads, strict=True):
                if self._ledger.deliver(lease, worker):
                    self._payloads[lease.group_id] = payload
        await _wake(self._may_train)

    async def fail(self, worker: str, lease: Lease, reason: str) -> None:
        self._ledger.fail(lease, reason, worker)
        await self._wake_all()

    # the learner's end

    async def take(self, trained: TrainedGroups, num_groups: int, poll_s: float) -> _TakeAnswer:
        await self._expire()
        watermark = trained.watermark
        await _until(
            self._may_train,
            lambda: self._closed or self._ledger.ready(watermark, num_groups),
            poll_s,
        )
        step = None if self._closed else self._ledger.take(watermark, num_groups)
        return _TakeAnswer(
            payloads=[self._payloads[group_id] for group_id in step.group_ids] if step else None,
            set_aside=step.set_aside if step else {},
            missing=[] if step else self._ledger.missing(watermark, num_groups),
            closed=self._closed,
            epoch=self._ledger.epoch,
        )

    async def publish(self, version: int, watermark: int, epoch: int | None) -> None:
        self._ledger.publish(version, watermark, epoch)
        self._drop_payloads()
        await _wake(self._may_start)

    def _drop_payloads(self) -> None:
        for group_id in [i for i in self._payloads if i < self._ledger.published]:
            del self._payloads[group_id]

    # the driver's end

    async def poll(self, watermark: int, num_groups: int, poll_s: float) -> bool:
        await self._expire()
        await _until(
            self._may_train,
            lambda: self._closed or self._ledger.ready(watermark, num_groups),
            poll_s,
        )
        return not self._closed and self._ledger.ready(watermark, num_groups) is not None

    async def forfeit(self, worker: str, reason: str) -> list[int]:
        ids = self._ledger.forfeit(worker, reason)
        await self._wake_all()
        return ids

    async def expire_now(self, ids: Sequence[int] | None, reason: str) -> list[int]:
        expired = self._ledger.release(ids, reason)
        await self._wake_all()
        return expired

    async def rewind(self, trained: TrainedGroups, reason: str) -> None:
        self._ledger.rewind(trained, reason)
        self._payloads.clear()
        await self._wake_all()

    async def commit(self, step: int, watermark: int) -> None:
        self._ledger.commit(step, watermark)
        self._journal.sync()

    async def status(self) -> QueueStatus:
        await self._expire()
        return self._ledger.status()

    async def close(self) -> None:
        """Ends every wait. What is put afterwards is still written down."""
        if not self._closed:
            self._closed = True
            self._journal.record("end")
            self._journal.sync()
        await self._wake_all()

    async def _expire(self) -> None:
        now = time.monotonic()
        if now - self._looked_over < _EXPIRE_EVERY_S:
            return
        self._looked_over = now
        if self._ledger.expire(now):
            await self._wake_all()

    async def _wake_all(self) -> None:
        await _wake(self._may_start)
        await _wake(self._may_train)

    # what Ray's queue has besides: its size is true, and nothing passes by the ledger

    def qsize(self) -> int:
        return len(self._payloads)

    def empty(self) -> bool:
        return not self._payloads

    def full(self) -> bool:
        return self._ledger.credit == 0

    async def put(self, item: Any, timeout: float | None = None) -> NoReturn:
        raise _no_such_way()

    async def get(self, timeout: float | None = None) -> NoReturn:
        raise _no_such_way()

    def put_nowait(self, item: Any) -> NoReturn:
        raise _no_such_way()

    def put_nowait_batch(self, items: Any) -> NoReturn:
        raise _no_such_way()

    def get_nowait(self) -> NoReturn:
        raise _no_such_way()

    def get_nowait_batch(self, num_items: int) -> NoReturn:
        raise _no_such_way()


def _no_such_way() -> DataError:
    return DataError(
        "groups enter the queue by WorkerEnd.put, on a lease, and leave it by GroupQueue.take"
    )


async def _until(
    changed: asyncio.Condition, ready: Callable[[], Value], poll_s: float
) -> Value | None:
    """What `ready` returns once it is true; None if that takes longer than `poll_s`."""
    if found := ready():
        return found
    found_later: list[Value] = []  # kept even if the deadline passes at the same moment

    def look() -> bool:
        if found := ready():
            found_later.append(found)
        return bool(found_later)

    async with changed:
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait_for(look), poll_s)
    return found_later[0] if found_later else None


async def _wake(changed: asyncio.Condition) -> None:
    async with changed:
        changed.notify_all()


class GroupQueue(Queue):
    """`ray.util.queue.Queue` of trajectory groups. Pickles: every end holds the same queue."""

    def __init__(
        self,
        *,
        trained: TrainedGroups,
        groups_per_step: int,
        max_staleness: int,
        total_groups: int,
        lease_s: float,
        max_failures: int = 3,
        max_deaths: int = 10,
        journal: str,
        timeout_s: float,
        actor_options: dict[str, Any],
    ) -> None:
        """
        Args:
            journal: path of the ledger's journal, on storage that the actor's node reaches.
            timeout_s: how long any end waits for another.
            actor_options: Ray's; with max_restarts and max_task_retries of -1 it is never lost.

        The others are those of `Ledger`.
        """
        # Ray's constructor hard-codes its actor class, so it is not called.
        self.maxsize = groups_per_step * (max_staleness + 1)
        self.timeout_s = timeout_s
        self._epoch: int | None = None
        settings = {
            "groups_per_step": groups_per_step,
            "max_staleness": max_staleness,
            "total_groups": total_groups,
            "lease_s": lease_s,
            "max_failures": max_failures,
            "max_deaths": max_deaths,
        }
        actor_class = ray.remote(_GroupQueueActor)
        self.actor: Any = actor_class.options(**actor_options).remote(
            secrets.token_hex(8), trained, settings, journal
        )

    # the learner's end

    def take(self, trained: TrainedGroups, num_groups: int) -> Taken:
        """The next `num_groups` groups after what `trained` accounts for, and what they skip.

        The same question gets the same answer, until `publish` says that weights contain it.

        Raises:
            QueueClosed.
            QueueTimeout: names the groups that are missing.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            poll_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            answer: _TakeAnswer = self._get(self.actor.take.remote(trained, num_groups, poll_s))
            if answer.closed:
                raise QueueClosed("the queue was closed")
            if answer.payloads is not None:
                self._epoch = answer.epoch
                groups_P = [unpack(payload) for payload in answer.payloads]
                return Taken(groups_P=groups_P, set_aside=answer.set_aside)
            if time.monotonic() >= deadline:
                raise QueueTimeout(
                    f"waited {self.timeout_s:.0f} s for groups {answer.missing[:8]} from the "
                    "rollout workers"
                )

    def publish(self, version: int, watermark: int) -> None:
        """Weights that account for everything below `watermark` are on every policy engine.

        Frees their slots and drops their payloads. After a rewind, what a lost learner published
        changes nothing.
        """
        self._get(self.actor.publish.remote(version, watermark, self._epoch))

    # the driver's end

    def poll(self, watermark: int, num_groups: int) -> Any:
        """A reference to True once a `take` would not wait; to False after 2 s, or when closed."""
        return self.actor.poll.remote(watermark, num_groups, _POLL_S)

    def forfeit(self, worker: str, reason: str) -> list[int]:
        """The worker died: returns the ids that are to be leased again."""
        return self._get(self.actor.forfeit.remote(worker, reason))

    def expire_now(self, ids: Sequence[int] | None = None, reason: str = "it hangs") -> list[int]:
        """Gives groups under way (None: all of them) to others; returns those that were."""
        return self._get(self.actor.expire_now.remote(ids, reason))

    def rewind(self, trained: TrainedGroups, reason: str) -> None:
        """The learner went back to a checkpoint, which accounts for `trained`."""
        self._get(self.actor.rewind.remote(trained, reason))

    def commit(self, step: int, watermark: int) -> None:
        """A checkpoint that accounts for everything below `watermark` is on disk."""
        self._get(self.actor.commit.remote(step, watermark))

    def status(self) -> QueueStatus:
        return self._get(self.actor.status.remote())

    def close(self) -> None:
        """Ends every wait: leases come back empty, takes raise QueueClosed, polls say False."""
        self._get(self.actor.close.remote())

    def _get(self, reference: Any) -> Any:
        seconds = self.timeout_s + _RESTART_S
        try:
            return ray.get(reference, timeout=seconds)
        except GetTimeoutError:
            raise _silent(seconds) from None


def _silent(seconds: float) -> QueueTimeout:
    return QueueTimeout(
        f"the queue did not answer for {seconds:.0f} s: its actor hangs, or its node is gone"
    )


class WorkerEnd:
    """A rollout worker's end of a `GroupQueue`, all waits asynchronous. Pickles before its use.

    Puts that are made while one is under way travel together.
    """

    def __init__(self, queue: GroupQueue, worker: str) -> None:
        """`worker` is the name that the driver forfeits it by."""
        self._queue = queue
        self._worker = worker
        self._token = ""
        self._requests = 0
        self._outbox: list[tuple[Lease, bytes, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def lease(self, max_groups: int) -> list[Lease]:
        """Up to `max_groups` groups to work on, at least one; none once the queue is closed.

        Waits for credit while every group is leased, since one may have to be leased again.

        Raises:
            QueueTimeout: groups of the run have yet to start, and no weights were published for
                `timeout_s`.
        """
        timeout_s = self._queue.timeout_s
        deadline, progress = time.monotonic() + timeout_s, None
        while True:
            poll_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            asked = self._queue.actor.lease.remote(
                self._worker, max_groups, self._request(), poll_s
            )
            try:
                answer: _LeaseAnswer = await self._call(asked)
            except asyncio.CancelledError:
                await self._give_back(asked)
                raise
            if answer.leases or answer.closed:
                return answer.leases
            if answer.all_started or progress not in (None, answer.progress):
                deadline = time.monotonic() + timeout_s
            progress = answer.progress
            if time.monotonic() >= deadline:
                raise QueueTimeout(
                    f"waited {timeout_s:.0f} s for the learner to publish and free slots"
                )

    async def _give_back(self, asked: Any) -> None:
        """The queue leases to a call that is not awaited any more, too."""
        answer: _LeaseAnswer = await self._call(asked)
        if ids := [lease.group_id for lease in answer.leases]:
            await self._call(self._queue.actor.expire_now.remote(ids, f"{self._worker} left"))

    def _request(self) -> str:
        """Names a call, so that Ray's repetition of it leases nothing more."""
        self._token = self._token or secrets.token_hex(4)
        self._requests += 1
        return f"{self._token}-{self._requests}"

    async def put(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Returns once the queue has it, or has dropped it as a repeat.

        Raises:
            DataError: not a group, or not the one that was leased.
            QueueTimeout: the queue does not answer.
        """
        if not isinstance(group, TrajectoryGroup):
            raise DataError(f"the queue carries TrajectoryGroup, not {type(group).__name__}")
        if group.group_id != lease.group_id:
            raise DataError(f"group {group.group_id} was put on the lease of {lease.group_id}")
        payload = pack(group)
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.append((lease, payload, arrived))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await arrived

    async def _send(self) -> None:
        while self._outbox:
            batch, size = [], 0
            while self._outbox and (not batch or size + len(self._outbox[0][1]) <= _MAX_PUT_BYTES):
                batch.append(self._outbox.pop(0))
                size += len(batch[-1][1])
            leases, payloads, waiting = zip(*batch, strict=True)
            try:
                await self._call(self._queue.actor.deliver.remote(self._worker, leases, *payloads))
            except Exception as error:  # it belongs to those who put
                for arrived in _not_cancelled(waiting):
                    arrived.set_exception(error)
            for arrived in _not_cancelled(waiting):
                arrived.set_result(None)

    async def fail(self, lease: Lease, reason: str) -> None:
        """The group's own rollout failed; it is tried again, or set aside."""
        await self._call(self._queue.actor.fail.remote(self._worker, lease, reason))

    async def _call(self, reference: Any) -> Any:
        seconds = self._queue.timeout_s + _RESTART_S
        try:
            return await asyncio.wait_for(reference, seconds)
        except TimeoutError:
            raise _silent(seconds) from None


def _not_cancelled(futures: Sequence[asyncio.Future[None]]) -> list[asyncio.Future[None]]:
    return [future for future in futures if not future.done()]
