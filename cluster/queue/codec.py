"""A trajectory group as bytes, for the queue: each field of all segments as one array.

A group has some fifty small arrays, and pickling an array costs a few microseconds whatever its
size: this takes less than half of the time of plain pickles.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from distill.types import Segment, Trajectory, TrajectoryGroup

Made = TypeVar("Made")


def pack(group: TrajectoryGroup) -> bytes:
    """Encodes the group as bytes; `unpack` is the inverse."""
    segments = list(group.segments())
    columns = {
        field.name: _pack_column([getattr(segment, field.name) for segment in segments])
        for field in fields(Segment)
    }
    trajectories = [
        _state(trajectory) | {"segments": len(trajectory.segments)}
        for trajectory in group.trajectories_G
    ]
    return pickle.dumps((_state(group) | {"trajectories_G": trajectories}, columns), protocol=5)


def unpack(payload: bytes) -> TrajectoryGroup:
    """The group. Its values were checked when it was made, and are not checked again."""
    state, columns = pickle.loads(payload)
    num_segments = sum(trajectory["segments"] for trajectory in state["trajectories_G"])
    values = [_unpack_column(column, num_segments) for column in columns.values()]
    segments = (
        _make(Segment, dict(zip(columns, of_segment, strict=True)))
        for of_segment in zip(*values, strict=True)
    )
    trajectories_G = tuple(
        _make(Trajectory, trajectory | {"segments": _next(segments, trajectory["segments"])})
        for trajectory in state["trajectories_G"]
    )
    return _make(TrajectoryGroup, state | {"trajectories_G": trajectories_G})


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
