"""Training rows of rollouts: one per segment, with its own data and the objective's terms."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from distill.objective.advantages import on_actions
from distill.objective.objectives import opd_advantages
from distill.objective.reward_advantages import group_centred
from distill.objective.rows import (
    AdvantageStats,
    advantage_metrics,
    advantage_stats,
    policy_rows,
    row_metas,
)
from distill.objective.settings import ObjectiveConfig
from distill.objective.sums import meta_of
from distill.types import Segment, TopLogprobs, TrajectoryGroup
from tests.samples import group, ids, segment, trajectory

OPD = ObjectiveConfig()


def groups_of(**changes: Any) -> list[TrajectoryGroup]:
    return [group(3, temperature=0.5, **changes), group(8, members=3, temperature=2.0, **changes)]


def with_top() -> Segment:
    """Five actions; the teacher's likeliest contain the second and the fourth of them."""
    tokens = [9, 20, 21, 22, 23, 24]
    top = [[1, 2], [21, 3], [4, 5], [6, 23], [7, 8]]
    return segment(
        1, 5, tokens_T=tokens,
        teacher_top=TopLogprobs(
            ids_NK=np.array(top, np.int32), logprobs_NK=np.full((5, 2), -1.5, np.float32)
        ),
        teacher_context_T=ids(30, 31),
    )  # fmt: skip


def one_group(made: Segment, **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=4, trajectories_G=(trajectory(made),), **fields)


def centred_rewards(of: TrajectoryGroup) -> list[float]:
    rewards = [member.reward for member in of.trajectories_G]
    return group_centred(np.array(rewards, np.float32)).tolist()


def test_one_row_per_segment_with_its_own_data() -> None:
    objective = ObjectiveConfig(kl_coef=0.7, kl_discount_factor=0.9, reward_coef=2.0)
    groups = groups_of()
    rows = policy_rows(groups, objective)
    expected = [
        (each, made, 2 * centred)
        for each in groups
        for made, centred in zip(each.segments(), centred_rewards(each), strict=True)
    ]
    assert len(rows) == len(expected) == 5
    for row, (of_group, made, rewarded) in zip(rows, expected, strict=True):
        assert row.source == f"group {of_group.group_id}"
        assert row.temperature == made.temperature
        assert row.tokens_T.tolist() == made.tokens_T.tolist()
        assert row.loss_mask_T.tolist() == made.action_mask_T.tolist()
        assert row.behaviour_logprobs_T.tolist() == made.behaviour_logprobs_T.tolist()
        rewarded_N = np.full(made.num_actions, rewarded, np.float32)
        advantages_T = on_actions(made, rewarded_N) + opd_advantages([made], 0.7, 0.9)[0]
        assert row.advantages_T.tolist() == advantages_T.tolist()
        assert row.teacher_coef == 0
    assert {row.temperature for row in rows} == {0.5, 2.0}


def test_each_teacher_s_term_counts_by_its_weight() -> None:
    made = with_top()
    groups = [one_group(made, teacher=name) for name in ("a", "b")]
    weights = {"a": 0.25, "b": 1.0}
    for teacher, row in zip("ab", policy_rows(groups, OPD, weights), strict=True):
        assert row.teacher == teacher
        assert row.advantages_T.tolist() == opd_advantages([made], weights[teacher], 0)[0].tolist()
        assert row.sampled_kl_coef_T is not None
        assert set(row.sampled_kl_coef_T[row.loss_mask_T].tolist()) == {weights[teacher]}
    full = ObjectiveConfig(estimator="full", kl_coef=3.0)
    coefs = [row.teacher_coef for row in policy_rows(groups, full, weights)]
    assert coefs == [0.75, 3.0]


def test_a_sampled_tail_is_an_advantage_outside_the_top_beside_the_coefficient() -> None:
    made = with_top()
    objective = ObjectiveConfig(estimator="top_k", kl_coef=0.5)
    [row] = policy_rows([one_group(made)], objective)
    assert row.teacher_coef == 0.5
    everywhere = opd_advantages([made], 0.5, 0)[0].tolist()
    assert row.advantages_T.tolist() == [
        0.0 if t in (2, 4) else everywhere[t] for t in range(len(made))
    ]
    assert row.advantages_T[[1, 3, 5]].all()


def test_without_a_weight_no_teacher_is_needed() -> None:
    objective = ObjectiveConfig(kl_coef=0.0, reward_coef=1.0)
    rows = policy_rows(groups_of(teacher_logprobs_T=None), objective)
    assert [row.advantages_T[-1] for row in rows[:2]] == [-0.5, 0.5]
    assert all(row.teacher_coef == 0 for row in rows)


def test_policy_rows_share_the_segment_s_arrays() -> None:
    made = group()
    for row, part in zip(policy_rows([made], OPD), made.segments(), strict=True):
        assert np.shares_memory(row.tokens_T, part.tokens_T)


def test_metrics_are_of_the_trained_tokens_advantages() -> None:
    made = segment(
        2, 4,
        behaviour_logprobs_T=[0, 0, -1.0, -2.0, -3.0, -4.0],
        teacher_logprobs_T=[0, 0, -2.0, -2.0, -1.0, -1.0],
    )  # fmt: skip
    metrics = advantage_metrics([advantage_stats(policy_rows([one_group(made)], OPD)), None], OPD)
    assert metrics == pytest.approx(  # of -1, 0, 2 and 3
        {
            "advantage/mean": 1.0, "advantage/std": 2.5**0.5, "advantage/max": 3.0,
            "advantage/min": -1.0,
        }
    )  # fmt: skip


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    rows = policy_rows(groups_of(), OPD)
    whole = advantage_metrics([advantage_stats(rows)], OPD)
    apart = advantage_metrics([advantage_stats(part) for part in (rows[:1], [], rows[1:])], OPD)
    assert apart == pytest.approx(whole, rel=1e-6)
    advantages_N = np.concatenate([row.advantages_T[row.loss_mask_T] for row in rows])
    assert whole["advantage/std"] == pytest.approx(advantages_N.std(dtype=np.float64))


def test_equal_rewards_have_advantages_of_0_and_a_whole_divergence_has_none() -> None:
    parts = [AdvantageStats(tokens=4, mean=0.0, variance=0.0, largest=0.0, smallest=0.0)]
    rewards = ObjectiveConfig(kl_coef=0.0, reward_coef=1.0)
    assert set(advantage_metrics(parts, rewards).values()) == {0.0}
    whole = ObjectiveConfig(estimator="full")
    assert advantage_metrics(parts, whole) == {} == advantage_metrics([None], rewards)
    bonus = [parts[0]._replace(largest=0.5)]
    assert advantage_metrics(bonus, whole)["advantage/max"] == 0.5


def test_metadata_equals_that_of_the_row() -> None:
    """The leader deals rows that it does not have by their metadata."""
    shared = segment(5, 3, seed=1)
    other = replace(shared, tokens_T=np.where(np.arange(8) == 4, 9, shared.tokens_T))
    made = TrajectoryGroup(
        group_id=7,
        trajectories_G=(trajectory(shared, segment(2, 4, seed=2)), trajectory(other)),
        teacher="a",
    )
    rows, metas = policy_rows([made], OPD), row_metas(meta_of(made))
    for of_row, row in zip(metas, rows, strict=True):
        for name in ("first_trained", "num_trained", "teacher", "ends_sequence"):
            assert getattr(of_row, name) == getattr(row, name), name
        assert len(of_row) == len(row)
    for name in ("context_key", "prefix_key"):
        keys, expected = ([getattr(each, name) for each in both] for both in (metas, rows))
        for i, j in combinations(range(len(rows)), 2):
            assert (keys[i] == keys[j]) == (expected[i] == expected[j])
    assert metas[0].prefix_key == metas[2].prefix_key != metas[1].prefix_key
    assert metas[0].context_key != metas[2].context_key
