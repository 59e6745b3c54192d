"""A packed and unpacked group is unchanged."""

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from distill.columns import GroupColumns, checked, joined, pack
from distill.objective.sums import meta_of
from distill.types import Segment, StopReason, TrajectoryGroup
from tests.samples import group, ids, segment, top_logprobs, trajectory


def assert_same(made: Any, expected: Any) -> None:
    """Assert deep equality with types, shapes and dtypes; arrays are read-only."""
    if isinstance(expected, Mapping):
        assert made == dict(expected)
        return
    assert type(made) is type(expected)
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(made, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple):
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert made.dtype == expected.dtype and made.shape == expected.shape
        assert made.tobytes() == expected.tobytes() and not made.flags.writeable
    else:
        assert made == expected


def experts(tokens: int, largest: int, dtype: type) -> np.ndarray:
    """Experts of two layers, three each."""
    return np.arange(largest, largest - 6 * tokens, -1).reshape(tokens, 2, 3).astype(dtype)


def varied() -> TrajectoryGroup:
    """Group of several segments, some with fields that others lack."""
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


def travelled(made: TrajectoryGroup, least_bytes: int) -> TrajectoryGroup:
    """Group from its metadata and parts, each pickled as for another process."""
    columns = checked(made)
    meta = pickle.loads(pickle.dumps(meta_of(made, columns), protocol=5))
    parts = pickle.loads(pickle.dumps(columns.parts(least_bytes), protocol=5))
    return meta.group([each for part in parts for each in part.trajectories()])


@pytest.mark.parametrize("made", [group(3), group(0, members=1), varied()])
@pytest.mark.parametrize("least_bytes", [1, 200, 100_000])
def test_it_is_the_same_group(made: TrajectoryGroup, least_bytes: int) -> None:
    assert_same(travelled(made, least_bytes), made)
    assert_same(
        tuple(joined(pack(made.trajectories_G).parts(least_bytes)).trajectories()),
        made.trajectories_G,
    )
    segments = [each for part in pack(made.trajectories_G).parts(1) for each in segments_of(part)]
    assert_same(meta_of(made).group_of_segments(segments), made)


def segments_of(part: GroupColumns) -> list[Segment]:
    return [segment for each in part.trajectories() for segment in each.segments]


def test_parts_are_runs_of_trajectories_and_none_is_small() -> None:
    made = group(5, members=7)
    sizes = [pack([one]).nbytes for one in made.trajectories_G]
    whole = pack(made.trajectories_G)
    assert whole.nbytes == sum(sizes) > 0
    for least_bytes in (1, max(sizes), 3 * max(sizes), 10**6):
        parts = whole.parts(least_bytes)
        assert sum((part.segments_G for part in parts), ()) == whole.segments_G
        assert sum(part.nbytes for part in parts) == whole.nbytes
        assert len(parts) == 1 or min(part.nbytes for part in parts) >= least_bytes
    assert len(whole.parts(1)) == 7 and len(whole.parts(10**6)) == 1


def test_metadata_is_small() -> None:
    made = TrajectoryGroup(
        group_id=0, trajectories_G=tuple(trajectory(segment(128, 2048, seed=g)) for g in range(16))
    )
    columns = checked(made)
    assert len(pickle.dumps(meta_of(made, columns))) < 0.005 * columns.nbytes
