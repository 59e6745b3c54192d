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
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.inspect.audit import audit
from cluster.queue.adoption import adopted
from cluster.queue.journal import Journal, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_answers import QueueStatus
from cluster.queue.ledger_settings import LedgerSettings
from cluster.queue.step_rule import StepRule, View
from distill.errors import DataError
from distill.records import CONSTANT_REWARD, Lease, StepGroups, TrainedGroups
from tests.full_disk import files_of_at_most
from tests.refusals import refuses
from tests.rows import read_rows
from tests.step_rule_twin import next_step

LEASE_S = 100.0
# Events of a run, as often as they are listed.
PIPELINE = ("lease", "finish", "take_and_train", "arrive", "restart_overdue")
QUIET = ("pass_time", "keep", "keep", "commit", *4 * PIPELINE)
TROUBLE = (
    "take", "train", "deliver", "call_late", "publish_late", "fail", "fail", "report", "die", "die",
    "expire", "mark_lost", "lose_the_queue", "lose_the_queue", "lose_the_learner",
    "resume", "resume",
)  # fmt: skip


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
        most = self.per_step * (self.max_staleness + 1)
        self.window = most if chance.random() < 0.5 else chance.randint(self.per_step, most)
        self.on_stale = chance.choice(["wait", "train_late", "restart", "restart", "restart"])
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
        self.settings = {
            "groups_per_step": self.per_step, "max_staleness": self.max_staleness,
            "total_groups": self.total, "lease_s": LEASE_S, "max_failures": 2, "max_deaths": 4,
            "groups_in_flight": self.window, "on_stale": self.on_stale, "restart_after": 0.0,
            "max_restarts": 2, "most_replaced": self.most_replaced,
        }  # fmt: skip
        self.journal.record(
            "start", run="r", epoch=1, settings=self.settings, **self.trained.to_json()
        )
        self.ledger = Ledger(
            LedgerSettings(**self.settings), self.trained, epoch=1, clock=lambda: self.now,
            record=self.journal.record,
        )  # fmt: skip
        self.committed = [(self.version, self.trained)]
        self.published, self.served = self.trained, self.version
        self.forget()

    def forget(self) -> None:
        """Reset the state that a rewind undoes."""
        self.leases: dict[int, list[Lease]] = {}  # of this epoch
        self.leased_at: dict[int, int] = {}  # version at the first lease, or at the last restart
        self.over: dict[int, int] = {}  # last attempt before the last restart
        self.restarts: Counter[int] = Counter()
        self.held: set[int] = set()  # delivered, payload not lost
        self.constant: dict[int, float] = {}  # held groups of one reward
        self.on_disk: dict[int, tuple[int, int]] = {}  # epochs and attempts of deliveries, by id
        self.arrived_by: dict[int, tuple[int, int]] = {}  # the same of the newest delivery
        self.taken: StepGroups | None = None  # answer to the learner's last request
        self.promised: StepGroups | None = None  # step that was taken last and is not trained

    # workers

    def lease(self, chance: random.Random) -> None:
        worker, max_groups = chance.choice("abc"), chance.randint(1, 8)
        request = str(next(self.requests))
        pending, credit = self.status().pending[:max_groups], self.credit()
        expected = pending + self.new_ids(min(max_groups - len(pending), credit))
        suspects = self.ledger.faults.suspects
        leases = self.ledger.lease(worker, max_groups, request)
        ids = [lease.group_id for lease in leases]
        assert ids == expected or suspects
        assert len(set(ids)) == len(ids) <= max_groups
        for lease in leases:
            group_id = lease.group_id
            assert group_id not in self.held and group_id not in self.trained
            assert lease.attempt == 1 + len(self.leases.setdefault(group_id, []))
            assert lease.epoch == self.ledger.epoch
            self.leases[group_id].append(lease)
            self.note_lease(lease)
        if leases:  # Ray repeats a call whose answer was lost
            assert self.ledger.lease(worker, max_groups, request) == leases

    def note_lease(self, lease: Lease) -> None:
        if self.over.get(lease.group_id) == lease.attempt - 1:
            self.leased_at[lease.group_id] = self.served
        self.leased_at.setdefault(lease.group_id, self.served)

    def finish(self, chance: random.Random) -> None:
        """Deliver some leased groups; some are slow, so that others overtake them."""
        leased = self.status().leased
        at_once = {i for i, (_, attempt, _) in leased.items() if (i + attempt) % self.fast}
        ids = [i for i in leased if i in at_once or chance.random() < 0.1]
        chance.shuffle(ids)
        for group_id in ids[: chance.randint(1, 4)]:
            worker, attempt, _ = leased[group_id]
            lease = Lease(group_id=group_id, attempt=attempt, epoch=self.ledger.epoch)
            reward = chance.choice([None, None, 0.0, 1.0])  # of all its members
            assert self.ledger.deliver(lease, worker, reward)
            self.note_delivery(lease, reward)

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
        assert self.ledger.deliver(lease, "a", 1.0) == wanted
        assert not self.ledger.deliver(lease, "a")
        if wanted:
            self.note_delivery(lease, 1.0)

    def note_delivery(self, lease: Lease, constant_reward: float | None) -> None:
        self.held.add(lease.group_id)
        self.arrived_by[lease.group_id] = lease.epoch, lease.attempt
        if constant_reward is not None and self.most_replaced:
            self.constant[lease.group_id] = constant_reward

    def keep(self, chance: random.Random) -> None:
        """Write delivered groups to disk; some may have been trained since."""
        ids = some(chance, self.arrived_by)
        self.ledger.keep({i: self.arrived_by[i][1] for i in ids})
        for group_id in ids & self.held:
            self.on_disk[group_id] = self.arrived_by[group_id]
            kept = (*self.on_disk[group_id], self.leased_at[group_id])
            assert self.ledger.kept[group_id] == kept

    def call_late(self, chance: random.Random) -> None:
        """Deliver and fail by a lease of an old epoch."""
        epoch = self.ledger.epoch - chance.randint(1, 2)
        lease = Lease(group_id=chance.randint(0, 30), attempt=chance.randint(1, 2), epoch=epoch)
        assert not self.ledger.deliver(lease, "a")
        self.ledger.fail(lease, "old")

    def fail(self, chance: random.Random) -> None:
        if (lease := self.old_lease(chance)) is None:
            return
        group_id = lease.group_id
        current = group_id in self.status().leased and lease == self.leases[group_id][-1]
        before = self.status()
        self.ledger.fail(lease, "it raised")
        after = self.status()
        assert (group_id in after.leased) == (group_id in before.leased and not current)
        if current:
            assert (group_id in after.pending) != (group_id in self.set_aside())
            assert "it raised" in after.last_reason

    # deaths of workers

    def report(self, chance: random.Random) -> None:
        problems = {i: f"problem {i}" for i in some(chance, self.leases)}
        self.ledger.report_user_code(chance.choice("abc"), problems)

    def die(self, chance: random.Random) -> None:
        worker = chance.choice("abc")
        expected = [i for i, held in self.status().leased.items() if held[0] == worker]
        assert self.ledger.forfeit(worker, "killed") == expected
        assert not set(expected) & set(self.status().leased)
        assert self.ledger.forfeit(worker, "killed") == []

    def pass_time(self, chance: random.Random) -> None:
        self.now += chance.choice([1, 10, 30])
        self.ledger.renew(some(chance, self.status().leased))

    def expire(self, chance: random.Random) -> None:
        self.now += chance.choice([60, 200])
        old = [i for i, held in self.status().leased.items() if held[2] > LEASE_S]
        assert self.ledger.expire(self.now) == old
        assert all(held[2] <= LEASE_S for held in self.status().leased.values())

    def restart_overdue(self, chance: random.Random) -> None:
        """Restart groups only if the next step can then start; their old leases are void."""
        overdue, before = self.ledger.overdue(), self.status()
        if not overdue:
            return
        assert self.on_stale == "restart" and self.ledger.ready() is None
        assert set(overdue) <= {*before.leased, *before.pending}
        self.ledger.restart_groups(overdue)
        assert self.ledger.ready() is not None and self.ledger.overdue() == []
        for group_id in overdue:
            self.restarts[group_id] += 1
            assert self.restarts[group_id] <= 2
            self.over[group_id] = len(self.leases[group_id])
            self.leased_at[group_id] = self.served
            self.on_disk.pop(group_id, None)
            if self.leases[group_id]:
                assert not self.ledger.deliver(self.leases[group_id][-1], "a")
        assert set(overdue) <= set(self.status().pending)

    # nodes

    def mark_lost(self, chance: random.Random) -> None:
        """Lose payloads of the taken step; only the learner notices such a loss."""
        taken = set(self.promised.group_ids) if self.promised else set()
        asked = some(chance, self.leases)
        gone = sorted(asked & taken & self.held)
        assert self.ledger.mark_lost(asked, "its node died") == gone
        self.held -= set(gone)
        for group_id in gone:
            self.constant.pop(group_id, None)
            self.on_disk.pop(group_id, None)
        assert set(gone) <= set(self.status().pending) | self.set_aside().keys()
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
        for group_id in group_ids:
            self.restarts.pop(group_id, None)
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
        watermark = self.trained.watermark
        self.on_disk = {i: by for i, by in self.on_disk.items() if i >= watermark}
        assert self.ledger.kept.keys() == self.on_disk.keys()

    def lose_the_learner(self, chance: random.Random) -> None:
        version, trained = self.committed[-1]
        aside = self.set_aside()
        self.version, self.trained = version, trained
        epoch = self.ledger.epoch
        self.ledger.rewind(self.trained, "the learner died")
        assert self.ledger.epoch == epoch + 1
        self.published, self.served = self.trained, self.version
        self.forget()
        later = {i: r for i, r in aside.items() if i not in trained and r != CONSTANT_REWARD}
        assert later.items() <= self.set_aside().items()  # poison stays poison

    # the queue

    def lose_the_queue(self, chance: random.Random) -> None:
        """Kill the queue: groups readable on disk are kept, the others are sampled again."""
        self.journal.close()
        if chance.random() < 0.5:
            with self.path.open("ab") as file:
                file.write(b'{"t": 1, "event": "pu')
        before, constant, most = self.status(), self.replaceable(), self.most_replaced
        played = replay(self.path, lambda: self.now)
        assert played.ledger is not None and played.run == "r" and not played.ended
        self.ledger = played.ledger
        after = self.status()
        for name in QueueStatus.__slots__:
            if name not in ("leased", "starved_s", "age_s"):  # times begin with the replay
                assert getattr(after, name) == getattr(before, name), name
        assert [v[:2] for v in after.leased.values()] == [v[:2] for v in before.leased.values()]
        self.journal = Journal(self.path)
        self.ledger.record = self.journal.record
        readable = some(chance, self.on_disk)
        self.ledger.recover(readable)
        gone = {i for i in self.on_disk if i in self.leased_at and i not in readable}
        live = {i for i in gone if i not in self.trained and i not in self.set_aside()}
        current = {i for i in self.on_disk if self.on_disk[i] == self.arrived_by.get(i)}
        stay = self.held & readable & current
        missed = min(len(constant), most) - min(len(constant & stay), most)
        passed = set(sorted(constant - stay)[:missed])
        assert self.status().depth == len(stay)
        assert set(self.status().pending) == set(before.pending) | self.held - stay - passed
        self.held = stay
        self.keep_constant(stay)
        for group_id in live | passed:
            self.on_disk.pop(group_id, None)

    def resume(self, chance: random.Random) -> None:
        """Begin a new job from a checkpoint with the groups on disk that it can train in time."""
        version, trained = self.committed[-1]
        kept = dict(self.ledger.kept)
        self.version, self.trained = version, trained
        self.published, self.served = self.trained, self.version
        settings = LedgerSettings(**self.settings)
        usable = {i: kept[i] for i in kept if chance.random() < 0.8}
        taken = adopted(usable, trained, settings)
        epoch = self.ledger.epoch + 1
        self.forget()
        self.journal.record(
            "start", run="r", epoch=epoch, settings=self.settings, **trained.to_json(),
            adopted={str(i): list(each) for i, each in taken.items()},
        )  # fmt: skip
        self.ledger = Ledger(
            settings, trained, epoch=epoch, clock=lambda: self.now, record=self.journal.record,
            adopted=taken,
        )  # fmt: skip
        self.on_disk = {i: (each.epoch, each.attempt) for i, each in taken.items()}
        self.leased_at = {i: each.started for i, each in taken.items()}
        self.leases = {i: [] for i in taken}
        assert self.status().pending == sorted(taken)
        if len(taken) == min(self.window, self.total - len(trained)):
            return
        for group_id in usable.keys() - taken.keys():
            started = usable[group_id].started
            ahead = sum(each.started <= started for each in taken.values())
            late = version + ahead // self.per_step > started + self.max_staleness
            over = group_id in trained or group_id < trained.watermark or started > version
            assert over or (late and self.on_stale != "train_late"), "it is sampled again"

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
        assert sorted([*status.pending, *status.leased, *self.held]) == sorted(self.live())
        assert status.depth == len(self.held)
        assert status.credit == self.credit()
        pushed = len(self.trained) - len(self.published)
        assert pushed == self.per_step * (self.version - self.served)
        assert self.num_started() + pushed <= self.window
        assert len(self.trained) + self.num_started() <= self.total
        assert status.published == self.published.watermark

    def steps_train_the_oldest_groups_if_the_others_stay_in_time(self) -> None:
        step, missing = self.ledger.ready(), self.ledger.missing()
        if (promised := self.intact()) is not None:
            assert missing == [i for i in promised.group_ids if i not in self.held]
            assert step == (None if missing else promised)
            return
        rule = StepRule(self.max_staleness, self.window, late=self.on_stale == "train_late")
        ids, replaced, waits_for = next_step(rule, self.view())
        lacking = min(self.per_step, self.total - len(self.trained)) - self.num_started()
        assert missing == waits_for + self.new_ids(lacking)
        assert (step.group_ids if step else []) == ids
        assert list(step.replaced if step else ()) == replaced

    def check(self) -> None:
        self.window_and_accounts()
        self.steps_train_the_oldest_groups_if_the_others_stay_in_time()

    def finish_the_run(self, chance: random.Random) -> None:
        """Continue the run to its end: no group is lost, and nothing gets stuck."""
        while len(self.trained) < self.total:
            before = len(self.trained)
            while self.ledger.lease("z", 5, "") or self.status().leased:  # suspects come alone
                for group_id, held in reversed([*self.status().leased.items()]):
                    lease = Lease(group_id=group_id, attempt=held[1], epoch=self.ledger.epoch)
                    if lease.attempt > len(self.leases.get(group_id, [])):
                        self.note_lease(lease)
                    assert self.ledger.deliver(lease, held[0])
                    self.note_delivery(lease, None)
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


def some(chance: random.Random, ids: Iterable[int]) -> set[int]:
    share = chance.random()
    return {group_id for group_id in sorted(ids) if chance.random() < share}


@pytest.mark.parametrize("seed", range(150))
def test_the_ledger_answers_as_its_model_after_any_events(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    run = ModelledRun(tmp_path, chance)
    trouble = chance.choice([0, 0.05, 0.15, 0.3])
    for _ in range(60):
        event = chance.choice(TROUBLE if chance.random() < trouble else QUIET)
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


def test_a_synchronous_step_waits_for_its_slowest_group() -> None:
    ledger = new()
    first, second = ledger.lease("a", 9)
    assert (first.group_id, second.group_id) == (0, 1)
    assert ledger.lease("a", 9) == []  # synchronous: the next step waits for the publication
    assert ledger.deliver(second) and ledger.take() is None
    assert ledger.missing() == [0]
    assert ledger.deliver(first)
    step = ledger.take()
    assert step is not None and step.group_ids == [0, 1] and step.set_aside == {}
    ledger.publish(1, TrainedGroups(2))
    assert lease(ledger, 1) == [2]


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
    assert ledger.status().duplicates == 1


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
