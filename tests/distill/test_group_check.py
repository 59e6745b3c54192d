"""A group that breaks a rule of its types is refused, and the error names the field."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from distill.columns import checked
from distill.errors import DataError, IsothermError
from distill.types import LOGPROB_SLACK, Segment, TrajectoryGroup
from tests.samples import group, segment, segment_of, top_logprobs, trajectory

ARRAYS = [
    "tokens_T", "action_mask_T", "behaviour_logprobs_T", "versions_T", "teacher_logprobs_T",
    "teacher_logprobs_q1_T",
]  # fmt: skip
LOGPROBS = [name for name in ARRAYS if "logprobs" in name]


def among_others(made: Segment) -> TrajectoryGroup:
    """Group in which this segment (3 observed, 4 sampled tokens) is neither first nor last."""
    others = segment(2, 6, seed=1), segment(5, 2, seed=2, teacher_logprobs_T=None)
    members = trajectory(others[0], made), trajectory(others[1])
    return TrajectoryGroup(group_id=4, trajectories_G=members)


def changed(name: str, index: int, value: Any) -> Segment:
    values = np.array(getattr(segment(), name))
    values[index] = value
    return replace(segment(), **{name: values})


def refused(made: TrajectoryGroup) -> DataError:
    with pytest.raises(DataError) as raised:
        checked(made)
    return raised.value


def test_valid_groups_pass() -> None:
    checked(group(4))
    checked(among_others(segment(bonuses_T=[0.0] * 7, teacher_top=top_logprobs(4, 2))))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("tokens_T", 2, -5),
        ("versions_T", 4, -1),
        *((name, 5, bad) for name in LOGPROBS for bad in (math.nan, math.inf, -math.inf)),
        *((name, 5, 2 * LOGPROB_SLACK) for name in LOGPROBS),
    ],
)
def test_an_impossible_value_is_named_with_its_place(name: str, index: int, value: float) -> None:
    error = refused(among_others(changed(name, index, value)))
    assert error.field == name and f"{name}[{index}]" in str(error)


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize(("index", "value"), [(0, math.nan), (2, 9.0), (5, 0.5 * LOGPROB_SLACK)])
def test_observed_tokens_and_rounding_pass(name: str, index: int, value: float) -> None:
    checked(among_others(changed(name, index, value)))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("change", [lambda v: v[None], lambda v: v[:-1], lambda v: v.astype("f8")])
def test_arrays_have_one_value_of_their_type_for_each_token(name: str, change: Any) -> None:
    made = replace(segment(), **{name: change(getattr(segment(), name))})
    if name == "tokens_T" and len(made.tokens_T) == 6:
        assert refused(among_others(made)).field == "action_mask_T"
    else:
        assert refused(among_others(made)).field == name


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("action_mask_T", {"action_mask_T": [True] * 7, "versions_T": [0] * 7}),
        ("action_mask_T", {"action_mask_T": [False] * 7, "versions_T": [0] * 7}),
        ("first_action", {"first_action": 4}),
        ("first_action", {"first_action": 2}),
        ("bonuses_T", {"bonuses_T": [0, 0, 0, 0, math.inf, 0, 0]}),
        ("teacher_top", {"teacher_top": top_logprobs(3, 2)}),
        ("policy_top_ids_NK", {"policy_top_ids_NK": np.zeros((5, 2), np.int32)}),
        ("experts_TLK", {"experts_TLK": np.zeros((7, 2, 2), np.int32)}),
        ("experts_TLK", {"experts_TLK": np.zeros((6, 2, 2), np.uint8)}),
    ],
)
def test_a_broken_rule_of_a_segment_names_the_field(field: str, changes: dict[str, Any]) -> None:
    assert refused(among_others(segment(**changes))).field == field


def test_the_last_segment_must_have_an_action_too() -> None:
    nothing = segment(action_mask_T=[False] * 7)
    assert refused(replace(group(), trajectories_G=(trajectory(nothing),))).field == "action_mask_T"


def test_an_empty_segment_is_refused() -> None:
    empty = {name: [] for name in ARRAYS}
    made = segment_of(**empty | {"action_mask_T": [], "temperature": 0.7, "first_action": 1})
    assert refused(among_others(made)).field == "tokens_T"


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher_context_T": [5], "teacher_replaces": 0},
        {"teacher_context_T": [5], "teacher_replaces": 4},
        {"teacher_context_T": [], "teacher_replaces": 3},
        {"teacher_replaces": 3},
    ],
)
def test_a_privileged_context_replaces_the_first_observation(changes: dict[str, Any]) -> None:
    assert "teacher_" in str(refused(among_others(segment(**changes))))


@pytest.mark.parametrize("temperature", [0, -0.7, math.nan, math.inf, "0.7", None])
def test_a_segment_has_a_temperature_above_zero(temperature: Any) -> None:
    with pytest.raises(IsothermError) as raised:
        checked(group(temperature=temperature))
    assert raised.value.field == "Segment.temperature"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("segments", {"segments": ()}),
        ("temperature", {"segments": (segment(), segment(temperature=1.0))}),
        ("reward", {"reward": math.nan}),
        ("turns", {"metrics": {"turns": math.inf}}),
    ],
)
def test_trajectories_are_checked(field: str, changes: dict[str, Any]) -> None:
    member = replace(trajectory(segment()), **changes)
    assert refused(replace(group(), trajectories_G=(trajectory(segment()), member))).field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [("group_id", {"group_id": -1}), ("trajectories_G", {"trajectories_G": ()})],
)
def test_groups_are_checked(field: str, changes: dict[str, Any]) -> None:
    assert refused(replace(group(4), **changes)).field == field
