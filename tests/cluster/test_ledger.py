"""The ledger under leases, deliveries, failures and deaths in any order.

Each group is trained once and in time, and the run never gets stuck. The state machine keeps a
journal as a run does. Sometimes it replaces the ledger by a replay of the journal, as a killed
queue does.
"""

import errno
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.inspect.audit import audit
from cluster.queue.adoption import adopted
from cluster.queue.journal import Journal, read_journal, replay
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_answers import QueueStatus
from cluster.queue.ledger_settings import LedgerSettings
from distill.errors import DataError
from distill.records import CONSTANT_REWARD, Lease, StepGroups, TrainedGroups
from tests.full_disk import files_of_at_most
from tests.refusals import refuses
from tests.rows import read_rows

LEASE_S = 100.0
WORKERS = st.sampled_from(["a", "b", "c"])


class LedgerMachine(RuleBasedStateMachine):
    """A run whose events happen in any order.

    `version` is the number of steps in the learner's weights. `published` holds the groups of the
    weights on the engines, whose version is `served`; during a push it is one behind.
    """

    @initialize(
        per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        steps=st.integers(0, 6),
        steps_before=st.integers(0, 2),
        poison_before=st.booleans(),
        on_stale=st.sampled_from(["wait", "train_late", "restart"]),
        room=st.floats(0, 1),
        most_replaced=st.integers(0, 4),
    )
    def start(
        self, per_step: int, max_staleness: int, steps: int, steps_before: int, poison_before: bool,
        on_stale: str, room: float, most_replaced: int,
    ) -> None:  # fmt: skip
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "ledger.jsonl"
        self.journal = Journal(self.path)
        self.per_step, self.max_staleness, self.on_stale = per_step, max_staleness, on_stale
        self.window = per_step + int(room * per_step * max_staleness)
        self.most_replaced = most_replaced
        self.now = 0.0
        before = per_step * steps_before
        poison = {0: "poison"} if poison_before and before else {}
        self.trained = TrainedGroups(before + len(poison), poison)
        self.version = steps_before
        self.total = per_step * (steps_before + steps)
        self.settings = {
            "groups_per_step": per_step, "max_staleness": max_staleness, "total_groups": self.total,
            "lease_s": LEASE_S, "max_failures": 2, "max_deaths": 4, "groups_in_flight": self.window,
            "on_stale": on_stale, "restart_after": 0.0, "max_restarts": 2,
            "most_replaced": self.most_replaced,
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
        self.constant: set[int] = set()  # held groups of one reward
        self.on_disk: dict[int, int] = {}  # attempts of deliveries, by id
        self.arrived_by: dict[int, int] = {}  # attempt of the newest delivery
        self.taken: StepGroups | None = None

    # workers

    @rule(worker=WORKERS, max_groups=st.integers(1, 5), again=st.booleans())
    def lease(self, worker: str, max_groups: int, again: bool) -> None:
        self.request = getattr(self, "request", 0) + 1
        leases = self.ledger.lease(worker, max_groups, f"{worker}{self.request}")
        assert len(leases) <= max_groups
        ids = [lease.group_id for lease in leases]
        assert len(set(ids)) == len(ids)
        fresh = [group_id for group_id in ids if group_id not in self.leases]
        assert ids == sorted(set(ids) - set(fresh)) + sorted(fresh)  # pending ones come first
        for lease in leases:
            group_id = lease.group_id
            assert group_id not in self.held and group_id not in self.trained
            assert lease.attempt == 1 + len(self.leases.setdefault(group_id, []))
            assert lease.epoch == self.ledger.epoch
            self.leases[group_id].append(lease)
            self.note_lease(lease)
        if again and leases:  # Ray repeats a call whose answer was lost
            assert self.ledger.lease(worker, max_groups, f"{worker}{self.request}") == leases

    def note_lease(self, lease: Lease) -> None:
        if self.over.get(lease.group_id) == lease.attempt - 1:
            self.leased_at[lease.group_id] = self.served
        self.leased_at.setdefault(lease.group_id, self.served)

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Deliver by any lease of this epoch, expired or not."""
        group_id = data.draw(st.sampled_from(sorted(i for i, of in self.leases.items() if of)))
        lease = data.draw(st.sampled_from(self.leases[group_id]))
        wanted = (
            group_id not in self.trained
            and group_id not in self.held
            and group_id not in self.set_aside()
            and lease.attempt > self.over.get(group_id, 0)
        )
        constant_reward = data.draw(st.sampled_from([None, None, 0.0, 1.0]))
        assert self.ledger.deliver(lease, "a", constant_reward) == wanted
        assert not self.ledger.deliver(lease, "a")
        if wanted:
            self.held.add(group_id)
            self.arrived_by[group_id] = lease.attempt
            if constant_reward is not None and self.most_replaced:
                self.constant.add(group_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Write delivered groups to disk; some may have been trained since."""
        ids = data.draw(st.sets(st.sampled_from(sorted(self.arrived_by))))
        attempts = {i: self.arrived_by[i] for i in ids}
        self.ledger.keep(attempts)
        self.on_disk |= {i: attempt for i, attempt in attempts.items() if i in self.held}
        for group_id in ids & self.held:
            kept = self.ledger.kept[group_id]
            assert (kept.epoch, kept.attempt) == (self.ledger.epoch, self.arrived_by[group_id])
            assert kept.started == self.leased_at[group_id]

    @rule(group_id=st.integers(0, 30), attempt=st.integers(1, 2), back=st.integers(1, 2))
    def deliver_for_an_old_epoch(self, group_id: int, attempt: int, back: int) -> None:
        lease = Lease(group_id=group_id, attempt=attempt, epoch=self.ledger.epoch - back)
        assert not self.ledger.deliver(lease, "a")
        self.ledger.fail(lease, "old")

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(i for i, of in self.leases.items() if of)))
        lease = data.draw(st.sampled_from(self.leases[group_id]))
        current = group_id in self.status().leased and lease == self.leases[group_id][-1]
        before = self.status()
        self.ledger.fail(lease, "it raised")
        after = self.status()
        assert (group_id in after.leased) == (group_id in before.leased and not current)
        if current:
            assert (group_id in after.pending) != (group_id in self.set_aside())
            assert "it raised" in after.last_reason

    # deaths of workers

    @rule(worker=WORKERS, data=st.data())
    def report(self, worker: str, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.leases) or [0])))
        self.ledger.report_user_code(worker, {i: f"problem {i}" for i in ids})

    @rule(worker=WORKERS)
    def die(self, worker: str) -> None:
        expected = [i for i, held in self.status().leased.items() if held[0] == worker]
        assert self.ledger.forfeit(worker, "killed") == expected
        assert not set(expected) & set(self.status().leased)
        assert self.ledger.forfeit(worker, "killed") == []

    @rule(seconds=st.sampled_from([10.0, 60.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        old = [i for i, held in self.status().leased.items() if held[2] > LEASE_S]
        assert self.ledger.expire(self.now) == old
        assert all(held[2] <= LEASE_S for held in self.status().leased.values())

    @rule()
    def restart_overdue_groups(self) -> None:
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

    @rule(data=st.data())
    def mark_lost(self, data: st.DataObject) -> None:
        """Lose payloads of the taken step; only the learner notices such a loss."""
        taken = set(self.taken.group_ids) if self.taken else set()
        asked = data.draw(st.sets(st.sampled_from(sorted(self.leases) or [0])))
        gone = sorted(asked & taken & self.held)
        assert self.ledger.mark_lost(asked, "its node died") == gone
        self.held -= set(gone)
        self.constant -= set(gone)
        for group_id in gone:
            self.on_disk.pop(group_id, None)
        assert set(gone) <= set(self.status().pending) | self.set_aside().keys()
        assert self.ledger.mark_lost(asked, "its node died") == []

    # the learner

    @rule()
    def take(self) -> None:
        pushing = self.served < self.version
        step = self.ledger.take(self.trained, pushing=pushing)
        assert step == self.ledger.take(self.trained, pushing=pushing)
        missing = self.ledger.missing()
        if self.taken and not self.set_aside().keys() & set(self.taken.group_ids):
            lost = [i for i in self.taken.group_ids if i not in self.held]
            assert step == (None if lost else self.taken)
            assert missing == lost
        elif step is None:
            self.taken = None  # one of its groups is set aside
            ids, _ = made = self.first_step(self.by_age(self.held))
            assert missing or len(self.trained) == self.total
            assert len(ids) < self.per_step or not self.leaves_time(*made)
        else:
            assert step.group_ids == sorted(step.group_ids) and set(step.group_ids) <= self.held
            assert len(step.group_ids) == self.per_step
            assert len(step.replaced) <= self.most_replaced
            ages = [self.version - self.leased_at[group_id] for group_id in step.group_ids]
            assert step.start_max == max(ages)
            assert step.overdue == sum(age > self.max_staleness for age in ages)
            assert step.restarts == sum(self.restarts[i] for i in step.group_ids)
            assert step.overdue == 0 or self.on_stale == "train_late"
            assert step.replaced.keys() <= self.constant
            assert self.leaves_time(step.group_ids, list(step.replaced))
            self.taken = step

    def first_step(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Taken and replaced groups of a step that goes through `ids` in order."""
        taken: list[int] = []
        replaced: list[int] = []
        while ids and len(taken) < self.per_step:
            passed = ids[0] in self.constant and len(replaced) < self.most_replaced
            (replaced if passed else taken).append(ids[0])
            ids = ids[1:]
        return sorted(taken), sorted(replaced)

    def by_age(self, ids: Iterable[int]) -> list[int]:
        return sorted(ids, key=lambda group_id: (self.leased_at[group_id], group_id))

    def leaves_time(self, ids: list[int], replaced: list[int]) -> bool:
        """True if all groups left behind by this step can be trained in time, step by step."""
        gone = self.set_aside()
        live = self.by_age(i for i in self.leased_at if i not in self.trained and i not in gone)
        if self.on_stale == "train_late" or (ids, replaced) == self.first_step(live):
            return True
        version = self.version
        rest = [group_id for group_id in live if group_id not in (*ids, *replaced)]
        while rest:  # the oldest first, a step after the other
            version += 1
            taken, passed = self.first_step(rest)
            if any(version - self.leased_at[i] > self.max_staleness for i in taken):
                return False
            rest = rest[len(taken) + len(passed) :]
        return True

    @precondition(lambda self: self.taken)
    @rule(again=st.booleans(), beside=st.booleans())
    def train(self, again: bool, beside: bool) -> None:
        """Train a step and push it: at once, or `beside` the next events."""
        assert self.taken is not None
        if self.served < self.version:
            self.arrive(again)
        group_ids, skipped = self.taken.group_ids, self.taken.set_aside
        peeked = self.ledger.peek(self.trained.after(group_ids, skipped))
        assert peeked is not None and not set(peeked.group_ids) & set(group_ids)
        passed, self.taken = self.taken.replaced, None
        for group_id in group_ids if self.on_stale != "train_late" else ():
            # it may have been leased again since, by a queue that lost it: the first one counts
            assert self.version - self.leased_at[group_id] <= self.max_staleness
        self.trained = self.trained.after(group_ids, skipped)
        assert skipped.items() <= self.trained.set_aside.items()
        self.version += 1
        for _ in range(1 + again) if beside else ():
            self.ledger.push(self.version, self.trained, self.ledger.epoch)
        if not beside:
            self.arrive(again)
        self.held -= {*group_ids, *passed}
        for group_id in group_ids:
            self.restarts.pop(group_id, None)
        self.constant &= self.held
        ready = self.ledger.ready()  # nothing has arrived meanwhile
        assert peeked.whole == (ready is not None)
        assert ready is None or peeked.group_ids == ready.group_ids
        assert peeked == self.ledger.peek(self.trained)
        assert passed.keys() <= self.set_aside().keys()

    @precondition(lambda self: self.served < self.version)
    @rule(again=st.booleans())
    def arrive(self, again: bool) -> None:
        taken = self.taken
        for _ in range(1 + again):
            self.ledger.publish(self.version, self.trained, self.ledger.epoch)
        self.published, self.served = self.trained, self.version
        if taken and self.held.issuperset(taken.group_ids):  # it stays the next step
            assert self.ledger.take(self.trained) == taken

    @rule()
    def a_lost_learners_publication_changes_nothing(self) -> None:
        before = self.status()
        self.ledger.push(self.version, self.trained, self.ledger.epoch)
        more = TrainedGroups(max([self.published.watermark, *self.published.above]) + 5)
        self.ledger.push(99, more, self.ledger.epoch - 1)
        self.ledger.publish(99, more, self.ledger.epoch - 1)
        self.ledger.publish(self.served, self.published, self.ledger.epoch)
        assert self.status() == before

    @rule()
    def commit(self) -> None:
        self.committed.append((self.version, self.trained))
        self.ledger.commit(self.version, self.trained.watermark)
        watermark = self.trained.watermark
        self.on_disk = {i: attempt for i, attempt in self.on_disk.items() if i >= watermark}
        assert self.ledger.kept.keys() == self.on_disk.keys()

    @rule()
    def lose_the_learner(self) -> None:
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

    @rule(cut=st.booleans(), data=st.data())
    def lose_the_queue(self, cut: bool, data: st.DataObject) -> None:
        """Kill the queue: groups readable on disk are kept, the others are sampled again."""
        self.journal.close()
        if cut:
            with self.path.open("ab") as file:
                file.write(b'{"t": 1, "event": "pu')
        before = self.status()
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
        readable = data.draw(st.sets(st.sampled_from(sorted(self.on_disk) or [0])))
        self.ledger.recover(readable)
        gone = {i for i in self.on_disk if i in self.leased_at and i not in readable}
        live = {i for i in gone if i not in self.trained and i not in self.set_aside()}
        current = {i for i in self.on_disk if self.on_disk[i] == self.arrived_by.get(i)}
        stay = self.held & readable & current
        constant = self.constant & stay
        most = self.most_replaced
        missed = min(len(self.constant), most) - min(len(constant), most)
        passed = set(sorted(self.constant - constant)[:missed])
        assert self.status().depth == len(stay)
        assert set(self.status().pending) == set(before.pending) | self.held - stay - passed
        self.held, self.constant = stay, constant
        for group_id in live | passed:
            self.on_disk.pop(group_id, None)

    @rule(cut=st.integers(0, 3))
    def resume(self, cut: int) -> None:
        """Begin a new job from a checkpoint with the groups on disk that it can train in time."""
        version, trained = self.committed[-1]
        is_newest = version == self.version
        kept = dict(self.ledger.kept)
        self.version, self.trained = version, trained
        self.published, self.served = self.trained, self.version
        settings = LedgerSettings(**self.settings)
        usable = {i: each for n, (i, each) in enumerate(sorted(kept.items())) if n % 4 >= cut}
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
        self.on_disk = {i: each.attempt for i, each in taken.items()}
        self.leased_at = {i: each.started for i, each in taken.items()}
        self.leases = {i: [] for i in taken}
        assert self.status().pending == sorted(taken)
        if is_newest and not cut and not self.most_replaced:
            live = {i for i in kept if i not in trained and i >= trained.watermark}
            assert taken.keys() == live, "a group on disk would be sampled again"

    # what always holds

    def status(self) -> QueueStatus:
        return self.ledger.status()

    def set_aside(self) -> dict[int, str]:
        return dict(self.ledger._set_aside)

    @invariant()
    def window_and_accounts(self) -> None:
        status = self.status()
        started = [*status.pending, *status.leased, *sorted(self.held)]
        assert len(started) == len(set(started))
        assert status.depth == len(self.held)
        replaceable = min(len(self.constant), self.most_replaced)
        pushed = len(self.trained) - len(self.published)
        assert pushed == self.per_step * (self.version - self.served)
        assert len(started) - replaceable + pushed + status.credit <= self.window
        assert not set(started) & self.set_aside().keys()
        assert len(self.trained) + len(started) - replaceable <= self.total
        assert status.published == self.published.watermark
        assert not [group_id for group_id in started if group_id in self.trained]

    def teardown(self) -> None:
        """Continue the run to its end: no group is lost, and nothing gets stuck."""
        if not hasattr(self, "ledger"):
            return
        beside = False
        while len(self.trained) < self.total:
            before, beside = len(self.trained), not beside
            while self.ledger.lease("z", 5, "") or self.status().leased:  # suspects come alone
                for group_id, held in reversed([*self.status().leased.items()]):
                    lease = Lease(group_id=group_id, attempt=held[1], epoch=self.ledger.epoch)
                    if lease.attempt > len(self.leases.get(group_id, [])):
                        self.note_lease(lease)
                    assert self.ledger.deliver(lease, held[0])
                    self.held.add(group_id)
            self.take()
            if self.taken is None:  # what it lacks waits for slots
                assert self.served < self.version
                self.arrive(False)
                continue
            self.train(False, beside)
            assert len(self.trained) > before
        if self.served < self.version:
            self.arrive(False)
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
        self.directory.cleanup()


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase


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
