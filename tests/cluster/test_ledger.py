"""The ledger under leases, deliveries, failures and deaths in any order.

Each group is trained once and in time, and the run never gets stuck. A model of the run keeps a
journal as a run does. Sometimes it replaces the ledger by a replay of the journal, as a killed
queue does.
"""

import errno
import itertools
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.inspect.audit import audit
from cluster.queue.journal import Journal, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import CanaryAnswer, Kept, LedgerSettings, QueueStatus, adopted
from cluster.queue.step_rule import View
from distill.errors import DataError
from distill.records import CONSTANT_REWARD, Lease, OnStale, StepGroups, TrainedGroups
from tests.full_disk import files_of_at_most
from tests.ledger_twins import ScoresTwin, next_step, usable
from tests.refusals import refuses
from tests.rows import read_rows

LEASE_S = 100.0
# Events of a run, as often as they are listed.
PIPELINE = ("lease", "finish", "take_and_train", "arrive", "restart_overdue")
QUIET = ("pass_time", "keep", "keep", "commit", "send_canaries", "answer_canary", *4 * PIPELINE)
TROUBLE = (
    "take", "train", "deliver", "call_late", "publish_late", "fail", "report", "die", "expire",
    "mark_lost", "lose_the_queue", "lose_the_learner", "resume", "lease_again", "move",
    "replace_the_reward_model",
)  # fmt: skip


@dataclass
class Held:
    """A lease that has not ended."""

    worker: str
    attempt: int
    since: float  # time of the last progress
    began: float


class ModelledRun:
    """A run whose events happen in any order, with a simple model of what the ledger must answer.

    `version` is the number of steps in the learner's weights. `published` holds the groups of the
    weights on the engines, whose version is `served`; during a push it is one behind.

    An event is a method that makes its choices by `chance`.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.path = directory / "ledger.jsonl"
        self.journal = Journal(self.path)
        self.per_step, self.max_staleness = chance.randint(1, 3), chance.choice([0, 1, 1, 2, 2, 3])
        self.window = self.choose_window(chance)
        self.on_stale: OnStale = chance.choice(
            ["wait", "train_late", "restart", "restart", "restart"]
        )
        self.restart_after = chance.choice([0.0, 1.0])
        self.most_replaced = chance.choice([0, chance.randint(1, 4)])
        self.fast = chance.randint(2, 4)
        steps_before = chance.choice([0, 0, 1, 2])
        self.now = 0.0
        self.requests = itertools.count()
        before = self.per_step * steps_before
        poison = {0: "poison"} if before and chance.random() < 0.5 else {}
        self.trained = TrainedGroups(before + len(poison), poison)
        self.version = steps_before
        self.total = before + self.per_step * chance.randint(0, 20)
        self.scores = ScoresTwin()
        self.scorers = chance.choice([
            [], ["engine"] * 2, ["engine", "rewards"], ["engine", "in_learner"],
            ["engine", "rewards", "in_learner"],
        ])  # fmt: skip
        self.committed = [(self.version, self.trained)]
        self.happened = Counter[str]()  # what the audit counts
        self.begin(1, {})

    def choose_window(self, chance: random.Random) -> int:
        most = self.per_step * (self.max_staleness + 1)
        return most if chance.random() < 0.5 else chance.randint(self.per_step, most)

    def rules(self) -> LedgerSettings:
        return LedgerSettings(
            groups_per_step=self.per_step, max_staleness=self.max_staleness,
            total_groups=self.total, lease_s=LEASE_S, max_failures=2, max_deaths=4,
            groups_in_flight=self.window, on_stale=self.on_stale, max_restarts=2,
            restart_after=self.restart_after, most_replaced=self.most_replaced,
        )  # fmt: skip

    def begin(self, epoch: int, taken: Mapping[int, Kept]) -> None:
        """Begin a job that takes back these groups."""
        self.published, self.served = self.trained, self.version
        self.forget()
        self.happened += Counter(job=1, adopted=len(taken))
        self.journal.record(
            "start", run="r", epoch=epoch, settings=asdict(self.rules()), **self.trained.to_json(),
            adopted={str(i): list(each) for i, each in taken.items()},
        )  # fmt: skip
        self.ledger = Ledger(
            self.rules(), self.trained, epoch=epoch, clock=lambda: self.now,
            record=self.journal.record, adopted=taken,
        )  # fmt: skip
        self.num_delivered = 0
        self.seconds = list[float]()  # between lease and delivery
        self.failures, self.deaths, self.losses = Counter[int](), Counter[int](), Counter[int]()
        for kind in self.scorers:
            self.admit(kind)

    def admit(self, kind: str) -> None:
        """Register a scorer: an `engine`, a reward model (`rewards`), or `in_learner`."""
        number, name = self.scores.admit(kind)
        which = {} if kind == "engine" else {kind: True}
        self.ledger.scorer(number, **which, who=name)

    def forget(self) -> None:
        """Reset the state that a rewind undoes."""
        self.leases: dict[int, list[Lease]] = {}  # of this epoch
        self.under_way: dict[int, Held] = {}
        self.answered: dict[str, tuple[str, list[Lease]]] = {}  # last request of each worker
        self.leased_at: dict[int, int] = {}  # version at the first lease, or at the last restart
        self.over: dict[int, int] = {}  # last attempt before the last restart
        self.restarts: Counter[int] = Counter()
        self.held: set[int] = set()  # delivered, payload not lost
        self.constant: dict[int, float] = {}  # held groups of one reward
        self.arrived: dict[int, tuple[Kept, int]] = {}  # newest delivery of a group, with a number
        self.on_disk: dict[int, tuple[Kept, int]] = {}  # the same of the kept one
        self.resampled: set[int] = set()
        self.taken: StepGroups | None = None  # answer to the learner's last request
        self.promised: StepGroups | None = None  # step that was taken last and is not trained

    # workers

    def lease(self, chance: random.Random) -> None:
        worker, max_groups = chance.choice("abc"), chance.randint(1, 8)
        request = str(next(self.requests))
        pending, credit = self.pending()[:max_groups], self.credit()
        expected = pending + self.new_ids(min(max_groups - len(pending), credit))
        suspects = self.ledger.faults.suspects
        leases = self.ledger.lease(worker, max_groups, request)
        ids = [lease.group_id for lease in leases]
        assert ids == expected or suspects
        assert len(set(ids)) == len(ids) <= max_groups
        for lease in leases:
            assert lease.group_id not in self.held and lease.group_id not in self.trained
            assert lease.epoch == self.ledger.epoch
            self.note_lease(lease, worker)
        if leases:
            self.answered[worker] = request, leases
            assert self.ledger.lease(worker, max_groups, request) == leases

    def lease_again(self, chance: random.Random) -> None:
        """Ray repeats a call whose answer was lost: the worker gets what it still holds."""
        if self.answered:
            worker = chance.choice(sorted(self.answered))
            request, leases = self.answered[worker]
            held = [each for each in leases if self.is_current(each)]
            assert self.ledger.lease(worker, 9, request) == held

    def is_current(self, lease: Lease) -> bool:
        held = self.under_way.get(lease.group_id)
        return held is not None and held.attempt == lease.attempt

    def note_lease(self, lease: Lease, worker: str) -> None:
        group_id, before = lease.group_id, self.leases.setdefault(lease.group_id, [])
        assert lease.attempt == 1 + len(before)
        before.append(lease)
        if self.over.get(group_id) == lease.attempt - 1:
            self.leased_at[group_id] = self.served
        self.leased_at.setdefault(group_id, self.served)
        self.under_way[group_id] = Held(worker, lease.attempt, self.now, self.now)
        self.scores.lease(group_id)

    def end_leases(self, ids: Iterable[int]) -> None:
        for group_id in ids:
            self.under_way.pop(group_id, None)

    def finish(self, chance: random.Random) -> None:
        """Deliver some leased groups; some are slow, so that others overtake them."""
        leased = {i: held.attempt for i, held in sorted(self.under_way.items())}
        at_once = {i for i, attempt in leased.items() if (i + attempt) % self.fast}
        ids = [i for i in leased if i in at_once or chance.random() < 0.1]
        chance.shuffle(ids)
        for group_id in ids[: chance.randint(1, 4)]:
            reward = chance.choice([None, None, 0.0, 1.0])  # of all its members
            self.put(self.leases[group_id][-1], reward, chance)

    def put(self, lease: Lease, reward: float | None, chance: random.Random) -> None:
        """Deliver a group that was not delivered yet, scored by some engines."""
        group_id = lease.group_id
        scored_by = some(chance, self.scores.engines(moved=chance.random() < 0.1))
        held = self.under_way.pop(group_id, None)
        if held is not None:
            self.seconds.append(self.now - held.began)
        worker = held.worker if held is not None else "a"
        assert self.ledger.deliver(lease, worker, reward, scored_by)
        self.held.add(group_id)
        self.num_delivered += 1
        kept = Kept(lease.epoch, lease.attempt, self.leased_at[group_id])
        self.arrived[group_id] = kept, self.num_delivered
        moved = self.scores.deliver(group_id, scored_by) & self.scores.moved
        if moved:
            self.rescore([group_id], not moved.isdisjoint(self.scores.rewarding))
        elif reward is not None and self.most_replaced:
            self.constant[group_id] = reward

    def rescore(self, ids: Collection[int], resample: bool) -> list[int]:
        """Take back delivered groups, to be scored again; or to be sampled again, too."""
        passed = self.skip_constant(self.held - set(ids))
        self.scores.drop(ids)
        self.held -= set(ids)
        self.keep_constant(self.held)
        again = [i for i in ids if i not in passed]
        self.scores.rescored += len(again)
        if resample:
            self.resampled |= set(again)
            self.scores.discard_rewards(again)
            self.forget_kept(again)
        return again

    def skip_constant(self, stay: set[int]) -> set[int]:
        """Groups of one reward that are set aside, unless they stay, as others have started."""
        constant, most = self.replaceable(), self.most_replaced
        missed = min(len(constant), most) - min(len(constant & stay), most)
        passed = set(sorted(constant - stay)[:missed])
        self.forget_kept(passed)
        return passed

    def forget_kept(self, ids: Iterable[int]) -> None:
        for group_id in ids:
            self.on_disk.pop(group_id, None)

    def old_lease(self, chance: random.Random) -> Lease | None:
        """A lease of this epoch, which may have ended."""
        ids = sorted(i for i, leases in self.leases.items() if leases)
        return chance.choice(self.leases[chance.choice(ids)]) if ids else None

    def deliver(self, chance: random.Random) -> None:
        if (lease := self.old_lease(chance)) is None:
            return
        group_id = lease.group_id
        wanted = (
            group_id not in self.trained
            and group_id not in self.held
            and group_id not in self.set_aside()
            and lease.attempt > self.over.get(group_id, 0)
        )
        if wanted:
            self.put(lease, 1.0, chance)
        if not wanted or group_id in self.held:
            self.drops(lease)

    def drops(self, lease: Lease) -> None:
        assert not self.ledger.deliver(lease, "a", 1.0)
        self.happened["dropped"] += 1

    def keep(self, chance: random.Random) -> None:
        """Write delivered groups to disk; some may have been trained since."""
        ids = some(chance, self.arrived)
        self.ledger.keep({i: self.arrived[i][0].attempt for i in ids})
        self.on_disk |= {i: self.arrived[i] for i in ids & self.held}

    def call_late(self, chance: random.Random) -> None:
        """Deliver and fail by a lease of an old epoch."""
        epoch = self.ledger.epoch - chance.randint(1, 2)
        lease = Lease(group_id=chance.randint(0, 30), attempt=chance.randint(1, 2), epoch=epoch)
        self.drops(lease)
        self.ledger.fail(lease, "old")

    def fail(self, chance: random.Random) -> None:
        if (lease := self.old_lease(chance)) is None:
            return
        current = self.is_current(lease)
        self.ledger.fail(lease, "it raised")
        if current:
            self.end_leases([lease.group_id])
            self.failures[lease.group_id] += 1
            assert "it raised" in self.status().last_reason

    # deaths of workers

    def report(self, chance: random.Random) -> None:
        problems = {i: f"problem {i}" for i in some(chance, self.leases)}
        self.ledger.report_user_code(chance.choice("abc"), problems)

    def die(self, chance: random.Random) -> None:
        worker = chance.choice("abc")
        expected = sorted(i for i, held in self.under_way.items() if held.worker == worker)
        assert self.ledger.forfeit(worker, "killed") == expected
        self.end_leases(expected)
        self.deaths.update(expected)
        self.answered.pop(worker, None)
        assert self.ledger.forfeit(worker, "killed") == []

    def pass_time(self, chance: random.Random) -> None:
        self.now += chance.choice([1, 10, 30])
        ids = some(chance, self.under_way)
        self.ledger.renew([*ids, 99])
        for group_id in ids:
            self.under_way[group_id].since = self.now

    def expire(self, chance: random.Random) -> None:
        self.now += chance.choice([60, LEASE_S, 200])
        old = sorted(i for i, held in self.under_way.items() if self.now - held.since > LEASE_S)
        assert self.ledger.expire(self.now) == old
        self.end_leases(old)
        self.losses.update(old)

    def restart_overdue(self, chance: random.Random) -> None:
        """Restart groups only if the next step can then start; their old leases are void."""
        overdue = self.ledger.overdue()
        if not overdue:
            return
        assert self.on_stale == "restart" and self.ledger.ready() is None
        assert not set(overdue) & self.held
        self.ledger.restart_groups(overdue)
        self.end_leases(overdue)
        self.scores.discard_rewards(overdue)
        self.forget_kept(overdue)
        for group_id in overdue:
            self.restarts[group_id] += 1
            assert self.restarts[group_id] <= 2
            self.over[group_id] = len(self.leases[group_id])
            self.leased_at[group_id] = self.served
            if self.leases[group_id]:
                self.drops(self.leases[group_id][-1])
        assert self.ledger.ready() is not None and self.ledger.overdue() == []
        if chance.random() < 0.5:  # lose the new leases too: the age counts from the first of them
            self.lease(chance)
            self.now += LEASE_S
            self.expire(chance)
            self.take_and_train(chance)
            self.arrive(chance)
            self.lease(chance)

    # scorers

    def send_canaries(self, chance: random.Random) -> None:
        numbers = some(chance, self.scores.kinds)
        self.ledger.ask(numbers)
        self.scores.send(numbers)

    def answer_canary(self, chance: random.Random) -> None:
        """A good canary of any scorer; the bad one of a scorer that has moved is repeated."""
        if self.scores.kinds:
            number = chance.choice(list(self.scores.kinds))
            self.canary(number, number not in self.scores.moved, chance)

    def move(self, chance: random.Random) -> None:
        """A scorer's canary is bad, and another one takes its place."""
        if not self.scores.kinds:
            return
        if chance.random() < 0.5:  # its first wrong scores are in the taken step
            self.prove(chance)
            self.finish(chance)
            self.take(chance)
        number, kind = chance.choice(list(self.scores.kinds.items()))
        new = number not in self.scores.moved
        self.canary(number, False, chance)
        if new:
            self.admit(kind)

    def prove(self, chance: random.Random) -> None:
        self.ledger.ask(list(self.scores.kinds))
        self.scores.send(self.scores.kinds)
        for number in self.scores.kinds.keys() - self.scores.moved:
            self.canary(number, True, chance)

    def canary(self, number: int, good: bool, chance: random.Random) -> None:
        taken = set(self.promised.group_ids if self.promised else ())
        gap, rode = chance.random(), chance.random() < 0.5
        scored = self.scores.answer(number, good, gap, rode)
        ids = sorted(scored & self.held - taken)
        bad = {self.scores.first_version_of(scored), self.version + 1 if scored & taken else None}
        first_bad = min((version for version in bad if version is not None), default=None)
        ids = self.rescore(ids, number in self.scores.rewarding)
        proven = self.scores.proven(self.version)
        assert self.ledger.canary(number, good, gap=gap, rode=rode) == CanaryAnswer(
            to_rescore=tuple(ids), first_bad=first_bad, proven=proven
        )

    def replace_the_reward_model(self, chance: random.Random) -> None:
        """Start another reward model, after the death of the one before."""
        if "rewards" in self.scorers:
            self.admit("rewards")

    # nodes

    def mark_lost(self, chance: random.Random) -> None:
        """Lose payloads of the taken step; only the learner notices such a loss."""
        taken = set(self.promised.group_ids) if self.promised else set()
        asked = some(chance, self.leases)
        gone = sorted(asked & taken & self.held)
        assert self.ledger.mark_lost(asked, "its node died") == gone
        self.held -= set(gone)
        self.keep_constant(self.held)
        self.losses.update(gone)
        self.scores.drop(gone)
        self.forget_kept(gone)
        assert self.ledger.mark_lost(asked, "its node died") == []

    # the learner

    def take(self, chance: random.Random) -> None:
        pushing = self.served < self.version
        self.taken = step = self.ledger.take(self.trained, pushing=pushing)
        assert step == self.ledger.take(self.trained, pushing=pushing)
        if step is None or step == self.promised:
            return
        self.promised = step
        assert step.replaced == {i: self.constant[i] for i in step.replaced}
        ages = [self.version - self.leased_at[group_id] for group_id in step.group_ids]
        assert step.start_max == max(ages)
        assert step.overdue == sum(age > self.max_staleness for age in ages)
        assert step.overdue == 0 or self.on_stale == "train_late"
        assert step.restarts == sum(self.restarts[i] for i in step.group_ids)
        assert step.queued == len(self.held) - self.per_step

    def train(self, chance: random.Random) -> None:
        """Train the taken step and push it: at once, or during the next events."""
        if self.taken is None:
            return
        self.arrive(chance)
        group_ids, skipped = self.taken.group_ids, self.taken.set_aside
        peeked = self.ledger.peek(self.trained.after(group_ids, skipped))
        assert peeked is not None and not set(peeked.group_ids) & set(group_ids)
        passed, self.taken, self.promised = self.taken.replaced, None, None
        for group_id in group_ids if self.on_stale != "train_late" else ():
            # it may have been leased again since, by a queue that lost it: the first one counts
            assert self.version - self.leased_at[group_id] <= self.max_staleness
        self.trained = self.trained.after(group_ids, skipped)
        assert skipped.items() <= self.trained.set_aside.items()
        self.version += 1
        if chance.random() < 0.5:
            for _ in range(2):  # Ray repeats a call whose answer was lost
                self.ledger.push(self.version, self.trained, self.ledger.epoch)
        else:
            self.arrive(chance)
        self.held -= {*group_ids, *passed}
        self.end_leases({*group_ids, *passed})
        self.scores.drop({*passed, *skipped})
        self.scores.train(self.version, group_ids)
        for group_id in (*group_ids, *passed, *skipped):
            self.restarts.pop(group_id, None)
            self.over.pop(group_id, None)
        self.keep_constant(self.held)
        ready = self.ledger.ready()  # nothing has arrived meanwhile
        assert peeked.whole == (ready is not None)
        assert ready is None or peeked.group_ids == ready.group_ids
        assert peeked == self.ledger.peek(self.trained)
        assert passed.keys() <= self.set_aside().keys()

    def keep_constant(self, ids: Collection[int]) -> None:
        self.constant = {i: reward for i, reward in self.constant.items() if i in ids}

    def take_and_train(self, chance: random.Random) -> None:
        self.take(chance)
        self.train(chance)

    def arrive(self, chance: random.Random) -> None:
        if self.served == self.version:
            return
        for _ in range(2):
            self.ledger.publish(self.version, self.trained, self.ledger.epoch)
        self.published, self.served = self.trained, self.version

    def publish_late(self, chance: random.Random) -> None:
        """A lost learner's publication changes nothing."""
        before = self.status()
        self.ledger.push(self.version, self.trained, self.ledger.epoch)
        more = TrainedGroups(max([self.published.watermark, *self.published.above]) + 5)
        self.ledger.push(99, more, self.ledger.epoch - 1)
        self.ledger.publish(99, more, self.ledger.epoch - 1)
        self.ledger.publish(self.served, self.published, self.ledger.epoch)
        assert self.status() == before

    def commit(self, chance: random.Random) -> None:
        self.committed.append((self.version, self.trained))
        self.ledger.commit(self.version, self.trained.watermark)
        self.forget_kept([i for i in self.on_disk if i < self.trained.watermark])

    def lose_the_learner(self, chance: random.Random) -> None:
        self.version, self.trained = self.committed[-1]
        aside = self.set_aside()
        epoch = self.ledger.epoch
        self.ledger.rewind(self.trained, "the learner died")
        assert self.ledger.epoch == epoch + 1
        self.happened["rewind"] += 1
        self.published, self.served = self.trained, self.version
        resampled = self.resampled
        self.forget()
        self.resampled = resampled
        later = {
            i: r for i, r in aside.items() if i >= self.trained.watermark and r != CONSTANT_REWARD
        }  # poison stays poison
        assert dict(self.trained.set_aside) | later == self.set_aside()
        self.scores.start_learner(self.trained)
        if "in_learner" in self.scorers:
            self.admit("in_learner")

    # the queue

    def lose_the_queue(self, chance: random.Random) -> None:
        """Kill the queue: groups readable on disk are kept, the others are sampled again."""
        self.journal.close()
        if chance.random() < 0.5:
            with self.path.open("ab") as file:
                file.write(b'{"t": 1, "event": "pu')
        before, started = self.status(), self.live()
        played = replay(self.path, lambda: self.now)
        assert played.ledger is not None and played.run == "r" and not played.ended
        self.ledger = played.ledger
        after = self.status()
        for name in QueueStatus.__slots__:
            if name not in ("leased", "starved_s", "age_s"):  # times begin with the replay
                assert getattr(after, name) == getattr(before, name), name
        self.journal = Journal(self.path)
        self.ledger.record = self.journal.record
        readable = some(chance, self.on_disk)
        self.now += 7.0  # the groups are read
        self.ledger.recover(readable)
        stay = {i for i in self.held & readable if self.on_disk[i] == self.arrived.get(i)}
        passed = self.skip_constant(stay)
        self.forget_kept((self.on_disk.keys() & started) - readable)
        taken = set(self.promised.group_ids if self.promised else ())
        lost = self.held - stay - passed
        self.happened += Counter(recovery=1, lost=len(lost))
        self.scores.drop(lost - taken)
        self.held = stay
        self.keep_constant(stay)
        for held in self.under_way.values():
            held.since = held.began = self.now
        self.seconds.clear()
        self.resampled.clear()

    def resume(self, chance: random.Random) -> None:
        """Begin a new job from a checkpoint with the groups on disk that it can train in time."""
        self.version, self.trained = self.committed[-1]
        kept = {i: each for i, each in self.ledger.kept.items() if chance.random() < 0.8}
        if chance.random() < 0.3:  # with other settings
            self.window = self.choose_window(chance)
            self.on_stale = chance.choice(["wait", "train_late", "restart"])
        taken = adopted(kept, self.trained, self.rules())
        assert taken.keys() == usable(kept, self.trained, self.rules())
        on_disk = {i: (kept[i], 0) for i in taken}
        self.scores.start_job(self.trained)
        self.begin(self.ledger.epoch + 1, taken)
        self.on_disk = on_disk
        self.leased_at = {i: each.started for i, each in taken.items()}
        self.leases = {i: [] for i in taken}
        if chance.random() < 0.5:  # deliver some, and die before they are on disk again
            self.lease(chance)
            self.finish(chance)
            self.lose_the_queue(chance)

    # what always holds

    def status(self) -> QueueStatus:
        return self.ledger.status()

    def set_aside(self) -> dict[int, str]:
        return dict(self.ledger.set_aside)

    def intact(self) -> StepGroups | None:
        """The step that was taken last, if no group of it was set aside since."""
        gone = self.promised is None or self.set_aside().keys() & set(self.promised.group_ids)
        return None if gone else self.promised

    def live(self) -> set[int]:
        """Started groups that are not trained."""
        return {i for i in self.leased_at if i not in self.trained} - self.set_aside().keys()

    def pending(self) -> list[int]:
        return sorted(self.live() - self.under_way.keys() - self.held)

    def replaceable(self) -> set[int]:
        """Groups of one reward that no taken step trains."""
        promised = self.intact()
        return self.constant.keys() - set(promised.group_ids if promised else ())

    def num_started(self) -> int:
        """Number of live groups without those that the next step replaces at most."""
        return len(self.live()) - min(len(self.replaceable()), self.most_replaced)

    def credit(self) -> int:
        pushed = len(self.trained) - len(self.published)
        room, left = self.window - pushed, self.total - len(self.trained)
        return max(0, min(room, left) - self.num_started())

    def new_ids(self, count: int) -> list[int]:
        """The lowest ids of groups that have not started."""
        known = {*self.live(), *self.set_aside()}
        new = (i for i in itertools.count() if i not in known and i not in self.trained)
        return list(itertools.islice(new, max(0, count)))

    def view(self) -> View:
        return View(
            step=self.version,
            groups_per_step=self.per_step,
            started={i: self.leased_at[i] for i in self.live()},
            finished=self.held,
            constant=self.replaceable(),
            most_replaced=self.most_replaced,
        )

    def window_and_accounts(self) -> None:
        status = self.status()
        assert status.leased == {
            i: (held.worker, held.attempt, self.now - held.since)
            for i, held in sorted(self.under_way.items())
        }
        assert status.pending == self.pending()
        assert status.depth == len(self.held)
        assert status.credit == self.credit()
        assert self.ledger.kept == {i: kept for i, (kept, _) in self.on_disk.items()}
        assert self.ledger.resampled == self.resampled
        assert status.delivered == self.num_delivered
        assert status.restarted == self.over
        failed = {i for i, reason in self.set_aside().items() if reason != CONSTANT_REWARD}
        assert status.set_aside == len(failed)
        for group_id in {*self.failures, *self.deaths, *self.losses} - {*self.trained.set_aside}:
            failures, deaths = self.failures[group_id], self.deaths[group_id]
            too_often = failures >= 2 or self.losses[group_id] >= 4
            if group_id in failed or too_often:
                assert group_id in failed and (too_often or failures + deaths >= 2)
        pushed = len(self.trained) - len(self.published)
        assert pushed == self.per_step * (self.version - self.served)
        assert self.num_started() + pushed <= self.window
        assert len(self.trained) + self.num_started() <= self.total
        assert self.ledger.published == self.published

    def steps_train_the_oldest_groups_if_the_others_stay_in_time(self) -> None:
        step, missing = self.ledger.ready(), self.ledger.missing()
        if (promised := self.intact()) is not None:
            assert missing == [i for i in promised.group_ids if i not in self.held]
            assert step == (None if missing else promised)
            assert self.ledger.overdue() == []
            return
        rule = self.rules().rule()
        ids, replaced, waits_for = next_step(rule, self.view())
        lacking = min(self.per_step, self.total - len(self.trained)) - self.num_started()
        assert missing == waits_for + self.new_ids(lacking)
        assert (step.group_ids if step else []) == ids
        assert list(step.replaced if step else ()) == replaced
        able = [i for i in self.unusually_long() if self.restarts[i] < 2]
        assert self.ledger.overdue() == rule.choose_restarts(self.view(), able, self.served)

    def unusually_long(self) -> list[int]:
        """Groups that may restart: pending ones, then leased ones, the longest first."""
        if self.on_stale != "restart" or len(self.seconds) < self.per_step:
            return []
        before = self.now - self.restart_after * median(self.seconds)
        leased = sorted((held.began, i) for i, held in self.under_way.items())
        return self.pending() + [i for began, i in leased if began < before]

    def check(self) -> None:
        self.window_and_accounts()
        self.steps_train_the_oldest_groups_if_the_others_stay_in_time()

    def finish_the_run(self, chance: random.Random) -> None:
        """Continue the run to its end: no group is lost, and nothing gets stuck."""
        while len(self.trained) < self.total:
            before = len(self.trained)
            while True:
                for lease in self.ledger.lease("z", 5):  # suspects come alone
                    self.note_lease(lease, "z")
                if not self.under_way:
                    break
                for group_id in sorted(self.under_way, reverse=True):
                    self.put(self.leases[group_id][-1], None, chance)
            self.take(chance)
            if self.taken is None:  # what it lacks waits for slots
                assert self.served < self.version
                self.arrive(chance)
                continue
            self.train(chance)
            assert len(self.trained) > before
        self.arrive(chance)
        assert len(self.trained) == self.total
        status = self.status()
        assert (status.depth, status.credit, status.leased, status.pending) == (0, 0, {}, [])
        assert self.ledger.all_started and self.ledger.lease("z", 1) == []
        self.journal.record("end")
        self.journal.close()
        found = audit(self.path)
        assert [p for p in found.problems if "the journal begins with group" not in p] == []
        assert len(found.problems) == (found.first > 0)  # it proves nothing of those below
        assert found.trained == self.total - sum(i in self.trained for i in range(found.first))
        assert found.watermark == self.trained.watermark
        assert found.set_aside == dict(self.trained.set_aside) and not self.trained.above
        counted = {
            "dropped": found.duplicates, "job": found.jobs, "rewind": found.rewinds,
            "recovery": found.recoveries, "adopted": found.adopted,
            "lost": found.re_leases.get("when the queue died", 0),
        }  # fmt: skip
        assert Counter(counted) == self.happened
        self.scores.check(found.scoring)


def some(chance: random.Random, ids: Iterable[int]) -> set[int]:
    share = chance.random()
    return {group_id for group_id in sorted(ids) if chance.random() < share}


@pytest.mark.parametrize("seed", range(300))
def test_the_ledger_answers_as_its_model_after_any_events(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = ModelledRun(tmp_path, chance)
    share = chance.choice([0, 0.1, 0.3, 0.5])
    trouble = chance.sample(TROUBLE, chance.randint(1, 10))  # in many combinations
    for _ in range(60):
        event = chance.choice(trouble if chance.random() < share else QUIET)
        print(event)
        getattr(run, event)(chance)
        run.check()
    run.finish_the_run(chance)


def new(clock: Callable[[], float] = time.monotonic, **changes: Any) -> Ledger:
    settings = LedgerSettings(
        **{"groups_per_step": 2, "max_staleness": 0, "total_groups": 8, "lease_s": LEASE_S}
        | changes
    )
    return Ledger(settings, TrainedGroups(), epoch=1, clock=clock)


def lease(ledger: Ledger, count: int, worker: str = "a") -> list[int]:
    return [lease.group_id for lease in ledger.lease(worker, count)]


def test_time_without_credit_is_counted_to_the_second() -> None:
    now = 100.0
    ledger = new(max_staleness=1, clock=lambda: now)

    def passes(seconds: float) -> tuple[float, float]:
        nonlocal now
        now += seconds
        status = ledger.status()
        return status.starved_s, status.age_s

    leases = ledger.lease("a", 4)
    assert passes(7) == (0, 7)  # no credit, but all are under way
    for one in leases:
        ledger.deliver(one)
    assert passes(10) == (10, 17)
    ledger.publish(1, TrainedGroups(2))
    assert passes(5) == (10, 22)  # two may start
    first, second = ledger.lease("a", 2)
    assert passes(3) == (10, 25)  # as many under way as finished
    ledger.deliver(first)
    assert passes(2) == (12, 27)
    ledger.fail(second, "it is to be tried again")
    assert passes(9) == (12, 36)


def test_a_group_that_fails_too_often_is_set_aside_and_the_run_has_one_more() -> None:
    ledger = new(total_groups=2)
    for attempt in (1, 2, 3):
        [poison, *others] = ledger.lease("a", 9)
        assert (poison.group_id, poison.attempt) == (0, attempt)
        assert [other.group_id for other in others] == ([1] if attempt == 1 else [])
        ledger.fail(poison, "KeyError: 'answer'")
    assert ledger.status().set_aside == ledger.status().consecutive_set_aside == 1
    assert ledger.status().last_reason == "failed 3 times: KeyError: 'answer'"
    [further] = ledger.lease("a", 9)
    assert further.group_id == 2
    for group_id in (1, 2):
        assert ledger.deliver(Lease(group_id=group_id, attempt=1, epoch=1))
    assert ledger.status().consecutive_set_aside == 0
    step = ledger.take()
    assert step is not None and step.group_ids == [1, 2]
    assert step.set_aside == {0: "failed 3 times: KeyError: 'answer'"}
    ledger.publish(1, TrainedGroups(3, step.set_aside))
    assert ledger.all_started and ledger.lease("a", 9) == []


def test_a_group_that_kills_its_worker_is_found_among_those_leased_with_it() -> None:
    ledger = new(max_staleness=2, max_failures=2)
    assert lease(ledger, 1, "z") == [0] and lease(ledger, 9) == [1, 2, 3, 4, 5]
    ledger.report_user_code("a", {1: "problem 8 of env=Bad reward=x:y", 4: "problem 9"})
    assert ledger.forfeit("a", "SIGSEGV") == [1, 2, 3, 4, 5]
    assert lease(ledger, 9, "z") == [2, 3, 5]  # what was not inside may be beside others
    assert lease(ledger, 9, "b") == [1] and lease(ledger, 9, "b") == []
    assert lease(ledger, 9, "c") == [4]
    assert ledger.deliver(Lease(group_id=4, attempt=2, epoch=1), "c")
    for worker in "be":
        ledger.report_user_code(worker, {1: "problem 8 of env=Bad reward=x:y"})
        assert ledger.forfeit(worker, "SIGSEGV") == [1]
        assert lease(ledger, 1, "e") == ([1] if worker == "b" else [6])
    assert ledger.status().set_aside == 1
    assert "problem 8 of env=Bad reward=x:y (SIGSEGV)" in ledger.status().last_reason


def test_a_group_under_way_at_two_deaths_is_a_suspect() -> None:
    ledger = new(max_staleness=1)
    for _ in range(2):
        assert lease(ledger, 2) == [0, 1]
        ledger.report_user_code("a", {})
        ledger.forfeit("a", "killed")
    assert lease(ledger, 9, "a") == [0] and lease(ledger, 9, "b") == [1]
    assert lease(ledger, 9, "c") == [2, 3]


def test_a_group_that_still_runs_after_its_lease_may_have_killed_its_worker() -> None:
    ledger = new(max_failures=1, max_deaths=9)
    [hung, _] = ledger.lease("a", 2)
    ledger.report_user_code("a", {1: "problem 2"})
    ledger.release([0], "no progress")
    assert ledger.forfeit("a", "killed") == [1] and ledger.status().set_aside == 0
    assert lease(ledger, 1, "b") == [1]
    assert not ledger.deliver(Lease(group_id=0, attempt=2, epoch=1)) and ledger.deliver(hung, "a")
    assert ledger.forfeit("b", "killed") == [1] and ledger.status().set_aside == 1


def test_a_group_that_failed_after_its_lease_did_not_kill_its_worker() -> None:
    ledger = new(max_failures=1, max_deaths=9)
    [hung, _] = ledger.lease("a", 2)
    ledger.report_user_code("a", {1: "problem 2"})
    ledger.release([0], "no progress")
    ledger.fail(hung, "timed out", "a")
    assert ledger.forfeit("a", "killed") == [1] and ledger.status().set_aside == 1


@dataclass
class Rollouts:
    """A worker over the real ledger, with the stage of each group that it runs.

    `poison` groups kill it: in their environment's code (stage 0) or outside of any (stage 1).
    """

    name: str
    poison: Mapping[int, int]
    stages: dict[Lease, int] = field(default_factory=dict)
    deaths: int = 0

    def work(self, ledger: Ledger, chance: random.Random, max_groups: int) -> None:
        if len(self.stages) < max_groups:
            room = max_groups - len(self.stages)
            self.stages |= dict.fromkeys(ledger.lease(self.name, room), 0)
        if not self.stages:
            return
        lease = chance.choice(list(self.stages))
        stage = self.stages[lease]
        self.stages[lease] += 1
        if stage == 0:  # into its environment; the others that are in theirs are reported, too
            inside = [other for other, at in self.stages.items() if at == 1]
            ledger.report_user_code(self.name, {other.group_id: "" for other in inside})
        if self.poison.get(lease.group_id) == stage:
            self.stages.clear()
            self.deaths += 1
            ledger.forfeit(self.name, "killed")
        elif stage == 2:
            del self.stages[lease]
            assert ledger.deliver(lease, self.name)


@given(
    seed=st.integers(0, 2**32),
    poison=st.dictionaries(st.integers(0, 23), st.integers(0, 1), max_size=5),
    num_workers=st.integers(1, 3),
    max_groups=st.integers(1, 8),
    max_staleness=st.integers(0, 2),
    queue_dies=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_only_groups_that_kill_workers_are_set_aside_and_soon(
    seed: int, poison: dict[int, int], num_workers: int, max_groups: int, max_staleness: int,
    queue_dies: bool,
) -> None:  # fmt: skip
    chance, steps, per_step, max_failures = random.Random(seed), 6, 4, 3
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        journal = Journal(path)
        rules = LedgerSettings(
            groups_per_step=per_step, max_staleness=max_staleness, total_groups=steps * per_step,
            lease_s=LEASE_S, max_failures=max_failures,
        )  # fmt: skip
        trained = TrainedGroups()
        journal.record("start", run="r", epoch=1, settings=asdict(rules), **trained.to_json())
        ledger = Ledger(rules, trained, epoch=1, record=journal.record)
        workers = [Rollouts(name, poison) for name in "abc"[:num_workers]]
        version = 0
        for _ in range(20_000):
            if version == steps:
                break
            chance.choice(workers).work(ledger, chance, max_groups)
            if (step := ledger.take()) is not None:
                version += 1
                trained = step.after(trained)
                ledger.publish(version, trained)
            if queue_dies and chance.random() < 0.02:
                journal.close()
                played = replay(path).ledger
                assert played is not None and asdict(played.status())["pending"] == sorted(
                    ledger.status().pending
                )
                ledger, journal = played, Journal(path)
                ledger.record = journal.record
                ledger.recover()
        assert version == steps
        journal.close()
        found = audit(path)
    assert found.problems == [] and found.trained == steps * per_step
    assert found.set_aside.keys() == {i for i in poison if i < found.watermark}
    assert sum(worker.deaths for worker in workers) <= (max_failures + 2) * len(poison)


def test_a_taken_group_that_comes_back_constant_makes_no_room_for_another() -> None:
    ledger = new(groups_per_step=1, total_groups=1, most_replaced=1)
    [first] = ledger.lease("a", 9)
    assert ledger.deliver(first)
    taken = ledger.take()
    assert taken is not None and ledger.mark_lost(taken.group_ids, "its node died") == [0]
    [again] = ledger.lease("a", 9)
    assert ledger.deliver(again, "a", 1.0)
    assert ledger.take() == taken
    assert ledger.status().credit == 0 and ledger.lease("a", 9) == []


def test_a_lost_group_that_the_taken_step_replaces_is_not_sampled_again() -> None:
    ledger = new(groups_per_step=1, max_staleness=1, most_replaced=1)
    for one in ledger.lease("a", 2):
        assert ledger.deliver(one, "a", 1.0)
    taken = ledger.take()
    assert taken is not None and (taken.group_ids, taken.replaced) == ([1], {0: 1.0})
    ledger.keep({1: 1})
    ledger.recover([1])
    assert ledger.status().pending == [] and ledger.take() == taken


def test_a_group_that_was_scored_and_kept_again_outlives_the_queue() -> None:
    ledger = new(groups_per_step=1, total_groups=1)
    for scorer in (0, 1):
        ledger.scorer(scorer)
        [one] = ledger.lease("a", 1)
        assert ledger.deliver(one, "a", None, [scorer])
        ledger.keep({0: one.attempt})
        if scorer == 0:
            assert ledger.canary(0, good=False).to_rescore == (0,)
    ledger.recover([0])
    assert ledger.status().pending == []


def test_a_taken_step_counts_as_trained_though_the_queue_lost_it_and_set_a_group_aside() -> None:
    ledger = new(max_failures=1)
    for one in ledger.lease("a", 9):
        ledger.deliver(one)
    assert ledger.take() is not None
    ledger.recover()
    [again, _] = ledger.lease("a", 9)
    ledger.fail(again, "no longer")
    assert ledger.status().set_aside == 1
    ledger.publish(1, TrainedGroups(2))
    assert ledger.status().set_aside == 0
    assert lease(ledger, 9) == [2, 3]


def test_a_delivery_without_a_lease_is_dropped() -> None:
    ledger = new()
    assert not ledger.deliver(Lease(group_id=1, attempt=1, epoch=1))
    assert not ledger.holds(1)


# the journal


def test_the_journal_records_leases_deliveries_and_failures(tmp_path: Path) -> None:
    path = tmp_path / "out" / "ledger.jsonl"
    journal = Journal(path)
    ledger = new()
    ledger.record = journal.record
    [first, second] = ledger.lease("a", 9, "x-1")
    ledger.deliver(first, "a")
    ledger.fail(second, "boom", "a")
    journal.sync()
    journal.close()
    lines = read_rows(path)
    assert [line.pop("t") > 1e9 for line in lines] == [True] * 3
    assert lines[0].pop("after") == "" and len({line.pop("after") for line in lines[1:]}) == 2
    assert lines == [
        {"event": "lease", "ids": [0, 1], "attempts": [1, 1], "worker": "a", "epoch": 1,
         "request": "x-1"},
        {"event": "put", "id": 0, "attempt": 1, "worker": "a", "epoch": 1},
        {"event": "fail", "id": 1, "attempt": 1, "worker": "a", "reason": "boom"},
    ]  # fmt: skip


def test_a_cut_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"t": 1.0, "event": "end"}\n{"t": 2.0, "ev')
    assert [event["t"] for event in read_journal(path)] == [1.0]
    journal = Journal(path)
    journal.record("end")
    journal.close()
    assert len(list(read_journal(path))) == 2


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with refuses(DataError, None, names="ledger.jsonl"):
        list(read_journal(path))
    for nonsense in ("x\n", "3\n", '{"t": 1}\n', "[" * 100_000 + "\n"):
        path.write_text('{"t": 1, "event": "end"}\n' + nonsense)
        with refuses(DataError, None, names="line 2"):
            list(read_journal(path))


@pytest.mark.parametrize(
    ("room", "complaint"), [(0, os.strerror(errno.EFBIG)), (10, os.strerror(errno.ENOSPC))]
)
def test_lines_of_a_full_disk_are_written_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int, complaint: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    journal = Journal(path)
    journal.record("end", n=0)
    whole = path.stat().st_size
    with caplog.at_level(logging.WARNING), files_of_at_most(whole + room):
        for n in (1, 2, 3):
            journal.record("end", n=n)
        journal.sync()
        assert path.stat().st_size == whole  # no half lines
        assert [event["n"] for event in read_journal(path)] == [0]
    [warning] = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert complaint in warning
    journal.record("end", n=4)
    assert [event["n"] for event in read_journal(path)] == [0, 1, 2, 3, 4]
