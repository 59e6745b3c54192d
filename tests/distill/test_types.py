"""Segments, trajectories and groups survive the wire unchanged."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distill.types import StopReason, Trajectory, TrajectoryGroup
from tests.samples import segment, trajectory

ARRAYS = {
    "tokens_T": np.int32,
    "action_mask_T": np.bool_,
    "behaviour_logprobs_T": np.float32,
    "versions_T": np.int32,
    "teacher_logprobs_T": np.float32,
    "teacher_logprobs_q1_T": np.float32,
}


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


def test_a_group_survives_the_wire() -> None:
    two_turns = Trajectory(
        segments=(segment(seed=1), segment(2, 5, seed=2)),
        reward=0.5,
        stop_reason=StopReason.LENGTH,
        metrics={"turns": 2.0},
    )
    made = TrajectoryGroup(
        group_id=7, trajectories_G=(trajectory(segment()), two_turns), metrics={"time/rollout": 0.1}
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
