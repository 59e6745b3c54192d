"""The actor behind `GroupQueue`: a `Ledger`, its journal, and references to delivered groups."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from cluster.queue.journal import Journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_answers import CanaryAnswer, QueueStatus
from cluster.queue.ledger_settings import LedgerSettings
from cluster.queue.payload import Delivery, Payload, asked, taken_over
from distill.records import Lease, StepGroups, TrainedGroups, TrajectoryGroupMeta, TrajectoryId

# Interval between checks for expired leases, seconds.
_EXPIRE_EVERY_S = 1.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    """Answer to a worker's request for leases.

    Attributes:
        sampled: groups among the leased ones that exist already and only need new scores, by id.
        progress: changes whenever weights are published or lost, and whenever the driver requests
            the queue's status; see `WorkerEnd.lease`.
    """

    leases: list[Lease]
    sampled: dict[int, Delivery]
    closed: bool
    all_started: bool
    progress: tuple[int, int, int]


class GroupQueueActor:
    """A `Ledger`, and the delivered groups until weights contain them. A class without Ray."""

    def __init__(
        self, run: str, run_id: str, trained: TrainedGroups, settings: LedgerSettings, journal: str
    ) -> None:
        """
        Args:
            run: identifies this queue. A journal whose last start has this value is continued.
            run_id: id of the run, written to the journal; "" for none.
            trained: groups that the starting weights account for.
            journal: path of the ledger's journal, on storage that the actor's node reaches.
        """
        before = replay(journal)
        self._journal = Journal(journal)
        self._closed = False
        if before.run == run and before.ledger is not None:
            self._ledger, self._closed = before.ledger, before.ended
            self._ledger.record = self._journal.record
            self._ledger.recover()
        else:
            epoch = before.epoch + 1
            names = {"run": run} | ({"run_id": run_id} if run_id else {})
            self._journal.record(
                "start", **names, epoch=epoch, settings=asdict(settings), **trained.to_json()
            )
            self._journal.sync()
            self._ledger = Ledger(settings, trained, epoch=epoch, record=self._journal.record)
        self._delivered: dict[int, Delivery] = {}
        self._to_score: dict[int, Delivery] = {}  # groups to be scored again, leased or pending
        self._deaths: Counter[str] = Counter()
        # Notified when leases become possible, and when a step may be ready. Separate conditions,
        # so that a delivery does not wake every worker.
        self._may_start, self._may_train = asyncio.Condition(), asyncio.Condition()
        self._looked_over = time.monotonic()
        self._looks = 0  # status requests of the driver

    # the workers' end

    async def lease(self, worker: str, max_groups: int, request: str, poll_s: float) -> LeaseAnswer:
        await self._expire()
        deaths = self._deaths[worker]  # a worker that dies during the call ends it
        leases = await _until(
            self._may_start,
            lambda: (
                self._closed
                or self._deaths[worker] > deaths
                or self._ledger.lease(worker, max_groups, request)
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
            progress=(self._ledger.epoch, len(self._ledger.published), self._looks),
        )

    async def deliver(self, worker: str, *batches: Sequence[Delivery]) -> None:
        # Batches are separate arguments: Ray passes each of at most 100 kB in the call itself.
        deliveries = await taken_over(list(chain(*batches)))  # before the journal records them
        suspects = self._ledger.has_suspects
        with self._journal.together():
            for delivery in deliveries:
                lease, meta = delivery.lease, delivery.meta
                if self._ledger.deliver(lease, worker, meta.constant_reward, meta.scored_by):
                    self._delivered[lease.group_id] = delivery
                    self._to_score.pop(lease.group_id, None)
        ids = [delivery.lease.group_id for delivery in deliveries]
        distrusted = self._score_again([i for i in ids if not self._ledger.holds(i)])
        await _wake(self._may_train)
        # A worker without leases may now start a suspect; and every worker may start a group if one
        # is to be replaced.
        constant = any(each.meta.constant_reward is not None for each in deliveries)
        if suspects or distrusted or constant:
            await _wake(self._may_start)

    async def inside(self, worker: str, problems: dict[int, str]) -> None:
        self._ledger.inside(worker, problems)

    async def fail(self, worker: str, lease: Lease, reason: str) -> None:
        self._ledger.fail(lease, reason, worker)
        await self._wake_all()

    def _score_again(self, ids: Sequence[int]) -> bool:
        """Move groups that the ledger made pending again from the delivered ones to `_to_score`.

        Groups whose rewards are wrong are dropped instead, to be sampled again. Returns True if any
        of `ids` was stored.
        """
        again = {i: self._delivered.pop(i) for i in ids if i in self._delivered}
        anew = self._ledger.sampled_anew
        self._to_score |= {i: each for i, each in again.items() if i not in anew}
        anew.clear()
        return bool(again)

    # the learner's end

    async def take(
        self, trained: TrainedGroups, poll_s: float, pushing: bool = False
    ) -> StepGroups | list[int] | None:
        """The next step; ids that it waits for, if it is not ready; None if the queue is closed."""
        await self._until_ready(poll_s)
        if self._closed:
            return None
        step = self._ledger.take(trained, pushing=pushing)
        if step is None:
            return self._ledger.missing()
        return replace(step, groups_P=[self._delivered[i].meta for i in step.group_ids])

    async def foresee(
        self, trained: TrainedGroups, known: Collection[int], whole: bool, poll_s: float
    ) -> list[TrajectoryGroupMeta] | None:
        """As `GroupQueue.foresee`."""

        def news() -> list[int] | None:
            """Ids that are new to the caller; None if there will be no more."""
            foreseen = None if self._closed else self._ledger.foreseen(trained)
            if foreseen is None:
                return None
            if whole and not foreseen.whole:
                return []
            return [i for i in foreseen.group_ids if i not in known]

        await _until(self._may_train, lambda: news() != [], poll_s)
        ids = news()
        return None if ids is None else [self._delivered[i].meta for i in ids]

    async def lose(self, ids: Sequence[int], reason: str) -> None:
        """Record that taken groups cannot be fetched, and drop their references."""
        for group_id in self._ledger.lose(ids, reason):
            del self._delivered[group_id]
        await self._wake_all()

    async def payloads(self, places: Sequence[TrajectoryId]) -> dict[int, Payload]:
        """Payloads with these trajectories, by group id; without groups that are not held."""
        return asked(self._delivered, places)

    async def push(self, version: int, trained: TrainedGroups, epoch: int | None) -> None:
        self._ledger.push(version, trained, epoch)
        await self._after_step()

    async def publish(self, version: int, trained: TrainedGroups, epoch: int | None) -> None:
        self._ledger.publish(version, trained, epoch)
        await self._after_step()

    async def _after_step(self) -> None:
        self._delivered = {i: each for i, each in self._delivered.items() if self._ledger.holds(i)}
        trained = self._ledger.trained
        self._to_score = {i: each for i, each in self._to_score.items() if i not in trained}
        await self._wake_all()  # the next step may be ready: its age limit has changed

    # the driver's end

    async def poll(self, poll_s: float) -> bool:
        """Wait up to `poll_s` seconds for the next step and take it. True if it is ready.

        The step is taken here, before the learner requests it: otherwise a bad canary could make
        one of its groups pending again while the learner waits, when no scorer can be admitted.
        """
        await self._until_ready(poll_s)
        return not self._closed and self._ledger.take() is not None

    async def _until_ready(self, poll_s: float) -> None:
        await self._expire()
        await self._begin_again()
        await _until(self._may_train, lambda: self._closed or self._ledger.ready(), poll_s)

    async def forfeit(self, worker: str, reason: str) -> list[int]:
        self._deaths[worker] += 1
        ids = self._ledger.forfeit(worker, reason)
        await self._wake_all()
        return ids

    async def expire_now(self, ids: Sequence[int] | None, reason: str) -> list[int]:
        expired = self._ledger.release(ids, reason)
        await self._wake_all()
        return expired

    async def renew(self, ids: Sequence[int]) -> None:
        self._ledger.renew(ids)

    async def rewind(self, trained: TrainedGroups, reason: str) -> int:
        self._ledger.rewind(trained, reason)
        self._delivered.clear()
        self._to_score.clear()
        await self._wake_all()
        return self._ledger.epoch

    async def scorer(self, replica: int, said: Mapping[str, Any]) -> None:
        self._ledger.scorer(replica, **said)

    async def ask(self, replicas: Sequence[int]) -> None:
        self._ledger.ask(replicas)

    async def canary(self, replica: int, good: bool, said: Mapping[str, Any]) -> CanaryAnswer:
        answer = self._ledger.canary(replica, good, **said)
        if self._score_again(answer.again):
            await self._wake_all()
        return answer

    async def commit(self, step: int, watermark: int) -> None:
        self._ledger.commit(step, watermark)
        self._journal.sync()

    async def status(self) -> QueueStatus:
        self._looks += 1
        await self._expire()
        return self._ledger.status()

    async def close(self) -> None:
        """End every wait. Groups that are delivered afterwards are still journalled."""
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

    async def _begin_again(self) -> None:
        if ids := self._ledger.overdue():
            self._ledger.begin_again(ids)
            for group_id in ids:
                self._to_score.pop(group_id, None)  # its data is as old as the ended lease
            await self._wake_all()

    async def _wake_all(self) -> None:
        await _wake(self._may_start)
        await _wake(self._may_train)


async def _until(
    changed: asyncio.Condition, ready: Callable[[], Value], poll_s: float
) -> Value | None:
    """Wait for a true value of `ready` and return it; None after `poll_s` seconds."""
    if found := ready():
        return found
    found_later: list[Value] = []  # kept even if the deadline passes at the same moment

    def check() -> bool:
        if found := ready():
            found_later.append(found)
        return bool(found_later)

    async with changed:
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait_for(check), poll_s)
    return found_later[0] if found_later else None


async def _wake(changed: asyncio.Condition) -> None:
    async with changed:
        changed.notify_all()
