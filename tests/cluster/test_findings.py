"""Detectors: each finds its planted failure, and none reports a healthy run."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config.on_policy import RlConfig
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.findings.finding import Evidence, Finding
from cluster.findings.history import SPAN, History
from cluster.findings.watch import DETECTORS, Watch
from cluster.store.kept_groups import KeptGroupWriter
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.objective.sums import RUN, repeated_share
from distill.settings import changed, meant_by
from distill.types import StopReason, Trajectory, TrajectoryGroup
from tests.samples import keep_step, segment, trajectory

CONFIG = make(
    "opd", student="s", teacher="t", prompts="p", out="o", temperature=1.0, max_new_tokens=256,
    max_staleness=4, prompts_per_step=32, estimator="sampled", reward_coef=1.0,
    **{"teacher.engines": 2},
)  # fmt: skip
STEPS = 120
# Names of settings in a remedy: with a dot or an underscore, or before an equals sign.
NAMED = re.compile(r"\b[a-z]+(?:[._][a-z]+)+|\b[a-z]+(?==)")
Curve = Callable[[int], float]


def healthy(seed: int, steps: int = STEPS) -> list[dict[str, float]]:
    """Metrics of a noisy healthy run.

    The KL falls, the reward rises until the task is solved, responses become longer by half, and
    the entropy falls to a third.
    """
    random = np.random.default_rng(seed)
    pace = random.uniform(0.93, 0.98)
    solved = random.uniform(0.6, 1.0)
    gap, wait = random.uniform(1e-7, 2e-2), random.uniform(0.05, 0.7)

    def noisy(value: float, spread: float = 0.1) -> float:
        return float(value * random.lognormal(0, spread))

    rows = []
    for step in range(1, steps + 1):
        left = pace**step
        rows.append({
            "step": step,
            "opd/reverse_kl": noisy(0.1 + 1.5 * left),
            "opd/kl_top_share": min(1.0, noisy(0.1 + 0.15 * (1 - left))),
            "train/grad_norm": noisy(1.0 + (1 - left), 0.4),
            "train/entropy": noisy(0.3 + 0.7 * left),
            "train/logprob_gap": noisy(gap, 0.3),
            "push/lost_share": min(1.0, noisy(0.1)),
            "rollout/stop/length": float(random.uniform(0, 0.2)),
            "rollout/eos_share": float(random.uniform(0.8, 1.0)),
            "rollout/response_length": noisy(60 + 30 * (1 - left)),
            "rollout/repeated_share": noisy(0.05),
            "reward/mean": float(np.clip(random.normal(solved * (1 - left), 0.08), 0, 1)),
            "reward/constant_groups": float(np.clip(random.normal(1 - left, 0.1), 0, 1)),
            "env/format": float(np.clip(random.normal(0.5 + 0.5 * (1 - left), 0.05), 0, 1)),
            "staleness/mean": noisy(1.0, 0.2),
            "staleness/max": float(random.integers(1, 5)),
            "time/step": noisy(10.0),
            "time/wait": noisy(10.0 * wait * 0.9, 0.05),
            "time/teacher": noisy(0.5),
        })  # fmt: skip
    return rows


def found(rows: list[dict[str, float]], config: OpdConfig | RlConfig = CONFIG) -> list[Finding]:
    watch = Watch(config, Path("/nowhere/groups"))
    return [finding for row in rows for finding in watch.observe(row)]


def planted(seed: int, **curves: Curve) -> list[Finding]:
    """Findings in a healthy run with other curves of the named metrics (__ for /)."""
    random = np.random.default_rng(seed + 1000)
    rows = healthy(seed)
    for row in rows:
        for name, curve in curves.items():
            row[name.replace("__", "/")] = curve(int(row["step"])) * random.lognormal(0, 0.05)
    return found(rows)


def late(before: float, after: float, at: int = 50, over: int = 30) -> Curve:
    """A ramp from one value to another."""
    return lambda step: before + (after - before) * float(np.clip((step - at) / over, 0, 1))


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_no_findings(seed: int) -> None:
    assert found(healthy(seed)) == []


FAILURES: Mapping[str, dict[str, Curve]] = {
    "kl_on_few_tokens": {"opd__kl_top_share": late(0.15, 0.8), "opd__reverse_kl": late(0.5, 0.75)},
    "entropy_collapses": {
        "train__entropy": late(1.0, 0.02),
        "opd__reverse_kl": late(1.0, 1.0),
        "reward__mean": late(0.3, 0.3),
        "reward__constant_groups": late(0.5, 0.5),
    },
    "engine_gap_grows": {"train__logprob_gap": late(0.01, 0.3)},
    "updates_are_lost": {"push__lost_share": late(0.8, 0.8)},
    "responses_are_cut": {"rollout__stop__length": late(0.1, 0.8)},
    "members_are_equal": {"rollout__equal_groups": late(0.0, 0.9)},
    "responses_grow": {
        "rollout__response_length": late(60, 200),
        "rollout__stop__length": late(0.05, 0.35),
    },
    "responses_repeat": {"rollout__repeated_share": late(0.05, 0.7)},
    "eos_vanishes": {"rollout__eos_share": late(0.9, 0.2)},
    "advantages_are_zero": {"advantage__min": lambda _: 0.0, "advantage__max": lambda _: 0.0},
    "rewards_are_constant": {
        "reward__mean": lambda _: 0.0, "reward__constant_groups": lambda _: 1.0,
    },
    "format_pays_alone": {
        "env__format": late(0.2, 0.9),
        "reward__mean": late(0.6, 0.2),
        "reward__constant_groups": late(0.5, 0.5),
    },
    "staleness_at_its_bound": {
        "staleness__max": lambda step: 8.0 if step > 40 else 2.0, "time__wait": late(2, 6),
    },
    "learner_starves": {"time__wait": late(3, 9.3)},
    "teachers_idle": {"time__teacher": lambda _: 0.02},
    "turns_take_long": {"turns__seconds": late(1.0, 5.0), "turns__changes": lambda _: 4.0},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAILURES)
def test_a_planted_failure_is_the_only_finding(name: str, seed: int) -> None:
    [finding] = planted(seed, **FAILURES[name])
    assert finding.name == name
    assert finding.step > 50 or name in (
        "updates_are_lost", "rewards_are_constant", "teachers_idle", "staleness_at_its_bound",
        "learner_starves", "advantages_are_zero",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "setting"), [("turns", "env.max_turns"), ("time", "env.time_s")]
)
def test_games_that_all_end_by_a_limit_are_found(reason: str, setting: str) -> None:
    """One seat of two is truncated in every game."""
    config = make("selfplay", student="s", out="o", temperature=1.0)
    rows = [{"step": 1, f"rollout/stop/{reason}": 0.5, "rollout/stop/done": 0.5}]
    [finding] = found(rows, config)
    assert finding.name == "responses_are_cut" and setting in finding.remedy


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [("rl", "reward"), ("selfplay", "env")],  # a game has its own rewards
)
def test_without_a_teacher_the_source_of_rewards_is_named(recipe: str, setting: str) -> None:
    given = {"prompts": "p"} if recipe == "rl" else {}
    config: Any = make(recipe, student="s", out="o", temperature=1.0, **given)
    rows = [{"step": step, "rollout/eos_share": 0.9 * 0.9**step} for step in range(1, 40)]
    [finding] = found(rows, config)
    assert finding.name == "eos_vanishes"
    assert {setting, "max_new_tokens"} <= set(NAMED.findall(finding.remedy))


def test_masked_rewards_do_not_count_as_constant() -> None:
    cut = {"rollout/stop/length": 1.0, "reward/mean": 0.4, "reward/constant_groups": 1.0}
    rows = [{"step": step, "advantage/min": 0.0, "advantage/max": 0.0} | cut for step in (1, 2)]
    remedies = {
        finding.name: finding.remedy
        for finding in found(rows, changed(CONFIG, mask_truncated=True))
    }
    assert "rewards_are_constant" not in remedies
    assert "max_new_tokens" in remedies["advantages_are_zero"]


def test_every_detector_has_a_planted_failure() -> None:
    assert {detect.__name__ for detect in DETECTORS} == {*FAILURES, "kl_rises"}


def falls(step: int) -> float:
    return 0.2 + 2 * 0.93**step


def turns(step: int) -> float:
    return falls(step) + max(0, step - 60) * 0.03


def findings_about_kl(
    kl: Curve, gradient: Curve = lambda _: 1.0, entropy: Curve = lambda _: 3.0
) -> list[Finding]:
    noise = np.random.default_rng(0).normal(1, 0.1, STEPS + 1)
    return found(
        [
            {
                "step": step, "opd/reverse_kl": kl(step) * noise[step],
                "train/grad_norm": gradient(step) * noise[-step], "train/entropy": entropy(step),
            }
            for step in range(1, STEPS + 1)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    "beside",
    [
        {"gradient": lambda step: 1 + 0.2 * max(0, step - 60)},
        {"entropy": lambda step: 3 + 0.03 * max(0, step - 60)},
        {"entropy": lambda step: 3 - 0.03 * max(0, step - 60)},
    ],
    ids=["gradient", "entropy rises", "entropy falls"],
)
def test_a_kl_that_rises_again_is_found_once(beside: dict[str, Curve]) -> None:
    [finding] = findings_about_kl(turns, **beside)
    assert finding.name == "kl_rises" and 60 < finding.step < 110


def test_a_kl_that_never_fell_is_found() -> None:
    [finding] = findings_about_kl(lambda step: 1 + step / 50)
    assert finding.name == "kl_rises" and 30 < finding.step < 90


def test_remedies_are_settings_that_exist() -> None:
    recipes = (OpdConfig, RlConfig)
    for name, curves in FAILURES.items():
        [finding] = planted(0, **curves)
        named = set(NAMED.findall(finding.remedy)) - {"cluster.report"}
        assert named, name
        for each in named:
            assert any(meant_by(recipe, each) for recipe in recipes), (name, each)


def test_a_resumed_run_does_not_repeat_findings(tmp_path: Path) -> None:
    rows = [row | {"push/lost_share": 0.9} for row in healthy(0)]
    first = Watch(CONFIG, tmp_path / "none.jsonl")
    names = [finding.name for row in rows[:40] for finding in first.observe(row)]
    assert names == ["updates_are_lost"]
    resumed = Watch(CONFIG, tmp_path / "none.jsonl", rows[:40], names)
    assert [finding for row in rows[40:] for finding in resumed.observe(row)] == []
    # Without the earlier findings it repeats them at its first step.
    forgetful = Watch(CONFIG, tmp_path / "none.jsonl", rows[:40])
    assert [each.step for each in forgetful.observe(rows[40])] == [41]


def test_repeated_steps_replace_the_earlier_ones() -> None:
    rows = healthy(3)
    straight, back = History(rows), History(rows[:90])
    back.rewind(30)
    for row in rows[30:]:
        back.add(row)
    for name in ("opd/reverse_kl", "reward/mean"):
        one, other = straight.of(name), back.of(name)
        assert one and other and one.steps == other.steps and one.means == other.means


def test_means_equal_those_of_a_loop() -> None:
    values = np.random.default_rng(0).normal(size=30)
    history = History({"step": step, "x": value} for step, value in enumerate(values, 1))
    series = history.of("x")
    assert series is not None
    mean = 0.0
    for count, value in enumerate(values, 1):
        weight = 1 / min(count, SPAN)
        mean = (1 - weight) * mean + weight * value
        assert series.means[count - 1] == pytest.approx(mean)
    assert series.start == pytest.approx(values[:SPAN].mean())
    assert series.at(12) == series.means[11]


def naive_repeated_share(parts: list[list[int]]) -> float:
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for part in parts:
        for start in range(len(part) - RUN + 1):
            run = tuple(part[start : start + RUN])
            repeated += run in seen
            seen.add(run)
    return repeated / max(1, sum(map(len, parts)))


def test_repetition_equals_that_by_a_set_of_runs() -> None:
    random = np.random.default_rng(0)
    prose = random.integers(0, 1000, 300).tolist()
    loop = [5, 6, 7] * 60
    for parts in ([prose], [loop], [prose[:50], loop], [prose[:40], prose[:40]], [[1, 2]], []):
        share = repeated_share([np.array(part, np.int32) for part in parts])
        assert share == pytest.approx(naive_repeated_share(parts))
    assert repeated_share([np.array(loop)]) > 0.9 and repeated_share([np.array(prose)]) == 0


def test_the_evidence_is_the_worst_kept_trajectory(tmp_path: Path) -> None:
    def member(length: int, stop: StopReason) -> Trajectory:
        return trajectory(segment(1, length), stop=stop)

    def of(number: int, *members: Trajectory, by_teacher: bool = False) -> TrajectoryGroup:
        return TrajectoryGroup(group_id=number, trajectories_G=members, by_teacher=by_teacher)

    cut, ended = StopReason.LENGTH, StopReason.EOS
    steps = {
        1: [of(0, member(99, cut))],
        11: [of(7, member(20, cut), member(60, ended)), of(8, member(10, ended), member(30, cut))],
        12: [of(9, member(90, cut), by_teacher=True)],
    }
    writer = KeptGroupWriter(tmp_path, 1, whole=True)
    for step, groups in steps.items():
        keep_step(writer, step, groups, policy_rows(groups, ObjectiveConfig()))
    watch = Watch(CONFIG, tmp_path)
    [finding] = watch.observe({"step": 12, "rollout/stop/length": 0.75})
    assert finding.evidence == Evidence(step=11, group=8, member=1)
    (tmp_path / "kept-000012.arrow").write_text("no groups")
    [finding] = Watch(CONFIG, tmp_path).observe({"step": 12, "rollout/stop/length": 0.75})
    assert finding.evidence is None
