"""A group that was packed and unpacked is the group."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from cluster.queue.codec import Packed, pack, unpack
from distill.types import StopReason, TrajectoryGroup
from tests.samples import group, ids, segment, top_logprobs, trajectory


def assert_same(made: Any, expected: Any) -> None:
    """Deeply, with types and dtypes; arrays are read-only."""
    assert type(made) is type(expected)
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(made, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple):
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert made.dtype == expected.dtype and not made.flags.writeable
        np.testing.assert_array_equal(made, expected)
    else:
        assert made == expected


def experts(tokens: int, largest: int, dtype: type) -> np.ndarray:
    """Of two layers, three each."""
    return np.arange(largest, largest - 6 * tokens, -1).reshape(tokens, 2, 3).astype(dtype)


def varied() -> TrajectoryGroup:
    """Several segments, some with fields that others lack."""
    return TrajectoryGroup(
        group_id=17,
        trajectories_G=(
            trajectory(
                segment(2, 5, seed=1, teacher_context_T=ids(7, 8, 9)),
                segment(4, 3, seed=2, teacher_logprobs_T=None, teacher_logprobs_q1_T=None),
                reward=0.5,
            ),
            replace(
                trajectory(
                    segment(1, 4, seed=3, bonuses_T=np.arange(5, dtype=np.float32)),
                    stop=StopReason.LENGTH,
                ),
                metrics={"env/turns": 2.0},
            ),
            trajectory(segment(3, 2, seed=4, teacher_top=top_logprobs(2, 3))),
            trajectory(segment(1, 2, seed=5, experts_TLK=experts(3, 250, np.uint8))),
        ),
        metrics={"time/rollout": 1.5},
        teacher="maths",
        tag="hard",
    )


def unpacked(packed: Packed) -> TrajectoryGroup:
    """The group of an outline and its parts, each as it is after a journey."""
    parts = [pickle.loads(pickle.dumps(part, protocol=5)) for part in packed.parts]
    trajectories = [trajectory for part in parts for trajectory in unpack(part)]
    return packed.outline.filled([s for t in trajectories for s in t.segments])


@pytest.mark.parametrize("made", [group(3), group(0, members=1), varied()])
@pytest.mark.parametrize("part_bytes", [1, 200, 100_000])
def test_it_is_the_same_group(made: TrajectoryGroup, part_bytes: int) -> None:
    packed = pack(made, part_bytes)
    assert_same(unpacked(packed), made)
    assert packed.nbytes == pack(made).nbytes > 0


def test_parts_are_runs_of_trajectories_and_none_is_small() -> None:
    made = group(5, members=7)
    sizes = [pack(replace(made, trajectories_G=(one,))).nbytes for one in made.trajectories_G]
    for part_bytes in (1, max(sizes), 3 * max(sizes), 10**6):
        packed = pack(made, part_bytes)
        ends = [*packed.firsts[1:], len(sizes)]
        parts = [sizes[first:end] for first, end in zip(packed.firsts, ends, strict=True)]
        assert [len(part.states) for part in packed.parts] == [len(part) for part in parts]
        assert [size for part in parts for size in part] == sizes
        assert len(parts) == 1 or min(map(sum, parts)) >= part_bytes
    assert len(pack(made, 1).parts) == 7 and len(pack(made, 10**6).parts) == 1


def test_an_outline_is_small() -> None:
    made = TrajectoryGroup(
        group_id=0,
        trajectories_G=tuple(trajectory(segment(128, 2048, seed=g)) for g in range(16)),
    )
    assert len(pickle.dumps(pack(made).outline)) < 0.005 * pack(made).nbytes
