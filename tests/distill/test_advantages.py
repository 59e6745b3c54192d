"""Advantages against nested loops and published values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.advantages import (
    discounted_future_sum,
    group_centred,
    opd_advantages,
    segment_advantages,
)
from distill.errors import DataError
from distill.types import TrajectoryGroup
from tests.samples import segment, segment_fields, trajectory

numbers = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0], [0.5, -0.5]),
        ([0, 0, 1, 0], [-0.25, -0.25, 0.75, -0.25]),
        ([3, 3, 3], [0, 0, 0]),
        ([7], [0]),
    ],
)
def test_published_group_advantages(rewards: list[float], expected: list[float]) -> None:
    assert group_centred(np.array(rewards, np.float32)).tolist() == expected


@given(numbers)
def test_group_advantages_are_distances_from_the_mean(rewards: list[float]) -> None:
    centred = group_centred(np.array(rewards, np.float32))
    total = 0.0
    for reward in rewards:
        total += reward
    for i, reward in enumerate(rewards):
        assert centred[i] == pytest.approx(reward - total / len(rewards), abs=1e-3)


@given(numbers, st.sampled_from([0.0, 0.3, 0.9, 1.0]))
def test_the_discounted_sum_written_out(values: list[float], discount: float) -> None:
    sums = discounted_future_sum(np.array(values, np.float32), discount)
    for t in range(len(values)):
        expected = 0.0
        for s in range(t, len(values)):
            expected += discount ** (s - t) * values[s]
        assert sums[t] == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_known_discounted_sums() -> None:
    values = np.array([1, 2, 4], np.float32)
    assert discounted_future_sum(values, 0).tolist() == [1, 2, 4]
    assert discounted_future_sum(values, 0.5).tolist() == [3, 4, 4]
    assert discounted_future_sum(values, 1).tolist() == [7, 6, 4]
    assert values.tolist() == [1, 2, 4]


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 1000),
    coefficient=st.sampled_from([0.1, 1.0, 3.0]),
    discount=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_opd_advantages_written_out(
    mask: list[bool], seed: int, coefficient: float, discount: float
) -> None:
    mask = [False, *mask]
    fields = segment_fields(0, len(mask), seed=seed)
    behaviour, teacher = fields["behaviour_logprobs_T"], fields["teacher_logprobs_T"]
    behaviour[~np.array(mask)] = np.nan  # what was only observed must not be read
    made = segment(0, len(mask), **fields | {"action_mask_T": mask})
    advantages = opd_advantages(made, coefficient, discount)
    actions = [t for t in range(len(mask)) if mask[t]]
    for t in range(len(mask)):
        expected = 0.0
        if mask[t]:
            for later, s in enumerate(actions[actions.index(t) :]):
                gap = float(behaviour[s]) - float(teacher[s])
                expected -= coefficient * discount**later * gap
        assert advantages[t] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_likelier_to_the_teacher_is_worth_more() -> None:
    made = segment(1, 2, behaviour_logprobs_T=[0, -2.0, -1.0], teacher_logprobs_T=[0, -0.5, -4.0])
    assert opd_advantages(made, 2.0, 0).tolist() == [0, 3, -6]


def test_an_unscored_segment_is_refused() -> None:
    with pytest.raises(DataError, match="was not scored by a teacher"):
        opd_advantages(segment(teacher_logprobs_T=None), 1.0, 0)


def two_turn_group() -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=0,
        trajectories_G=(
            trajectory(segment(seed=1), segment(2, 2, seed=2), reward=1.0),
            trajectory(segment(4, 1, seed=3), reward=0.0),
        ),
    )


def test_reward_and_opd_add_up_on_actions_alone() -> None:
    group = two_turn_group()
    rows = segment_advantages(group, kl_coef=0.5, kl_discount_factor=0.9, reward_coef=3.0)
    assert [made for made, _ in rows] == list(group.segments())
    for (made, advantages), centred in zip(rows, [0.5, 0.5, -0.5], strict=True):
        opd = opd_advantages(made, 0.5, 0.9)
        for t in range(len(made)):
            expected = 3.0 * centred + opd[t] if made.action_mask_T[t] else 0.0
            assert advantages[t] == pytest.approx(expected, rel=1e-6)


def test_without_opd_no_teacher_is_needed() -> None:
    group = TrajectoryGroup(
        group_id=0,
        trajectories_G=tuple(
            trajectory(segment(teacher_logprobs_T=None), reward=reward) for reward in (2.0, 4.0)
        ),
    )
    [(_, low), (_, high)] = segment_advantages(
        group, kl_coef=0.0, kl_discount_factor=0.0, reward_coef=1.0
    )
    assert low.tolist() == [0, 0, 0, -1, -1, -1, -1]
    assert high.tolist() == [0, 0, 0, 1, 1, 1, 1]
