"""Actor behind `GroupQueue`: a `Ledger`, its journal, and references to delivered groups.

The actor writes delivered groups to disk soon after they arrived, in a thread, and reads them when
it is restarted or begins a new job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from cluster.queue.journal import Journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import CanaryAnswer, Kept, LedgerSettings, QueueStatus, adopted
from cluster.queue.payload import (
    Delivery,
    Payload,
    claim_all,
    restored,
    select_payloads,
    whole_columns,
)
from cluster.store.group_format import UNWRITABLE, GroupRow
from cluster.store.group_store import GROUPS, GroupStore
from distill.durable_files import disk_remedy
from distill.records import Lease, StepGroups, TrainedGroups, TrajectoryGroupMeta, TrajectoryId
from distill.types import TrajectoryGroup

logger = logging.getLogger(__name__)

# Longest wait of a call in the actor, seconds.
POLL_S = 2.0
# Interval between checks for expired leases, seconds.
_EXPIRE_EVERY_S = 1.0
# Time for which deliveries are gathered before they are written to disk, seconds.
_KEEP_EVERY_S = 0.5
# Bytes of the deliveries that are written together, and of those that may wait for the disk.
# Further deliveries are not kept.
_BATCH_BYTES, _MOST_WAITING = 32 << 20, 256 << 20
# Longest wait for the disk at the end of a run, seconds: less than the driver waits for the queue.
_CLOSE_S = 4.0
# Longest wait for a part of a delivery from another node, seconds.
_FETCH_S = 60.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    """Answer to a worker's request for leases.

    Attributes:
        sampled: leased groups that are already sampled and only need new scores, by id.
        progress: changes whenever weights are published or lost, and whenever the driver requests
            the queue's status; see `WorkerEnd.lease`.
    """

    leases: list[Lease]
    sampled: dict[int, Delivery]
    closed: bool
    all_started: bool
    progress: tuple[int, int, int]


class GroupQueueActor:
    """Holds a `Ledger`, and delivered groups until weights contain them. Does not use Ray."""

    def __init__(
        self, run: str, run_id: str, trained: TrainedGroups, settings: LedgerSettings, journal: str
    ) -> None:
        """
        Args:
            run: identifier of this queue. A journal whose last start has this value is continued.
            run_id: id of the run, written to the journal; "" for none.
            trained: groups that the starting weights account for.
            journal: path of the ledger's journal, on storage that the actor's node reaches. The
                folder `groups` is beside it.
        """
        before = replay(journal)
        self._journal = Journal(journal)
        self._store = GroupStore(Path(journal).with_name(GROUPS))
        self._closed = False
        self._delivered: dict[int, Delivery] = {}
        self._to_score: dict[int, Delivery] = {}  # groups to be scored again, leased or pending
        if before.run == run and before.ledger is not None:
            self._ledger, self._closed = before.ledger, before.ended
            self._ledger.record = self._journal.record
            self._recover()
        else:
            earlier = before.ledger if before.run_id == run_id else None
            self._start(run, run_id, before.epoch + 1, settings, trained, earlier)
        # Deliveries that must be written to disk, and the task that writes them.
        self._to_keep: dict[int, Delivery] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None
        self._storing = asyncio.Lock()
        self._unkept = ""  # reason why groups are not kept; reported once
        self._deaths: Counter[str] = Counter()
        # Notified when leases become possible, and when a step may be ready. Separate conditions,
        # so that a delivery does not wake every worker.
        self._may_start, self._may_train = asyncio.Condition(), asyncio.Condition()
        self._checked_at = time.monotonic()
        self._status_requests = 0  # status requests of the driver

    def _recover(self) -> None:
        """Continue after the death of this queue's process, with the groups that are on disk."""
        ledger = self._ledger
        leases = {i: each.lease(i) for i, each in ledger.kept.items() if ledger.is_in_progress(i)}
        groups = self._store.read(leases.values())
        ledger.recover(groups)
        for group_id, group in groups.items():
            if ledger.is_in_progress(group_id):  # `recover` may have set the group aside
                into = self._delivered if ledger.holds(group_id) else self._to_score
                into[group_id] = restored(leases[group_id], group)

    def _start(
        self,
        run: str,
        run_id: str,
        epoch: int,
        settings: LedgerSettings,
        trained: TrainedGroups,
        earlier: Ledger | None,
    ) -> None:
        """Begin a new job, and take back groups of the `earlier` job, to be scored again."""
        back: dict[int, TrajectoryGroup] = {}
        taken: dict[int, Kept] = {}
        if earlier is not None:
            back = self._store.read([each.lease(i) for i, each in earlier.kept.items()])
            version = len(trained) // settings.groups_per_step
            usable = {i for i, group in back.items() if _is_usable(group, version, earlier)}
            kept = {i: each for i, each in earlier.kept.items() if i in usable}
            taken = adopted(kept, trained, settings)
        names = {"run": run} | ({"run_id": run_id} if run_id else {})
        if taken:
            names |= {"adopted": {str(group_id): list(kept) for group_id, kept in taken.items()}}
        self._journal.record(
            "start", **names, epoch=epoch, settings=asdict(settings), **trained.to_json()
        )
        self._journal.sync()
        self._ledger = Ledger(
            settings, trained, epoch=epoch, record=self._journal.record, adopted=taken
        )
        for group_id, kept in taken.items():
            self._to_score[group_id] = restored(kept.lease(group_id), back[group_id])
        self._delete_unneeded(frozenset(taken))

    # the workers' end

    async def lease(self, worker: str, max_groups: int, request: str, poll_s: float) -> LeaseAnswer:
        await self._expire()
        deaths = self._deaths[worker]  # the call ends if the worker dies
        # Groups that the worker delivers during the call raise the limit. Otherwise groups for
        # which credit arrives together would start separately, and engines would run more batches.
        most = max_groups + self._ledger.leased_to(worker)
        leases = await _until(
            self._may_start,
            lambda: (
                self._closed
                or self._deaths[worker] > deaths
                or self._ledger.lease(worker, most - self._ledger.leased_to(worker), request)
            ),
            poll_s,
        )
        leases = leases if isinstance(leases, list) else []
        ids = [lease.group_id for lease in leases]
        return LeaseAnswer(
            leases=leases,
            sampled={i: self._to_score[i] for i in ids if i in self._to_score},
            closed=self._closed,
            all_started=self._ledger.all_started,
            progress=(self._ledger.epoch, len(self._ledger.published), self._status_requests),
        )

    async def deliver(self, worker: str, *batches: Sequence[Delivery]) -> None:
        # Batches are separate arguments, because Ray sends arguments of at most 100 kB in the call.
        deliveries = await claim_all(list(chain(*batches)))  # before the journal records them
        suspects = self._ledger.faults.any_suspected
        new: dict[int, Delivery] = {}
        with self._journal.together():
            for delivery in deliveries:
                lease, meta = delivery.lease, delivery.meta
                if self._ledger.deliver(lease, worker, meta.constant_reward, meta.scored_by):
                    self._delivered[lease.group_id] = new[lease.group_id] = delivery
                    self._to_score.pop(lease.group_id, None)
        self._keep_later(new)
        ids = [delivery.lease.group_id for delivery in deliveries]
        distrusted = self._rescore([i for i in ids if not self._ledger.holds(i)])
        await _wake(self._may_train)
        # A worker without leases may now start a suspect; and every worker may start a group if a
        # delivered one will be replaced.
        constant = any(each.meta.constant_reward is not None for each in deliveries)
        if suspects or distrusted or constant:
            await _wake(self._may_start)

    async def report_user_code(self, worker: str, problems: dict[int, str]) -> None:
        self._ledger.report_user_code(worker, problems)

    async def fail(self, worker: str, lease: Lease, reason: str) -> None:
        self._ledger.fail(lease, reason, worker)
        await self._wake_all()

    # groups on disk

    def _keep_later(self, deliveries: Mapping[int, Delivery]) -> None:
        if (waiting := _size(self._to_keep)) > _MOST_WAITING:
            self._report_unkept(f"{waiting >> 20} MB wait to be written: the disk is too slow")
            return
        self._to_keep |= deliveries
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep())

    def _report_unkept(self, reason: str) -> None:
        """Report once that groups are not kept; the run continues without them."""
        if not self._unkept:
            self._unkept = reason
            logger.warning("groups are not kept in out/%s: %s", GROUPS, reason)

    async def _keep(self) -> None:
        """Write the waiting deliveries to disk in batches, until none is left."""
        while self._to_keep:
            if not self._closed and _size(self._to_keep) < _BATCH_BYTES:
                await asyncio.sleep(_KEEP_EVERY_S)
            batch: dict[int, Delivery] = {}
            size = 0
            for group_id, delivery in list(self._to_keep.items()):
                if not self._ledger.holds(group_id):  # trained in the meantime
                    del self._to_keep[group_id]
                elif size < _BATCH_BYTES:
                    batch[group_id] = delivery
                    size += delivery.payload.nbytes
            if not batch:
                continue
            async with self._storing:
                written = await asyncio.to_thread(self._write, self._ledger.epoch, batch)
            # Without deliveries that were replaced or dropped during the write.
            current = [i for i, each in batch.items() if self._to_keep.get(i) is each]
            for group_id in current:
                del self._to_keep[group_id]
            self._ledger.keep({i: batch[i].lease.attempt for i in current if i in written})

    def _write(self, epoch: int, deliveries: Mapping[int, Delivery]) -> set[int]:
        """Write groups to disk; return the ids of the written ones. Runs in a thread."""
        rows = [
            GroupRow(each.meta, columns, each.lease.attempt)
            for each in deliveries.values()
            if (columns := whole_columns(each, _FETCH_S)) is not None
        ]
        if not rows:
            return set()
        try:
            self._store.append(epoch, rows)
        except UNWRITABLE as error:
            self._report_unkept(f"{error}. {disk_remedy(error)}")
            return set()
        return {row.facts.group_id for row in rows}

    def _rescore(self, ids: Sequence[int]) -> bool:
        """Move groups that the ledger made pending again from the delivered ones to `_to_score`.

        Groups whose rewards are wrong are dropped instead, to be sampled again. Returns True if any
        of `ids` was stored.
        """
        moved = {i: self._delivered.pop(i) for i in ids if i in self._delivered}
        for group_id in moved:
            self._to_keep.pop(group_id, None)
        resampled = self._ledger.resampled
        self._to_score |= {i: each for i, each in moved.items() if i not in resampled}
        resampled.clear()
        return bool(moved)

    # the learner's end

    async def take(
        self, trained: TrainedGroups, poll_s: float, pushing: bool = False
    ) -> StepGroups | list[int] | None:
        """Take the next step. If it is not ready, return the ids that it waits for.

        None if the queue is closed.
        """
        await self._until_ready(poll_s)
        if self._closed:
            return None
        step = self._ledger.take(trained, pushing=pushing)
        if step is None:
            return self._ledger.missing()
        return replace(step, groups_P=[self._delivered[i].meta for i in step.group_ids])

    async def peek(
        self, trained: TrainedGroups, known: Collection[int], whole: bool, poll_s: float
    ) -> list[TrajectoryGroupMeta] | None:
        def new_ids() -> list[int] | None:
            step = None if self._closed else self._ledger.peek(trained)
            if step is None:
                return None
            if whole and not step.whole:
                return []
            return [i for i in step.group_ids if i not in known]

        await _until(self._may_train, lambda: new_ids() != [], poll_s)
        ids = new_ids()
        return None if ids is None else [self._delivered[i].meta for i in ids]

    async def mark_lost(self, ids: Sequence[int], reason: str) -> None:
        # If only a group's hidden states are lost, and its columns still exist, the group is scored
        # again. A worker that finds no columns samples the group again.
        for group_id in self._ledger.mark_lost(ids, reason):
            delivery = self._delivered.pop(group_id)
            if self._ledger.is_in_progress(group_id):
                self._to_score[group_id] = delivery
            self._to_keep.pop(group_id, None)
        await self._wake_all()

    async def payloads(self, places: Sequence[TrajectoryId]) -> dict[int, Payload]:
        return select_payloads(self._delivered, places)

    async def push(self, version: int, trained: TrainedGroups, epoch: int | None) -> None:
        self._ledger.push(version, trained, epoch)
        await self._after_step()

    async def publish(self, version: int, trained: TrainedGroups, epoch: int | None) -> None:
        self._ledger.publish(version, trained, epoch)
        await self._after_step()

    async def _after_step(self) -> None:
        # Before a checkpoint contains these groups: otherwise, after a crash of the machine, the
        # journal could lack groups of the checkpoint.
        self._journal.sync()
        self._delivered = {i: each for i, each in self._delivered.items() if self._ledger.holds(i)}
        self._to_score = {
            i: each for i, each in self._to_score.items() if self._ledger.is_in_progress(i)
        }
        await self._wake_all()  # the next step may be ready: its age limit has changed

    # the driver's end

    async def poll(self, poll_s: float = POLL_S) -> bool:
        """Wait up to `poll_s` seconds for the next step, and take it.

        The step is taken before the learner requests it. Otherwise a bad canary could make one of
        its groups pending again while the learner waits, when no scorer can be admitted.

        Returns:
            True if the step is ready; False if it is not, or if the queue is closed.
        """
        await self._until_ready(poll_s)
        return not self._closed and self._ledger.take() is not None

    async def _until_ready(self, poll_s: float) -> None:
        await self._expire()
        await self._restart_overdue()
        await _until(self._may_train, lambda: self._closed or self._ledger.ready(), poll_s)

    async def forfeit(self, worker: str, reason: str) -> list[int]:
        self._deaths[worker] += 1
        ids = self._ledger.forfeit(worker, reason)
        await self._wake_all()
        return ids

    async def expire_now(self, ids: Sequence[int] | None, reason: str) -> list[int]:
        """End the leases of groups (None: all) early; return the ids of those that were leased."""
        expired = self._ledger.release(ids, reason)
        await self._wake_all()
        return expired

    async def renew(self, ids: Sequence[int]) -> None:
        self._ledger.renew(ids)

    async def rewind(self, trained: TrainedGroups, reason: str) -> int:
        self._ledger.rewind(trained, reason)
        self._delivered.clear()
        self._to_score.clear()
        self._to_keep.clear()
        await self._wake_all()
        return self._ledger.epoch

    async def scorer(self, replica: int, fields: Mapping[str, Any]) -> None:
        self._ledger.scorer(replica, **fields)

    async def ask(self, replicas: Sequence[int]) -> None:
        self._ledger.ask(replicas)

    async def canary(self, replica: int, good: bool, fields: Mapping[str, Any]) -> CanaryAnswer:
        answer = self._ledger.canary(replica, good, **fields)
        if self._rescore(answer.to_rescore):
            await self._wake_all()
        return answer

    async def commit(self, step: int, watermark: int) -> None:
        self._ledger.commit(step, watermark)
        self._dropping = asyncio.create_task(self._drop_committed())

    async def _drop_committed(self) -> None:
        """Delete files whose groups are all in a checkpoint."""
        async with self._storing:
            await asyncio.to_thread(self._delete_unneeded, frozenset(self._ledger.kept))

    def _delete_unneeded(self, needed: Collection[int]) -> None:
        try:
            self._store.retain(needed)
        except OSError as error:
            logger.warning("kept groups cannot be deleted: %s", error)

    async def status(self) -> QueueStatus:
        self._status_requests += 1
        await self._expire()
        return replace(self._ledger.status(), unkept=self._unkept)

    async def close(self) -> None:
        """End every wait. Later deliveries are still journalled."""
        if not self._closed:
            self._closed = True
            self._journal.record("end")
            self._journal.sync()
        await self._wake_all()
        # A resumed run takes back the groups that are on disk.
        if writing := [each for each in (self._keeping, self._dropping) if each is not None]:
            await asyncio.wait(writing, timeout=_CLOSE_S)

    async def _expire(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < _EXPIRE_EVERY_S:
            return
        self._checked_at = now
        if self._ledger.expire(now):
            await self._wake_all()

    async def _restart_overdue(self) -> None:
        if ids := self._ledger.overdue():
            self._ledger.restart_groups(ids)
            for group_id in ids:
                self._to_score.pop(group_id, None)  # its data is as old as the ended lease
            await self._wake_all()

    async def _wake_all(self) -> None:
        await _wake(self._may_start)
        await _wake(self._may_train)


def _size(deliveries: Mapping[int, Delivery]) -> int:
    return sum(each.payload.nbytes for each in deliveries.values())


def _is_usable(group: TrajectoryGroup, version: int, earlier: Ledger) -> bool:
    """True if a job that starts from weights of `version` can train a group of the `earlier` job.

    A group is not usable if it was sampled by newer weights, which are lost; if it was sampled by
    its teacher, whose canaries ended with that job; or if a reward model gave its rewards and no
    canary has proven them.
    """
    newest = max(int(segment.versions_T.max()) for segment in group.segments())
    return (
        newest <= version
        and not group.by_teacher
        and not earlier.provenance.has_unproven_rewards(group.group_id)
    )


async def _until(
    changed: asyncio.Condition, ready: Callable[[], Value], poll_s: float
) -> Value | None:
    """Wait for a true value of `ready` and return it; None after `poll_s` seconds."""
    async with changed:
        with suppress(TimeoutError):
            async with asyncio.timeout(poll_s):  # in this task, so that no value is lost
                return await changed.wait_for(ready)
    return None


async def _wake(changed: asyncio.Condition) -> None:
    async with changed:
        changed.notify_all()
