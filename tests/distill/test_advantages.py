"""Advantages against nested loops."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import DataError
from distill.objective.advantages import outside_top, reference_gaps
from distill.objective.objectives import opd_advantages
from distill.objective.reward_advantages import STD_FLOOR
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import FloatArray, Segment, TopLogprobs, TrajectoryGroup
from tests.refusals import refuses
from tests.samples import segment, segment_fields, segment_of, trajectory


def rewarded(*rewards: float, group_id: int = 0) -> TrajectoryGroup:
    """Group of one-segment trajectories of different lengths."""
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(
            trajectory(segment(2, 1 + g, seed=10 * group_id + g), reward=reward)
            for g, reward in enumerate(rewards)
        ),
    )


def advantage_by_hand(rewards: Sequence[float], i: int, baseline: str, scale: bool) -> float:
    total = square = 0.0
    for reward in rewards:
        total += reward
    mean = total / len(rewards)
    for reward in rewards:
        square += (reward - mean) ** 2
    compared = mean
    if baseline == "leave_one_out":
        compared = (total - rewards[i]) / (len(rewards) - 1)
    made = rewards[i] - compared
    return made / (math.sqrt(square / len(rewards)) + STD_FLOOR) if scale else made


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
    fields["action_mask_T"] = mask
    made = segment_of(**fields)
    [advantages] = opd_advantages([made], coefficient, discount)
    actions = [t for t in range(len(mask)) if mask[t]]
    for t in range(len(mask)):
        expected = 0.0
        if mask[t]:
            for later, s in enumerate(actions[actions.index(t) :]):
                gap = float(behaviour[s]) - float(teacher[s])
                expected -= coefficient * discount**later * gap
        assert advantages[t] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_an_unscored_segment_is_refused() -> None:
    with refuses(DataError, "teacher_logprobs_T"):
        opd_advantages([segment(teacher_logprobs_T=None)], 1.0, 0)
    with refuses(DataError, "teacher_top"):
        outside_top(segment())
    with refuses(DataError, "reference_logprobs_T"):
        reference_gaps(segment())


def test_actions_outside_the_top() -> None:
    top = TopLogprobs(
        ids_NK=np.array([[5, 6], [6, 5], [7, 8]], np.int32),
        logprobs_NK=np.full((3, 2), -2, np.float32),
    )
    made = segment(
        1, 4,
        tokens_T=[9, 5, 5, 5, 5],
        action_mask_T=[False, True, False, True, True],
        teacher_top=top,
    )  # fmt: skip
    # rows of the top belong to the actions in order: to tokens 1, 3 and 4
    assert outside_top(made).tolist() == [False, False, False, False, True]


def two_turn_group() -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=0,
        trajectories_G=(
            trajectory(scored(1), scored(2, 2, 2, bonuses_T=None), reward=1.0),
            trajectory(scored(3, 4, 1), reward=0.0),
            trajectory(scored(4, 1, 6), reward=0.5),
        ),
    )


def scored(seed: int, prompt: int = 3, actions: int = 4, **changes: Any) -> Segment:
    """Segment with a reference's log-probs and bonuses, also at observed tokens."""
    rng = np.random.default_rng(seed)
    length = prompt + actions
    fields: dict[str, Any] = {
        "reference_logprobs_T": -rng.exponential(2, length).astype(np.float32),
        "bonuses_T": rng.normal(size=length).astype(np.float32),
    }
    return segment(prompt, actions, seed=seed, **fields | changes)


OBJECTIVES = {
    "bonuses": {},
    "reward": {"reward_coef": 3.0},
    "leave one out": {"reward_coef": 0.5, "baseline": "leave_one_out", "scale_by_std": True},
    "reference": {"reference_kl_coef": 0.2},
    "reference, discounted": {"reference_kl_coef": 0.2, "kl_discount_factor": 0.5},
    "all": {"reward_coef": 2.0, "reference_kl_coef": 0.4},
}


def advantages_by_segment(
    groups: Sequence[TrajectoryGroup], objective: ObjectiveConfig
) -> list[tuple[TrajectoryGroup, Segment, FloatArray]]:
    segments = [(group, made) for group in groups for made in group.segments()]
    rows = policy_rows(groups, objective)
    return [(*of, row.advantages_T) for of, row in zip(segments, rows, strict=True)]


@pytest.mark.parametrize("settings", OBJECTIVES.values(), ids=OBJECTIVES)
def test_all_terms_add_up_on_actions_alone(settings: dict[str, Any]) -> None:
    objective = ObjectiveConfig(kl_coef=0, **settings)
    groups = [two_turn_group(), TrajectoryGroup(
        group_id=1, trajectories_G=(trajectory(scored(5), reward=4.0),
                                    trajectory(scored(6, 2, 3), reward=1.0)),
    )]  # fmt: skip
    total_kl, tokens = 0.0, 0
    for group in groups:
        for s in group.segments():
            for t in range(len(s)):
                if s.action_mask_T[t]:
                    total_kl += gap(s, t)
                    tokens += 1
    rows = iter(advantages_by_segment(groups, objective))
    for group in groups:
        rewards = [member.reward for member in group.trajectories_G]
        for i, member in enumerate(group.trajectories_G):
            reward = advantage_by_hand(rewards, i, objective.baseline, objective.scale_by_std)
            penalties = [
                total_kl / tokens - gap(s, t)
                for s in member.segments
                for t in range(len(s))
                if s.action_mask_T[t]
            ]
            place = 0  # of the action among all of the trajectory's
            for s in member.segments:
                of_group, of_segment, advantages = next(rows)
                assert of_group is group and of_segment is s
                for t in range(len(s)):
                    expected = 0.0
                    if s.action_mask_T[t]:
                        expected += objective.reward_coef * reward
                        if s.bonuses_T is not None:
                            expected += float(s.bonuses_T[t])
                        for later, penalty in enumerate(penalties[place:]):
                            discount = objective.kl_discount_factor**later
                            expected += objective.reference_kl_coef * discount * penalty
                        place += 1
                    assert advantages[t] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert next(rows, None) is None


def gap(s: Segment, t: int) -> float:
    assert s.reference_logprobs_T is not None
    return float(s.behaviour_logprobs_T[t]) - float(s.reference_logprobs_T[t])


def test_a_reference_is_needed_by_its_penalty_alone() -> None:
    [(_, _, made)] = advantages_by_segment(
        [TrajectoryGroup(group_id=0, trajectories_G=(trajectory(segment()),))],
        ObjectiveConfig(kl_coef=0),
    )
    assert not made.any()
    with refuses(DataError, "reference_logprobs_T"):
        advantages_by_segment([rewarded(1, 0)], ObjectiveConfig(kl_coef=0, reference_kl_coef=0.1))


def test_the_hint_s_bonus_is_for_right_answers_alone() -> None:
    """log q - log mu by hand: -1 - (-3) = 2 and -2 - (-1.5) = -0.5, times 0.1."""

    def of(reward: float, hint: list[int] | None, **changes: Any) -> Any:
        made = segment(
            2, 2,
            behaviour_logprobs_T=np.array([0, 0, -3, -1.5], np.float32),
            teacher_logprobs_T=np.array([0, 0, -1, -2], np.float32),
            teacher_context_T=None if hint is None else np.array(hint, np.int32),
        )  # fmt: skip
        return trajectory(made, reward=reward, **changes)

    members = (
        of(1.0, [7]), of(0.5, [7]), of(1.0, None), of(1.0, [7], reward_counts=False),
    )  # fmt: skip
    group = TrajectoryGroup(group_id=0, trajectories_G=members)

    def advantages(**settings: Any) -> list[list[float]]:
        objective = ObjectiveConfig(hint_bonus_coef=0.1, **settings)
        return [row.advantages_T.tolist() for row in policy_rows([group], objective)]

    bonus, none = [0, 0, 0.2, -0.05], [0.0] * 4
    found = advantages(kl_coef=0.0)
    for got, expected in zip(found, [bonus, none, none, none], strict=True):
        assert got == pytest.approx(expected)
    lower = advantages(kl_coef=0.0, correct_reward_threshold=0.5)
    for got, expected in zip(lower, [bonus, bonus, none, none], strict=True):
        assert got == pytest.approx(expected)
    # Beside the teacher's term, which has a coefficient of its own.
    both = advantages(kl_coef=0.5)
    for got, of_bonus in zip(both, [bonus, none, none, none], strict=True):
        assert got == pytest.approx([0, 0, of_bonus[2] + 0.5 * 2, of_bonus[3] - 0.5 * 0.5])
