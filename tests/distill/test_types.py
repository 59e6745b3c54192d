"""Segments, trajectories and groups cannot hold nonsense, and survive the wire unchanged."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import DataError, IsothermError
from distill.types import LOGPROB_SLACK, Segment, StopReason, Trajectory, TrajectoryGroup
from tests.refusals import refuses
from tests.samples import group, segment, segment_fields, trajectory

ARRAYS = {
    "tokens_T": np.int32,
    "action_mask_T": np.bool_,
    "behaviour_logprobs_T": np.float32,
    "versions_T": np.int32,
    "teacher_logprobs_T": np.float32,
    "teacher_logprobs_q1_T": np.float32,
}
LOGPROBS = [name for name in ARRAYS if "logprobs" in name]


def with_value(name: str, index: int, value: float) -> dict:
    """Fields of a segment (3 observed, 4 sampled tokens) with one number changed."""
    changed = segment_fields()
    changed[name] = changed[name].astype(np.result_type(changed[name], type(value)))
    changed[name][index] = value
    return changed


def test_lists_become_arrays_of_the_right_kind() -> None:
    lists = {
        name: value.tolist() if name in ARRAYS else value
        for name, value in segment_fields().items()
    }
    made = Segment(**lists)
    for name, dtype in ARRAYS.items():
        assert getattr(made, name).dtype == dtype
        assert getattr(made, name).tolist() == lists[name]


@pytest.mark.parametrize("name", list(ARRAYS))
def test_arrays_are_read_only_and_our_own(name: str) -> None:
    given_fields = segment_fields()
    made = Segment(**given_fields)
    before = getattr(made, name).copy()
    with pytest.raises(ValueError, match="read-only"):
        getattr(made, name)[0] = 1
    given_fields[name][:] = 1  # the caller goes on using its own array
    np.testing.assert_array_equal(getattr(made, name), before)
    with pytest.raises(FrozenInstanceError):
        setattr(made, name, before)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"teacher_context_T": [5], "teacher_replaces": 0}, "teacher_replaces"),
        ({"teacher_context_T": [5], "teacher_replaces": 4}, "teacher_replaces"),
        (
            {"teacher_context_T": np.empty(0, np.int32), "teacher_replaces": 3},
            "teacher_context_T",
        ),
        ({"teacher_replaces": 3}, "teacher_replaces"),
    ],
)
def test_a_privileged_context_says_what_it_stands_for(changes: dict, field: str) -> None:
    with refuses(DataError, field):
        Segment(**segment_fields() | changes)


@pytest.mark.parametrize("name", list(ARRAYS))
def test_every_array_must_be_flat(name: str) -> None:
    changed = segment_fields()
    changed[name] = changed[name][None]
    with pytest.raises(DataError):
        Segment(**changed)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "tokens_T"])
def test_lengths_must_agree(name: str) -> None:
    changed = segment_fields()
    changed[name] = changed[name][:-1]
    with pytest.raises(DataError):
        Segment(**changed)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("tokens_T", 2, -5),
        ("tokens_T", 2, 2**32 + 5),
        ("tokens_T", 2, 1.5),
        ("action_mask_T", 0, True),
        ("action_mask_T", 4, 0.5),
        ("versions_T", 4, -1),
        ("versions_T", 4, 0.5),
    ],
)
def test_impossible_values_are_named(name: str, index: int, value: float) -> None:
    with pytest.raises(DataError):
        Segment(**with_value(name, index, value))


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2 * LOGPROB_SLACK])
def test_an_impossible_logprob_is_named_with_its_place(name: str, value: float) -> None:
    with pytest.raises(DataError):
        Segment(**with_value(name, 5, value))


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize(("index", "value"), [(0, math.nan), (2, 9.0), (5, 0.5 * LOGPROB_SLACK)])
def test_what_was_only_observed_and_rounding_are_let_be(
    name: str, index: int, value: float
) -> None:
    made = Segment(**with_value(name, index, value))
    np.testing.assert_equal(getattr(made, name)[index], np.float32(value))


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(DataError):
        segment(action_mask_T=np.zeros(7, np.bool_))
    empty = {name: np.empty(0, dtype) for name, dtype in ARRAYS.items()}
    with pytest.raises(DataError):
        segment(**empty)


@pytest.mark.parametrize("temperature", [0, -0.7, math.nan, math.inf, "0.7", None])
def test_a_segment_has_a_temperature_above_zero(temperature: object) -> None:
    with refuses(IsothermError, "Segment.temperature"):
        segment(temperature=temperature)


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=30).filter(any),
    seed=st.integers(0, 10**6),
    protocol=st.sampled_from([2, 4, 5]),
)
def test_any_valid_segment_survives_the_wire(mask: list[bool], seed: int, protocol: int) -> None:
    mask = [False, *mask]
    made = segment(1, len(mask) - 1, seed=seed, action_mask_T=mask, versions_T=[3] * len(mask))
    came = pickle.loads(pickle.dumps(made, protocol))
    assert came.temperature == made.temperature
    for name, dtype in ARRAYS.items():
        assert getattr(came, name).dtype == dtype
        assert getattr(came, name).tobytes() == getattr(made, name).tobytes()
        assert not getattr(came, name).flags.writeable
    assert len(came) == len(mask)
    assert came.num_actions == sum(1 for is_action in mask if is_action)
    assert came.first_action == next(t for t, is_action in enumerate(mask) if is_action)


def test_the_wire_carries_buffers_not_lists() -> None:
    made = segment(100, 900)
    on_the_wire = len(pickle.dumps(made, 5))
    values = [getattr(made, field.name) for field in fields(made)]
    as_lists = len(pickle.dumps([v.tolist() if isinstance(v, np.ndarray) else v for v in values]))
    bytes_a_token = 4 + 1 + 4 + 4 + 4 + 4
    assert 1000 * bytes_a_token < on_the_wire < 1000 * bytes_a_token + 1000
    assert on_the_wire < 0.7 * as_lists


def test_out_of_band_buffers_are_not_copied() -> None:
    made = segment()
    buffers: list[pickle.PickleBuffer] = []
    came = pickle.loads(pickle.dumps(made, 5, buffer_callback=buffers.append), buffers=buffers)
    assert len(buffers) == len(ARRAYS)
    assert np.shares_memory(came.tokens_T, made.tokens_T)


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": ()},
        {"segments": (segment(), segment(temperature=1.0))},
        {"reward": math.nan},
        {"reward": math.inf},
        {"metrics": {"turns": math.nan}},
    ],
)
def test_trajectories_are_checked(changes: dict) -> None:
    with pytest.raises(DataError):
        replace(trajectory(segment()), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": -1},
        {"trajectories_G": ()},
        {"trajectories_G": (trajectory(segment()), trajectory(segment(temperature=2.0)))},
    ],
)
def test_groups_are_checked(changes: dict) -> None:
    with pytest.raises(DataError):
        replace(group(4), **changes)


def test_a_group_survives_the_wire() -> None:
    two_turns = Trajectory(
        segments=[segment(seed=1), segment(2, 5, seed=2)],
        reward=0.5,
        stop_reason=StopReason.LENGTH,
        metrics={"turns": 2.0},
    )
    made = TrajectoryGroup(
        group_id=7, trajectories_G=[trajectory(segment()), two_turns], metrics={"time/rollout": 0.1}
    )
    came = pickle.loads(pickle.dumps(made))
    assert (came.group_id, came.metrics, came.temperature) == (7, {"time/rollout": 0.1}, 0.7)
    assert came.num_actions == 4 + 4 + 5
    assert [s.tokens_T.tolist() for s in came.segments()] == [
        s.tokens_T.tolist() for s in made.segments()
    ]
    last = came.trajectories_G[1]
    assert (last.reward, last.metrics) == (0.5, {"turns": 2.0})
    assert last.stop_reason is StopReason.LENGTH
