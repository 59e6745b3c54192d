"""A trajectory group in parts, for the queue: an outline, and runs of its trajectories.

The outline is all that queue and leader read. A part holds trajectories that follow one another, as
few as keep it above what Ray passes on within its calls, so that a learner worker fetches little
besides what it trains. Its segments are packed by field: a group has some fifty small arrays, and
pickling an array costs a few microseconds whatever its size. What is unpacked are views: of a part
in shared memory a process reads those trajectories only that it uses.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from distill.objective.tallies import outline
from distill.types import Segment, TopLogprobs, Trajectory, TrajectoryGroup

Made = TypeVar("Made")

# Of a part's arrays, if the group has so many bytes: what is below 100 kB Ray would hand to the
# queue itself.
PART_BYTES = 110_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Trajectories of a group.

    Attributes:
        states: of each, its fields but for the segments, and how many those are.
        segments: by field, of all segments in order: see `_pack_column`.
    """

    states: Sequence[Mapping[str, Any]]
    segments: Mapping[str, tuple[list[int] | None, Any]]


class Packed(NamedTuple):
    """A group in parts.

    Attributes:
        outline: its pickled `GroupOutline`.
        firsts: number of the first trajectory of each part.
        nbytes: size of the parts' arrays.
    """

    outline: bytes
    parts: tuple[Part, ...]
    firsts: tuple[int, ...]
    nbytes: int


def pack(group: TrajectoryGroup, part_bytes: int = PART_BYTES) -> Packed:
    """The group in parts of at least so many bytes, but where it has too few itself."""
    runs: list[list[Trajectory]] = [[]]
    firsts, sizes = [0], [0]
    for member, trajectory in enumerate(group.trajectories_G):
        if sizes[-1] >= part_bytes:
            runs.append([])
            firsts.append(member)
            sizes.append(0)
        runs[-1].append(trajectory)
        sizes[-1] += sum(map(_size, trajectory.segments))
    if len(runs) > 1 and sizes[-1] < part_bytes:
        firsts.pop()
        rest = runs.pop()
        runs[-1] += rest
    return Packed(
        outline=pickle.dumps(outline(group), protocol=5),
        parts=tuple(map(pack_part, runs)),
        firsts=tuple(firsts),
        nbytes=sum(sizes),
    )


def _size(segment: Segment) -> int:
    values = (getattr(segment, field.name) for field in fields(Segment))
    return sum(map(_nbytes, values))


def _nbytes(value: Any) -> int:
    if isinstance(value, TopLogprobs):
        return value.ids_NK.nbytes + value.logprobs_NK.nbytes
    return value.nbytes if isinstance(value, np.ndarray) else 0


def pack_part(trajectories: Sequence[Trajectory]) -> Part:
    """The trajectories as one part."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    return Part(
        states=[
            {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
            | {"segments": len(trajectory.segments)}
            for trajectory in trajectories
        ],
        segments={
            field.name: _pack_column([getattr(segment, field.name) for segment in segments])
            for field in fields(Segment)
        },
    )


def unpack(part: Part) -> list[Trajectory]:
    """Its trajectories. Their values were checked when they were made, and are not checked
    again."""
    count = sum(state["segments"] for state in part.states)
    values = {name: _unpack_column(column, count) for name, column in part.segments.items()}
    segments = (
        _make(Segment, dict(zip(values, of_segment, strict=True)))
        for of_segment in zip(*values.values(), strict=True)
    )
    return [
        _make(Trajectory, {**state, "segments": _next(segments, state["segments"])})
        for state in part.states
    ]


def _pack_column(values: Sequence[Any]) -> tuple[list[int] | None, Any]:
    """The length of each (-1: None) and all of them in a row; or None and the values, if they are
    no arrays."""
    arrays = [value for value in values if value is not None]
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays):
        return None, values
    lengths = [-1 if value is None else len(value) for value in values]
    return lengths, np.concatenate(arrays)


def _unpack_column(column: tuple[list[int] | None, Any], num_segments: int) -> Sequence[Any]:
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


def _next(segments: Iterator[Segment], count: int) -> tuple[Segment, ...]:
    return tuple(next(segments) for _ in range(count))


def _make(kind: type[Made], state: Mapping[str, Any]) -> Made:
    instance = object.__new__(kind)
    for name, value in state.items():
        object.__setattr__(instance, name, value)
    return instance
