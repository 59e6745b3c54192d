"""A trajectory group in parts, for the queue: each field of all segments as one array.

A group has some fifty small arrays, and pickling an array costs a few microseconds whatever its
size: columns take less than half of the time. They are what a learner's leader reads. A teacher's
likeliest tokens, which are ten times as large at K = 64, are parts of their own, one a trajectory,
for whoever trains it: int32 ids and float32 log-probs, as the teacher gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from distill.types import LikeliestTokens, Segment, Trajectory, TrajectoryGroup

Made = TypeVar("Made")

# Of each of a trajectory's segments.
Tops: TypeAlias = tuple[LikeliestTokens | None, ...]
_TOP = "teacher_top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A group without its likeliest tokens.

    Attributes:
        state: of the group and its trajectories.
        segments: by field, of all segments in order: see `_pack_column`.
        tops: (member, its segment, (positions, K)) of each segment that has some.
    """

    state: Mapping[str, Any]
    segments: Mapping[str, tuple[list[int] | None, Any]]
    tops: tuple[tuple[int, int, tuple[int, int]], ...]

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        return sum(getattr(values, "nbytes", 0) for _, values in self.segments.values())


class Packed(NamedTuple):
    """A group in parts; `tops` of each trajectory, or of none where no segment has any."""

    columns: Columns
    tops: tuple[Tops, ...]

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        found = [top for tops in self.tops for top in tops if top is not None]
        return self.columns.nbytes + sum(t.ids_NK.nbytes + t.logprobs_NK.nbytes for t in found)


def pack(group: TrajectoryGroup) -> Packed:
    """The group in parts; `unpack` is the inverse."""
    segments = list(group.segments())
    tops = [
        (member, number, segment.teacher_top)
        for member, trajectory in enumerate(group.trajectories_G)
        for number, segment in enumerate(trajectory.segments)
        if segment.teacher_top is not None
    ]
    trajectories = [
        _state(trajectory) | {"segments": len(trajectory.segments)}
        for trajectory in group.trajectories_G
    ]
    columns = Columns(
        state=_state(group) | {"trajectories_G": trajectories},
        segments={
            field.name: _pack_column([getattr(segment, field.name) for segment in segments])
            for field in fields(Segment)
            if field.name != _TOP
        },
        tops=tuple((member, number, (len(top), top.k)) for member, number, top in tops),
    )
    by_trajectory = (
        tuple(segment.teacher_top for segment in trajectory.segments)
        for trajectory in group.trajectories_G
    )
    return Packed(columns, tuple(by_trajectory) if tops else ())


def unpack(columns: Columns, tops: Sequence[LikeliestTokens] = ()) -> TrajectoryGroup:
    """The group. Its values were checked when it was made, and are not checked again.

    Args:
        tops: one for each of `columns.tops`.
    """
    state = columns.state
    counts = [trajectory["segments"] for trajectory in state["trajectories_G"]]
    found = {(member, n): top for (member, n, _), top in zip(columns.tops, tops, strict=True)}
    values = {
        name: _unpack_column(column, sum(counts)) for name, column in columns.segments.items()
    }
    values[_TOP] = [found.get((g, n)) for g, count in enumerate(counts) for n in range(count)]
    segments = (
        _make(Segment, dict(zip(values, of_segment, strict=True)))
        for of_segment in zip(*values.values(), strict=True)
    )
    trajectories_G = tuple(
        _make(Trajectory, trajectory | {"segments": _next(segments, trajectory["segments"])})
        for trajectory in state["trajectories_G"]
    )
    return _make(TrajectoryGroup, {**state, "trajectories_G": trajectories_G})


def _pack_column(values: Sequence[Any]) -> tuple[list[int] | None, Any]:
    """The length of each (-1: None) and all of them in a row; or None and the values, if they are
    no arrays."""
    arrays = [value for value in values if value is not None]
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        return None, values
    lengths = [-1 if value is None else len(value) for value in values]
    return lengths, np.concatenate(arrays)


def _unpack_column(column: tuple[list[int] | None, Any], num_segments: int) -> list[Any]:
    lengths, values = column
    if lengths is None:
        return values
    assert len(lengths) == num_segments
    values.flags.writeable = False
    made, start = [], 0
    for length in lengths:
        made.append(values[start : start + length] if length >= 0 else None)
        start += max(length, 0)
    return made


def _state(instance: Trajectory | TrajectoryGroup) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _next(segments: Iterator[Segment], count: int) -> tuple[Segment, ...]:
    return tuple(next(segments) for _ in range(count))


def _make(kind: type[Made], state: Mapping[str, Any]) -> Made:
    instance = object.__new__(kind)
    for name, value in state.items():
        object.__setattr__(instance, name, value)
    return instance
