"""The rule by which a step takes groups: its slow twin, journals, and simulated runs.

test_ledger.py compares the ledger's steps with the twin after any events.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, replace
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
from cluster.queue.ledger_types import Kept, LedgerSettings, adopted
from cluster.queue.step_rule import Choice, StepRule, View
from distill.records import CONSTANT_REWARD, Lease, StepGroups, TrainedGroups
from tests.ledger_twins import next_step, oldest, usable


@pytest.mark.parametrize("seed", range(10))
def test_the_rule_chooses_what_its_slow_twin_chooses(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        horizon, per_step = chance.randint(0, 3), chance.randint(1, 3)
        started = {i: chance.randint(0, horizon) for i in range(chance.randint(0, 12))}
        states = {i: chance.choice(["leased", "mixed", "mixed", "constant"]) for i in started}
        made = View(
            step=horizon,
            groups_per_step=per_step,
            started=started,
            finished={i for i in states if states[i] != "leased"},
            constant={i for i in states if states[i] == "constant"},
            most_replaced=chance.randint(0, 3),
        )
        rule = StepRule(horizon=horizon, window=12, late=chance.random() < 0.2)
        ids, replaced, waits_for = next_step(rule, made)
        assert rule.choose(made) == (Choice(ids, replaced) if ids else None)
        assert rule.waited_for(made) == waits_for
        assert rule.peek(made) == oldest(made)[0]
        skippable = min(len(made.constant), made.most_replaced)
        assert rule.room(made) == 12 - len(started) + skippable


@pytest.mark.parametrize("seed", range(5))
def test_a_new_job_takes_back_the_kept_groups_of_its_slow_twin(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(400):
        per_step, horizon, steps = (chance.randint(*bounds) for bounds in ((1, 3), (0, 3), (0, 3)))
        aside = {0: "poison"} if steps and chance.random() < 0.5 else {}
        watermark = steps * per_step + len(aside)
        trained = TrainedGroups(watermark, aside)
        if steps and chance.random() < 0.5:  # one of a step's groups is above the watermark
            trained = TrainedGroups(watermark - 1, aside, above=[watermark + chance.randint(0, 2)])
        rules = LedgerSettings(
            groups_per_step=per_step, max_staleness=horizon, lease_s=60,
            total_groups=len(trained) + chance.randint(0, 12),
            groups_in_flight=chance.choice([0, chance.randint(per_step, per_step * (horizon + 1))]),
            on_stale=chance.choice(["wait", "train_late"]),
        )  # fmt: skip
        ids = chance.sample(range(watermark + 12), chance.randint(0, watermark + 12))
        kept = {i: Kept(1, 1, chance.randint(0, steps + 1)) for i in ids}
        back = adopted(kept, trained, rules)
        assert back == {i: kept[i] for i in usable(kept, trained, rules)}


@given(
    per_step=st.integers(1, 3),
    horizon=st.integers(0, 3),
    ages=st.lists(st.integers(0, 4), max_size=12),
    chance=st.randoms(use_true_random=False),
)
def test_the_smallest_sufficient_set_of_groups_is_restarted(
    per_step: int, horizon: int, ages: list[int], chance: random.Random
) -> None:
    started = {group_id: 4 - age for group_id, age in enumerate(sorted(ages, reverse=True))}
    finished = {group_id for group_id in started if chance.random() < 0.6}
    able = [group_id for group_id in started if group_id not in finished and chance.random() < 0.7]
    chance.shuffle(able)
    made = View(step=4, groups_per_step=per_step, started=started, finished=finished)
    rule = StepRule(horizon=horizon, window=12)

    def goes(ids: Iterable[int]) -> bool:
        return rule.choose(replace(made, started=started | dict.fromkeys(ids, 4))) is not None

    restarts = rule.choose_restarts(made, able, 4)
    if len({started[group_id] for group_id in able}) == 1:
        assert restarts == able[: len(restarts)], "not in the order of preference"
    assert set(restarts) <= set(able) and len(set(restarts)) == len(restarts)
    if restarts:
        assert goes(restarts)
        assert not any(goes(fewer) for fewer in combinations(restarts, len(restarts) - 1))
    elif not goes(()):
        assert not goes(able), "the step waits although restarts would let it start"


def begun(directory: Path, **changes: Any) -> Journal:
    """A journal with the start of a run of one group per step."""
    journal = Journal(directory / "ledger.jsonl")
    settings = {"groups_per_step": 1, "max_staleness": 1, "total_groups": 4, "lease_s": 60.0}
    journal.record("start", run="r", epoch=1, settings=settings | changes, watermark=0,
                   set_aside={})  # fmt: skip
    return journal


def test_the_audit_finds_a_group_that_was_replaced_without_cause(tmp_path: Path) -> None:
    journal = begun(tmp_path, max_staleness=0, total_groups=1, most_replaced=2)
    skipped = {"0": CONSTANT_REWARD, "1": CONSTANT_REWARD}
    by = {"worker": "a", "epoch": 1}
    for group_id, reward in enumerate(({"constant_reward": 0.0}, {}, {})):
        journal.record("lease", ids=[group_id], attempts=[1], **by, request="")
        journal.record("put", id=group_id, attempt=1, **by, **reward)
    journal.record("take", ids=[2], skipped=skipped, replaced=[0, 1])
    journal.record("train", version=1, ids=[2], watermark=3, skipped=skipped)
    found = audit(tmp_path / "ledger.jsonl", steps=1)
    [problem] = found.problems
    assert "contradicts the lines before it" in problem
    assert any("2 skipped" in line for line in found.lines())


def test_a_hanging_group_restarts_up_to_a_bound_and_is_then_awaited(tmp_path: Path) -> None:
    """The deliveries of its earlier leases are dropped."""
    now, path = 0.0, tmp_path / "ledger.jsonl"
    rules: dict[str, Any] = {"on_stale": "restart", "max_restarts": 2,
                             "restart_after": 4.0}  # fmt: skip
    settings = LedgerSettings(
        groups_per_step=1, max_staleness=1, total_groups=9, lease_s=1e9, **rules
    )
    journal = Journal(path)
    journal.record("start", run="r", epoch=1, settings=asdict(settings), watermark=0, set_aside={})
    ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=lambda: now, record=journal.record)
    [slow] = ledger.lease("a", 1)
    trained, restarted_at = TrainedGroups(), list[int]()
    leases = [slow]

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
        assert ledger.overdue() == [], "no longer in progress than others"
        now += 35
        overdue = ledger.overdue()
        if version == 3:
            assert overdue == [] and ledger.missing() == [0]  # it is waited for
            last = step(leases[-1], version + 1)
            assert last.group_ids == [0] and (last.start_max, last.restarts) == (1, 2)
            break
        assert overdue == [0]
        ledger.restart_groups(overdue)
        restarted_at.append(version)
        assert not ledger.deliver(leases[-1], "a"), "a delivery of an earlier lease"
        leases += ledger.lease("c", 1)
        assert leases[-1] == Lease(group_id=0, attempt=len(leases), epoch=1)
        taken = ledger.take(trained)
        assert taken is not None and (taken.start_max or 0) <= 1
        trained = taken.after(trained)
        ledger.publish(version + 1, trained)
    assert restarted_at == [1, 2]
    found = audit(path)
    assert found.problems == [] and found.duplicates == 2
    assert sum(found.re_leases.values()) == 2


def test_a_group_is_overdue_after_twice_the_usual_time_in_steps_of_many_groups() -> None:
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
    assert ledger.overdue() == []  # leased for exactly twice the time of the others
    now += 1
    assert ledger.overdue() == [hangs.group_id]


def test_the_audit_finds_a_group_that_was_restarted_without_cause(tmp_path: Path) -> None:
    journal = begun(tmp_path, on_stale="restart", max_restarts=1)
    by = {"worker": "a", "epoch": 1}
    journal.record("lease", ids=[0], attempts=[1], **by, request="")
    journal.record("begin_again", epoch=1, ids=[0])
    journal.record("begin_again", epoch=1, ids=[0])
    journal.record("put", id=0, attempt=1, **by)
    [unleased, second] = audit(tmp_path / "ledger.jsonl").problems
    assert unleased == "group 0 arrived without a lease"
    assert "line 4 contradicts the lines before it" in second


def test_the_audit_finds_groups_that_are_too_old(tmp_path: Path) -> None:
    journal = begun(tmp_path)
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
    } <= set(audit(tmp_path / "ledger.jsonl", steps=4).problems)


def simulated(agents: bool = False, hangs: float = 0.0, **schedule: Any) -> Outcome:
    """Simulate one engine of 64 slots (so that routing is fixed) and steps of 64 samples."""
    workload = Workload(group_size=4, agents=agents, hangs=hangs)
    made = Schedule(**schedule)
    return Simulation(made, workload, groups_per_step=16, engines=1, steps=40).run()


def test_a_larger_bound_makes_more_steps_of_long_tails_without_bias() -> None:
    bounded = simulated(max_staleness=2)
    further = simulated(max_staleness=8, steps_in_flight=3)
    assert further.rate > 1.3 * bounded.rate and bounded.age <= 2
    assert further.off < 1.4 * bounded.off and further.age <= 8
    assert abs(further.bias) < 0.05 and simulated(max_staleness=0).most == 0


@pytest.mark.slow
def test_restarts_keep_the_bound_and_the_rate_where_tools_hang() -> None:
    kept: dict[str, Any] = {"agents": True, "hangs": 0.0005,
                            "max_staleness": 4, "steps_in_flight": 3}  # fmt: skip
    waits, restarts = simulated(**kept), simulated(**kept, on_stale="restart")
    assert restarts.age <= 4 and restarts.restarted > 0 and restarts.rate > 1.2 * waits.rate


@pytest.mark.slow
def test_training_late_is_faster_than_a_bound_where_tools_hang() -> None:
    bounded = simulated(agents=True, max_staleness=2)
    late = simulated(agents=True, max_staleness=2, on_stale="train_late")
    assert bounded.age <= 2 < late.age and late.rate > 1.2 * bounded.rate
