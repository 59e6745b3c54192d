"""Leases, arrivals and releases in any order: in order, once, in the window, not too stale."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.ledger import Ledger
from distill.delivery import TrainedGroups


class LedgerMachine(RuleBasedStateMachine):
    """A run, played in any order; `version` is the number of publications so far."""

    @initialize(
        per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        steps=st.integers(0, 6),
        steps_before=st.integers(0, 2),
    )
    def start(self, per_step: int, max_staleness: int, steps: int, steps_before: int) -> None:
        self.per_step, self.max_staleness = per_step, max_staleness
        self.version = self.version_before = steps_before
        self.first = per_step * steps_before
        self.total = self.first + per_step * steps
        self.ledger = Ledger(
            trained=TrainedGroups(self.first),
            groups_per_step=per_step,
            max_staleness=max_staleness,
            total_groups=self.total,
        )
        self.leased_at: dict[int, int] = {}
        self.arrived: set[int] = set()
        self.handed_out: list[int] = []
        self.trained: list[int] = []

    @rule(max_groups=st.integers(1, 5))
    def lease(self, max_groups: int) -> None:
        leased = self.ledger.lease(max_groups)
        assert len(leased) <= max_groups
        for group_id in leased:
            assert group_id == self.first + len(self.leased_at)  # each once, in order
            self.leased_at[group_id] = self.version

    @precondition(lambda self: self.missing())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(self.missing()))
        assert self.ledger.deliver(group_id)
        self.arrived.add(group_id)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        assert not self.ledger.deliver(data.draw(st.sampled_from(sorted(self.arrived))))

    @rule()
    def hand_out(self) -> None:
        ready = self.ledger.in_order()
        self.handed_out += ready
        following = self.first + len(self.handed_out)
        assert following not in self.arrived  # nothing that could go was held back

    @precondition(lambda self: len(self.handed_out) - len(self.trained) >= self.per_step)
    @rule()
    def train_and_publish(self) -> None:
        step = self.handed_out[len(self.trained) :][: self.per_step]
        for group_id in step:
            assert self.version - self.leased_at[group_id] <= self.max_staleness
        self.trained += step
        self.version += 1
        self.ledger.release(self.per_step)

    def missing(self) -> list[int]:
        return sorted(self.leased_at.keys() - self.arrived)

    @invariant()
    def order_window_and_accounts(self) -> None:
        assert self.handed_out == list(range(self.first, self.first + len(self.handed_out)))
        assert set(self.handed_out) <= self.arrived
        in_flight = len(self.leased_at) - len(self.trained)
        assert in_flight <= self.per_step * (self.max_staleness + 1)
        assert all(group_id < self.total for group_id in self.leased_at)
        assert self.ledger.missing() == self.missing()
        assert self.ledger.exhausted == (len(self.leased_at) == self.total - self.first)

    def teardown(self) -> None:
        """From wherever it stopped, the run can go on to its end: nothing is lost or stuck."""
        while len(self.trained) < self.total - self.first:
            before = len(self.trained)
            self.lease(5)
            for group_id in reversed(self.missing()):
                assert self.ledger.deliver(group_id)
                self.arrived.add(group_id)
            self.hand_out()
            while len(self.handed_out) - len(self.trained) >= self.per_step:
                self.train_and_publish()
            assert len(self.trained) > before
        assert self.trained == list(range(self.first, self.total))
        assert self.ledger.exhausted and self.ledger.lease(1) == []


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestLedger = LedgerMachine.TestCase


def new(trained: TrainedGroups | None = None) -> Ledger:
    return Ledger(
        trained=trained or TrainedGroups(), groups_per_step=2, max_staleness=0, total_groups=8
    )


def test_the_fastest_group_waits_for_the_slowest() -> None:
    ledger = new()
    assert ledger.lease(9) == [0, 1]
    assert ledger.lease(9) == []  # synchronous: the next step waits for the publication
    assert ledger.deliver(1) and ledger.in_order() == []
    assert ledger.missing() == [0]
    assert ledger.deliver(0) and ledger.in_order() == [0, 1] and ledger.in_order() == []
    ledger.release(2)
    assert ledger.lease(1) == [2]


def test_an_arrival_that_was_never_leased_is_a_bug() -> None:
    ledger = new()
    ledger.lease(1)
    for group_id in (1, -1):
        with pytest.raises(AssertionError, match=f"group {group_id} was never leased"):
            ledger.deliver(group_id)


def test_a_resumed_run_starts_after_what_its_weights_contain() -> None:
    assert new(TrainedGroups(4)).lease(9) == [4, 5]
    with pytest.raises(AssertionError):
        new(TrainedGroups(2, beyond=[5]))  # checkpoints are of whole steps
