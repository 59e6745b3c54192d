"""Metrics of groups written out; pass@k, votes and intervals of evaluations."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.objective import metrics as made_by
from distill.objective.metrics import merge_updates
from distill.objective.sums import meta_of
from distill.rewards.accuracy import interval, majority, pass_at_k, ratio_interval, student_quantile
from distill.types import StopReason, TrajectoryGroup
from tests.samples import group, segment, trajectory


def group_metrics(groups: list[TrajectoryGroup], version: int) -> dict[str, float]:
    return made_by.group_metrics([meta_of(made) for made in groups], version)


def uneven_groups() -> list[TrajectoryGroup]:
    """Two groups of different sizes, versions and endings; one trajectory has two segments."""
    two_turns = trajectory(
        segment(2, 1, seed=1, version=4), segment(3, 5, seed=2, version=5), reward=3.0,
        stop=StopReason.LENGTH,
    )  # fmt: skip
    return [
        TrajectoryGroup(
            group_id=0,
            trajectories_G=(two_turns, trajectory(segment(seed=3, version=4), reward=-1.0)),
            metrics={"time/rollout": 2.0, "time/teacher": 1.0},
        ),
        replace(group(1, version=3), metrics={"time/rollout": 4.0}),
    ]


def test_every_metric_written_out() -> None:
    groups = uneven_groups()
    kl = kl_q1 = staleness = rewards = eos = 0.0
    tokens = trajectories = stalest = 0
    apart: list[list[float]] = []
    for made in groups:
        apart.append([])
        for member in made.trajectories_G:
            trajectories += 1
            rewards += member.reward
            eos += member.stop_reason == "eos"
            for s in member.segments:
                assert s.teacher_logprobs_T is not None and s.teacher_logprobs_q1_T is not None
                for t in range(len(s)):
                    if s.action_mask_T[t]:
                        tokens += 1
                        kl += s.behaviour_logprobs_T[t] - s.teacher_logprobs_T[t]
                        apart[-1].append(abs(s.behaviour_logprobs_T[t] - s.teacher_logprobs_T[t]))
                        kl_q1 += s.behaviour_logprobs_T[t] - s.teacher_logprobs_q1_T[t]
                        staleness += 6 - s.versions_T[t]
                        stalest = max(stalest, 6 - s.versions_T[t])
    metrics = group_metrics(groups, version=6)
    assert all(type(value) is float for value in metrics.values())
    by_turn = ("rollout/turns", "rollout/segments", "rollout/stop/", "opd/reverse_kl/turn=")
    plain = {name: value for name, value in metrics.items() if not name.startswith(by_turn)}
    assert plain == pytest.approx(
        {
            "opd/reverse_kl": kl / tokens,
            "opd/reverse_kl_vs_q1": kl_q1 / tokens,
            # of fewer than 100 tokens of a group, one
            "opd/kl_top_share": sum(map(max, apart)) / sum(map(sum, apart)),
            "opd/bias": (kl_q1 - kl) / tokens,
            "staleness/mean": staleness / tokens,
            "staleness/max": stalest,
            "reward/mean": rewards / trajectories,
            "reward/constant_groups": 0.0,
            "rollout/response_length": tokens / trajectories,
            "rollout/eos_share": eos / trajectories,
            "rollout/repeated_share": 0.0,
            "rollout/equal_groups": 0.0,
            "time/rollout": 3.0,
            "time/teacher": 1.0,
        }
    )


def test_metrics_by_turn() -> None:
    """The reference walks over the tokens one by one."""
    groups = uneven_groups()
    gaps: dict[int, list[float]] = {}
    counts, segments, reasons = [], [], []
    for member in (member for made in groups for member in made.trajectories_G):
        turn = 0
        for s in member.segments:
            assert s.teacher_logprobs_T is not None
            for t in range(1, len(s)):
                if s.action_mask_T[t]:
                    turn += not s.action_mask_T[t - 1]
                    gap = float(s.behaviour_logprobs_T[t]) - float(s.teacher_logprobs_T[t])
                    gaps.setdefault(turn, []).append(gap)
        counts.append(turn)
        segments.append(len(member.segments))
        reasons.append(member.stop_reason)
    assert max(counts) > 1
    metrics = group_metrics(groups, version=6)
    assert metrics["rollout/turns"] == pytest.approx(np.mean(counts))
    assert metrics["rollout/segments"] == pytest.approx(np.mean(segments))
    for reason in set(reasons):
        share = np.mean([one == reason for one in reasons])
        assert metrics[f"rollout/stop/{reason.value}"] == pytest.approx(share)
    shown = {n: v for n, v in metrics.items() if n.startswith("opd/reverse_kl/turn=")}
    expected = {f"opd/reverse_kl/turn={turn}": np.mean(found) for turn, found in gaps.items()}
    assert shown == pytest.approx(expected)


def test_the_top_share_is_that_of_a_sort() -> None:
    random = np.random.default_rng(0)
    gaps_N = random.standard_t(2, 250)
    of_student_T = np.append(0, -30.0 + gaps_N.clip(-9, 9))
    of_teacher_T = np.append(0, np.full(250, -30.0))
    made = segment(1, 250, behaviour_logprobs_T=of_student_T, teacher_logprobs_T=of_teacher_T)
    gaps_N = gaps_N.clip(-9, 9)
    metrics = group_metrics([TrajectoryGroup(group_id=0, trajectories_G=(trajectory(made),))], 0)
    largest = sorted(abs(gaps_N), reverse=True)[:3]  # a hundredth of 250, rounded up
    assert metrics["opd/kl_top_share"] == pytest.approx(sum(largest) / sum(abs(gaps_N)), rel=1e-4)


def test_the_kl_is_of_the_groups_that_were_scored() -> None:
    scored = group()
    alone = group_metrics([scored], version=3)
    unscored = group(teacher_logprobs_T=None)
    beside = group_metrics([unscored, scored, unscored], version=3)
    of_teacher = {name: value for name, value in alone.items() if name.startswith("opd/")}
    assert len(of_teacher) >= 4
    assert of_teacher == {n: v for n, v in beside.items() if n.startswith("opd/")}


def test_reference_bonuses_and_constant_groups_written_out() -> None:
    def made(seed: int, **changes: Any):
        return segment(1, 2, seed=seed, behaviour_logprobs_T=[0, -1.0, -2.0], **changes)

    lucky = made(1, reference_logprobs_T=[-9, -2.0, -2.5], bonuses_T=[0, 0.5, 1.0])
    plain = made(2, reference_logprobs_T=[-9, -1.0, -4.0])
    groups = [
        TrajectoryGroup(group_id=0, trajectories_G=(trajectory(lucky), trajectory(plain))),
        TrajectoryGroup(
            group_id=1, trajectories_G=(trajectory(plain, reward=1.0), trajectory(plain))
        ),
    ]
    metrics = group_metrics(groups, version=0)
    assert metrics["reference/kl"] == (1 + 0.5 + 3 * (0 + 2)) / 8
    assert metrics["reward/bonus"] == 1.5 / 4
    assert metrics["reward/constant_groups"] == 0.5
    without = group_metrics([group()], version=0)
    assert "reference/kl" not in without and "reward/bonus" not in without


@pytest.mark.parametrize(
    ("logprob", "members", "differs", "share"),
    [
        (-2.0, 4, False, 1.0),
        (-2.0, 4, True, 0.0),
        (-1e-3, 4, False, 0.0),  # the model is sure: equal answers are no surprise
        (-2.0, 1, False, 0.0),
    ],
)
def test_share_of_equal_groups(logprob: float, members: int, differs: bool, share: float) -> None:
    def member(g: int):
        seed = g if differs else 0
        return trajectory(segment(1, 6, seed=seed, behaviour_logprobs_T=[0.0] + [logprob] * 6))

    made = TrajectoryGroup(group_id=0, trajectories_G=tuple(map(member, range(members))))
    assert group_metrics([made], version=0)["rollout/equal_groups"] == share


def test_reward_and_kl_come_once_more_for_each_teacher_and_tag() -> None:
    def kl(*groups: TrajectoryGroup) -> float:
        gaps = [
            float(s.behaviour_logprobs_T[t]) - float(s.teacher_logprobs_T[t])  # pyright: ignore[reportOptionalSubscript]
            for made in groups
            for s in made.segments()
            for t in range(len(s))
            if s.action_mask_T[t]
        ]
        return sum(gaps) / len(gaps)

    groups = [
        replace(group(0, members=2), teacher="a", tag="x"),
        replace(group(1, members=3), teacher="b", tag="x"),
        replace(group(2, members=1), teacher="b"),
        replace(group(3, members=2, teacher_logprobs_T=None), tag="y"),
    ]
    metrics = group_metrics(groups, version=0)
    found = {name: value for name, value in metrics.items() if "=" in name}
    assert found == pytest.approx(
        {
            "reward/mean/teacher=a": 1 / 2, "reward/mean/teacher=b": 1 / 4,
            "reward/mean/tag=x": 2 / 5, "reward/mean/tag=y": 1 / 2,
            "opd/reverse_kl/teacher=a": kl(groups[0]), "opd/reverse_kl/teacher=b": kl(*groups[1:3]),
            "opd/reverse_kl/tag=x": kl(*groups[:2]),
        }
    )  # fmt: skip


def test_a_teacher_that_moves_has_an_age() -> None:
    """Mean versions behind per token; none if any teacher is frozen."""
    moving = [group(0, members=1, teacher_version=3), group(1, members=2, teacher_version=5)]
    expected = (3 * (6 - 3) + 7 * (6 - 5)) / 10  # of 3 tokens, and of 3 and 4
    assert group_metrics(moving, version=6)["opd/teacher_age"] == pytest.approx(expected)
    assert "opd/teacher_age" not in group_metrics([*moving, group(2)], version=6)


def test_updates_merge_by_their_tokens() -> None:
    merged = merge_updates(
        [
            {"train/tokens": 10, "train/loss": 1.0, "train/ratio_max": 3.0, "train/ratio_min": 0.5},
            {"train/tokens": 30, "train/loss": 2.0, "train/ratio_max": 2.0, "train/ratio_min": 0.2},
            {"train/tokens": 20, "sft/nll": 4.0, "train/ratio_max": 1.0, "train/ratio_min": 1.0},
        ]
    )
    assert merged == {
        "train/updates": 3, "train/tokens": 60, "train/loss": (10 * 1.0 + 30 * 2.0) / 40,
        "train/ratio_max": 3.0, "train/ratio_min": 0.2, "sft/nll": 4.0,
    }  # fmt: skip
    assert merge_updates([]) == {"train/updates": 0, "train/tokens": 0}


REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=7)


@given(rewards=REWARDS, data=st.data())
def test_pass_at_k_is_the_mean_of_every_choice(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    expected = fmean(max(chosen) for chosen in combinations(rewards, k))
    assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_the_most_frequent_answer_wins() -> None:
    assert majority(["18", "17", "18", None]) == 0
    assert majority([None, None, "3"]) == 2
    assert majority(["a", "b", "b", "a"]) == 0  # as frequent: the first
    assert majority([None, None]) is None and majority([]) is None


def once(rewards: Sequence[float]) -> list[list[float]]:
    return [[reward] for reward in rewards]


def test_an_interval_needs_two_prompts_and_never_leaves_the_possible() -> None:
    assert interval([[1.0]]) is None
    # Agresti and Coull (1998) tabulate Wilson's interval of 0 of 10.
    assert interval(once([0.0] * 10)) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert all((interval(once([0.0] * n)) or (-1,))[0] == 0 for n in range(2, 400))
    low, high = interval(once([1.0] * 10)) or (0, 0)
    assert low == pytest.approx(0.7225, abs=1e-4) and high == pytest.approx(1.0)


@given(data=st.data(), prompts=st.integers(2, 12), samples=st.integers(1, 8))
def test_an_interval_of_shares_holds_their_mean_within_0_and_1(
    data: st.DataObject, prompts: int, samples: int
) -> None:
    reward = data.draw(st.sampled_from([st.sampled_from([0.0, 1.0]), st.floats(0, 1)]))
    rewards_N = st.lists(reward, min_size=samples, max_size=samples)
    rewards_PN = data.draw(st.lists(rewards_N, min_size=prompts, max_size=prompts))
    low, high = interval(rewards_PN) or (1, 0)
    assert 0 <= low <= fmean(map(fmean, rewards_PN)) <= high <= 1
    assert high > low or not set().union(*rewards_PN) <= {0, 1}


@pytest.mark.parametrize("concentration", [0.5, None])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("chance", [0.5, 0.95])
def test_coverage_of_intervals(chance: float, samples: int, concentration: float | None) -> None:
    """Prompts of different or equal difficulty."""
    random = np.random.default_rng(3)
    share_DP1 = np.full((400, 10, 1), chance)
    if concentration is not None:
        a, b = concentration * chance, concentration * (1 - chance)
        share_DP1 = random.beta(a, b, share_DP1.shape)
    draws = (random.random((400, 10, samples)) < share_DP1).astype(float)
    bounds = [interval(rewards_PN.tolist()) for rewards_PN in draws]
    held = fmean(low <= chance <= high for low, high in filter(None, bounds))
    assert 0.88 < held <= 1  # Wilson's own least is 0.89 of 10 prompts at 0.95


def test_a_ratio_s_interval_has_its_nominal_coverage() -> None:
    """Sums over responses of different lengths, whose tokens are not independent."""
    random = np.random.default_rng(6)
    held = []
    for _ in range(400):
        counts_P = random.integers(5, 60, 20)
        sums_P = counts_P * random.normal(0.7, 0.3, 20)
        low, high = ratio_interval(sums_P.tolist(), counts_P.tolist()) or (1, 0)
        held.append(low <= 0.7 <= high)
    assert 0.92 < fmean(held) < 0.98
    assert ratio_interval([1.0], [3]) is None


# Of printed tables.
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_student_s_quantile(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=2e-3)
