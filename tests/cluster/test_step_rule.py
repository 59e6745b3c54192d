"""Which groups a step takes: by hand, and in simulated runs with long tails."""

import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling import Outcome, Schedule, Simulation, Workload
from cluster.inspect.audit import audit
from cluster.queue.journal import Journal
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_settings import LedgerSettings
from cluster.queue.step_rule import Choice, StepRule, View
from distill.records import CONSTANT_REWARD, Lease, StepGroups, TrainedGroups


def view(step: int, started: dict[int, int], *finished: int) -> View:
    return View(step=step, groups_per_step=2, started=started, finished=set(finished))


def choose(rule: StepRule, view: View) -> list[int] | None:
    """Ids of a step that passes over none."""
    if (choice := rule.choose(view)) is None:
        return None
    assert not choice.replaced
    return choice.ids


def test_the_short_overtake_the_long_until_these_are_due() -> None:
    rule = StepRule(horizon=2, window=6)
    started = {0: 0, 1: 0, 2: 0, 3: 0}
    assert choose(rule, view(0, started, 3)) is None
    assert rule.waited_for(view(0, started, 3)) == [0, 1, 2]
    assert choose(rule, view(0, started, 3, 2)) == [2, 3]
    started = {0: 0, 1: 0, 4: 1, 5: 1, 6: 1, 7: 1}
    assert choose(rule, view(1, started, 7, 5, 6)) == [5, 6]  # the oldest of them
    # Now 0 and 1 have this step alone.
    started = {0: 0, 1: 0, 4: 1, 7: 1, 8: 2}
    assert choose(rule, view(2, started, 1, 4, 7, 8)) is None
    assert rule.waited_for(view(2, started, 1, 4, 7, 8)) == [0]
    assert choose(rule, view(2, started, 0, 1, 4, 7, 8)) == [0, 1]


def test_leaves_no_more_than_the_steps_to_come_can_take() -> None:
    """Four that started together are two steps' worth: neither may be put off any more."""
    rule = StepRule(horizon=2, window=6)
    started = {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    assert choose(rule, view(1, started, 4, 5)) is None
    assert rule.waited_for(view(1, started, 4, 5)) == [0, 1, 2, 3]
    assert choose(rule, view(1, started, 2, 4, 5)) is None
    assert choose(rule, view(1, started, 2, 3, 4, 5)) == [2, 3]


def test_the_overdue_are_waited_for_or_trained_late() -> None:
    started = {0: 0, 4: 3, 5: 3}
    assert choose(StepRule(horizon=2, window=6), view(3, started, 4, 5)) is None
    late = StepRule(horizon=2, window=6, late=True)
    assert choose(late, view(3, started, 4, 5)) == [4, 5]
    assert late.waited_for(view(3, started, 4, 5)) == []
    assert choose(late, view(3, started, 0, 4, 5)) == [0, 4]


def test_only_those_begin_again_that_hold_up_a_step_alone() -> None:
    rule, started = StepRule(horizon=2, window=9), {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    held_up = view(1, started, 4, 5)  # four that started together have two places left
    assert rule.begin_again(held_up, [3, 5, 1, 0], 1) == [3, 1]
    assert rule.begin_again(held_up, [3], 1) == [], "it would wait for another all the same"
    assert rule.begin_again(view(1, started, 0, 1), [3], 1) == []  # it goes as it is
    assert rule.begin_again(view(1, started, 4), [0, 1, 2, 3], 1) == []  # it lacks a group


def test_of_those_that_have_begun_again_the_start_counts_and_not_the_id() -> None:
    rule, started = StepRule(horizon=2, window=9), {0: 2, 1: 1, 4: 1, 5: 2}
    assert choose(rule, view(2, started, 0, 1, 4, 5)) == [1, 4]
    assert choose(rule, view(2, started, 0, 4, 5)) == [0, 4]


@given(
    per_step=st.integers(1, 3),
    horizon=st.integers(0, 3),
    ages=st.lists(st.integers(0, 4), max_size=12),
    chance=st.randoms(use_true_random=False),
)
def test_as_few_as_can_be_begin_again(
    per_step: int, horizon: int, ages: list[int], chance: random.Random
) -> None:
    """Whatever has started: those that begin again let the step go, and no fewer of them would."""
    started = {group_id: 4 - age for group_id, age in enumerate(sorted(ages, reverse=True))}
    finished = {group_id for group_id in started if chance.random() < 0.6}
    able = [group_id for group_id in started if group_id not in finished and chance.random() < 0.7]
    chance.shuffle(able)
    made = View(step=4, groups_per_step=per_step, started=started, finished=finished)
    rule = StepRule(horizon=horizon, window=12)

    def goes(ids: Iterable[int]) -> bool:
        return rule.choose(replace(made, started=started | dict.fromkeys(ids, 4))) is not None

    again = rule.begin_again(made, able, 4)
    assert set(again) <= set(able) and len(set(again)) == len(again)
    if again:
        assert goes(again)
        assert not any(goes(fewer) for fewer in combinations(again, len(again) - 1))
    elif not goes(()):
        assert not goes(able), "it waits, though it need not"


def test_groups_of_one_reward_are_passed_over_up_to_a_bound() -> None:
    rule = StepRule(horizon=1, window=4)
    started, made = {0: 0, 1: 0, 2: 0, 3: 0}, partial(View, step=0, groups_per_step=2)
    constant = made(started=started, finished={0, 1}, constant={1}, most_replaced=2)
    assert rule.room(constant) == 1  # another in the place of 1
    assert rule.choose(constant) is None and 2 in rule.waited_for(constant)
    started[4] = 0
    three = made(started=started, finished={0, 1, 2}, constant={1}, most_replaced=2)
    assert rule.choose(three) == Choice([0, 2], [1])
    many = made(started=started, finished={0, 1, 2}, constant={0, 1, 2}, most_replaced=1)
    assert rule.room(many) == 0 and rule.choose(many) == Choice([1, 2], [0])
    del started[4]
    assert rule.choose(replace(many, most_replaced=0)) == Choice([0, 1], [])


def test_waits_for_none_that_will_be_passed_over() -> None:
    """Three of one start would be too many for the two places that are left, were all to train."""
    rule = StepRule(horizon=1, window=4)
    started = {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0}
    made = View(step=0, groups_per_step=2, started=started, finished={0, 1, 4, 5}, most_replaced=2)
    assert rule.choose(made) is None
    assert rule.choose(replace(made, constant={4, 5})) == Choice([0, 1], [])
    assert rule.choose(replace(made, constant={0, 4})) == Choice([1, 5], [0, 4])


def test_a_group_that_was_passed_over_is_sampled_again_by_weights_that_are_older() -> None:
    """The learner went back: it may be what the policy can learn from, this time."""
    settings = LedgerSettings(
        groups_per_step=1, max_staleness=0, total_groups=2, lease_s=60, most_replaced=2
    )
    ledger = Ledger(settings, TrainedGroups(), epoch=1)
    [first] = ledger.lease("a", 9)
    ledger.deliver(first, constant_reward=1.0)
    [second] = ledger.lease("a", 9)
    ledger.deliver(second)
    step = ledger.take()
    assert step is not None and (step.group_ids, step.replaced) == ([1], {0: 1.0})
    trained = TrainedGroups().after([1], step.set_aside)
    assert trained == TrainedGroups(2, {0: CONSTANT_REWARD}) and len(trained) == 1
    ledger.publish(1, trained)
    assert ledger.status().set_aside == 0  # none is at fault
    ledger.rewind(TrainedGroups(), "the learner died")
    assert [lease.group_id for lease in ledger.lease("a", 9)] == [0]


def test_the_audit_finds_a_group_that_was_passed_over_without_cause(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    journal = Journal(path)
    settings = {"groups_per_step": 1, "max_staleness": 0, "total_groups": 1, "lease_s": 60.0,
                "most_replaced": 2}  # fmt: skip
    skipped = {"0": CONSTANT_REWARD, "1": CONSTANT_REWARD}
    journal.record("start", run="r", epoch=1, settings=settings, watermark=0, set_aside={})
    by = {"worker": "a", "epoch": 1}
    for group_id, reward in enumerate(({"constant_reward": 0.0}, {}, {})):
        journal.record("lease", ids=[group_id], attempts=[1], **by, request="")
        journal.record("put", id=group_id, attempt=1, **by, **reward)
    journal.record("take", ids=[2], skipped=skipped, replaced=[0, 1])
    journal.record("train", version=1, ids=[2], watermark=3, skipped=skipped)
    found = audit(path, steps=1)
    [problem] = found.problems
    assert "contradicts the lines before it" in problem
    assert "2 skipped: all members have the same reward" in found.lines()


def test_a_synchronous_run_goes_in_order() -> None:
    rule = StepRule(horizon=0, window=2)
    assert choose(rule, view(3, {6: 3, 7: 3}, 7)) is None
    assert choose(rule, view(3, {6: 3, 7: 3}, 7, 6)) == [6, 7]
    assert rule.room(view(3, {6: 3, 7: 3})) == 0


def test_what_is_trained_late_is_counted() -> None:
    rules: dict[str, Any] = {"on_stale": "train_late"}
    ledger = Ledger(
        LedgerSettings(
            groups_per_step=1, max_staleness=1, total_groups=4, lease_s=60, **rules
        ),
        TrainedGroups(),
        epoch=1,
    )  # fmt: skip
    trained, counted = TrainedGroups(), []
    slow, other = ledger.lease("a", 2)
    for version in (1, 2, 3, 4):
        if version == 4:
            other = slow
        ledger.deliver(other)
        step = ledger.take(trained)
        assert step is not None and step.group_ids == [other.group_id]
        counted.append(step.overdue)
        trained = step.after(trained)
        ledger.publish(version, trained)
        [other] = ledger.lease("a", 1) or [slow]
    assert counted == [0, 0, 0, 1] and trained == TrainedGroups(4)


def test_what_hangs_begins_again_and_is_in_time_at_last(tmp_path: Path) -> None:
    """Twice here; then it is waited for. What its first lease delivers is dropped."""
    now, path = 0.0, tmp_path / "ledger.jsonl"
    rules: dict[str, Any] = {"on_stale": "restart", "most_begun_again": 2,
                             "begin_again_after": 4.0}  # fmt: skip
    settings = LedgerSettings(
        groups_per_step=1, max_staleness=1, total_groups=9, lease_s=1e9, **rules
    )
    journal = Journal(path)
    journal.record("start", run="r", epoch=1, settings=asdict(settings), watermark=0, set_aside={})
    ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=lambda: now, record=journal.record)
    [hangs] = ledger.lease("a", 1)
    trained, begun_at = TrainedGroups(), list[int]()
    leases = [hangs]

    def step(one: Lease, version: int) -> StepGroups:
        nonlocal trained
        assert ledger.deliver(one)
        taken = ledger.take(trained)
        assert taken is not None
        trained = taken.after(trained)
        ledger.publish(version, trained)
        return taken

    for version in range(4):
        [other] = ledger.lease("b", 1)
        now += 10
        assert ledger.overdue() == []  # nothing is finished that could be trained without it
        if version == 0:
            step(other, version + 1)
            continue
        assert ledger.deliver(other) and ledger.take(trained) is None
        assert ledger.overdue() == [], "as long under way as others are"
        now += 35
        again = ledger.overdue()
        if version == 3:
            assert again == [] and ledger.missing() == [0]  # it is waited for
            last = step(leases[-1], version + 1)
            assert last.group_ids == [0] and (last.start_max, last.begun_again) == (1, 2)
            break
        assert again == [0]
        ledger.begin_again(again)
        begun_at.append(version)
        assert not ledger.deliver(leases[-1], "a"), "it is as old as it was"
        leases += ledger.lease("c", 1)
        assert leases[-1] == Lease(group_id=0, attempt=len(leases), epoch=1)
        taken = ledger.take(trained)
        assert taken is not None and (taken.start_max or 0) <= 1
        trained = taken.after(trained)
        ledger.publish(version + 1, trained)
    assert begun_at == [1, 2]
    found = audit(path)
    assert found.problems == [] and found.duplicates == 2
    assert found.re_leases == {"restarted, because they were overdue": 2}


def test_steps_of_many_groups_know_what_is_usual() -> None:
    """A step has more groups than the clock of those that arrived remembers otherwise."""
    now, per_step = 0.0, 300
    settings = LedgerSettings(
        groups_per_step=per_step, max_staleness=1, total_groups=4 * per_step, lease_s=1e9,
        on_stale="restart",
    )  # fmt: skip
    ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=lambda: now)
    [hangs, *others] = ledger.lease("a", per_step + 1)
    trained = TrainedGroups()
    for version in (1, 2):
        now += 10
        for lease in others:
            ledger.deliver(lease)
        taken = ledger.take(trained)
        if version == 2:
            assert taken is None and ledger.missing() == [hangs.group_id]
            break
        assert taken is not None
        trained = taken.after(trained)
        ledger.publish(version, trained)
        others = ledger.lease("a", per_step)
    assert ledger.overdue() == []  # as long under way as twice what others were
    now += 1
    assert ledger.overdue() == [hangs.group_id]


def test_the_audit_finds_a_group_that_began_again_without_cause(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    journal = Journal(path)
    settings = {"groups_per_step": 1, "max_staleness": 1, "total_groups": 4, "lease_s": 60.0,
                "on_stale": "restart", "most_begun_again": 1}  # fmt: skip
    put = {"id": 0, "worker": "a", "epoch": 1}
    lease = {"ids": [0], "worker": "a", "epoch": 1, "request": ""}
    journal.record("start", run="r", epoch=1, settings=settings, watermark=0, set_aside={})
    journal.record("lease", attempts=[1], **lease)
    journal.record("begin_again", epoch=1, ids=[0])
    journal.record("begin_again", epoch=1, ids=[0])
    journal.record("put", attempt=1, **put)
    [unleased, second] = audit(path).problems
    assert unleased == "group 0 arrived without a lease"
    assert "line 4 contradicts the lines before it" in second


def test_a_step_that_was_taken_stays_the_next_whatever_is_lost() -> None:
    """The learner may train on it already; if it asks again, others are no answer."""
    settings = LedgerSettings(
        groups_per_step=2, max_staleness=2, total_groups=12, lease_s=60, max_failures=1,
    )  # fmt: skip
    ledger = Ledger(settings, TrainedGroups(), epoch=1)
    leases = ledger.lease("a", 9)
    for one in leases[2:4]:
        ledger.deliver(one)
    taken = ledger.take()
    assert taken is not None and taken.group_ids == [2, 3]
    ledger.recover()
    for one in leases[:2]:
        ledger.deliver(one)
    assert ledger.take() is None and ledger.missing() == ledger.status().missing == [2, 3]
    [again, _] = ledger.lease("b", 2)
    assert again.group_id == 2
    ledger.fail(again, "no more")  # and so the step cannot be made any more
    step = ledger.take()
    assert step is not None and step.group_ids == [0, 1]
    assert step.set_aside == {}  # 2 is for the watermark to pass, once 3 is trained


def test_the_audit_finds_what_is_too_old(tmp_path: Path) -> None:
    """A run with on_stale=train_late is no proof of a bound that its journal claims."""
    path = tmp_path / "ledger.jsonl"
    journal = Journal(path)
    settings = {"groups_per_step": 1, "max_staleness": 1, "total_groups": 4, "lease_s": 60.0}
    journal.record("start", run="r", epoch=1, settings=settings, watermark=0, set_aside={})
    journal.record(
        "lease", ids=[0, 1, 2, 3], attempts=[1] * 4, worker="a", epoch=1, request=""
    )  # fmt: skip
    for version, group_id in enumerate((1, 2, 0, 3), start=1):
        journal.record("put", id=group_id, attempt=1, worker="a", epoch=1)
        watermark = {0: 3, 3: 4}.get(group_id, 0)
        journal.record("take", ids=[group_id], skipped={})
        journal.record("train", version=version, ids=[group_id], watermark=watermark, skipped={})
    assert {
        "group 0 was trained 2 versions after it was leased, but max_staleness=1",
        "group 3 was trained 3 versions after it was leased, but max_staleness=1",
    } <= set(audit(path, steps=4).problems)


def simulated(agents: bool = False, hangs: float = 0.0, **schedule: Any) -> Outcome:
    """One engine of 64 slots (so that no routing is left to chance), steps of as many samples."""
    workload = Workload(group_size=4, agents=agents, hangs=hangs)
    made = Schedule(**schedule)
    return Simulation(made, workload, groups_per_step=16, engines=1, steps=40).run()


def test_of_long_tails_a_larger_bound_makes_more_steps_at_no_cost_in_bias() -> None:
    """All clocks are simulated, and so the same on each machine."""
    bounded = simulated(max_staleness=2)
    further = simulated(max_staleness=8, steps_in_flight=3)
    assert further.rate > 1.3 * bounded.rate and bounded.age <= 2
    assert further.off < 1.4 * bounded.off and further.age <= 8
    assert abs(further.bias) < 0.05 and simulated(max_staleness=0).most == 0


@pytest.mark.slow
def test_tools_that_hang_hold_up_no_bound_on_what_begins_again() -> None:
    kept: dict[str, Any] = {"agents": True, "hangs": 0.0005, 
                            "max_staleness": 4, "steps_in_flight": 3}  # fmt: skip
    waits, again = simulated(**kept), simulated(**kept, on_stale="restart")
    assert again.age <= 4 and again.again > 0 and again.rate > 1.2 * waits.rate


@pytest.mark.slow
def test_tools_without_end_hold_up_a_bound_and_not_those_that_are_late() -> None:
    bounded = simulated(agents=True, max_staleness=2)
    late = simulated(agents=True, max_staleness=2, on_stale="train_late")
    assert bounded.age <= 2 < late.age and late.rate > 1.2 * bounded.rate
