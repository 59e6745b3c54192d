"""Serialization of a trajectory group for the queue: an outline, and parts with its trajectories.

The queue and the learner's leader read only the outline. A part holds consecutive trajectories, as
few as keep it above the size that Ray passes inline in calls, so that a learner worker fetches
little besides the trajectories that it trains. Segments are packed by field: a group has some fifty
small arrays, and pickling an array costs a few microseconds whatever its size. Unpacking makes
views, so a process reads only the trajectories that it uses from a part in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from distill.objective.tallies import outline
from distill.records import GroupOutline
from distill.types import Segment, TopLogprobs, Trajectory, TrajectoryGroup

# Least size of a part's arrays, if the group is that large: Ray would copy objects below 100 kB
# into the memory of the queue's process.
PART_BYTES = 110_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive trajectories of a group, packed.

    Attributes:
        states: fields of each trajectory, with the number of segments in place of the segments.
        segments: columns of all segments in order, by field: see `_pack_column`.
    """

    states: Sequence[Mapping[str, Any]]
    segments: Mapping[str, tuple[list[int] | None, Any]]


class Packed(NamedTuple):
    """A packed group.

    Attributes:
        outline: all that the queue reads.
        firsts: index of the first trajectory of each part, within the group.
        nbytes: total size of the parts' arrays.
    """

    outline: GroupOutline
    parts: tuple[Part, ...]
    firsts: tuple[int, ...]
    nbytes: int


def pack(group: TrajectoryGroup, part_bytes: int = PART_BYTES) -> Packed:
    """Pack a group into parts of at least `part_bytes` each; a smaller group becomes one part."""
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
        outline=outline(group),
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
    """Pack trajectories into one part."""
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
    """Trajectories of a part."""
    count = sum(state["segments"] for state in part.states)
    values = {name: _unpack_column(column, count) for name, column in part.segments.items()}
    segments = (
        Segment(**dict(zip(values, of_segment, strict=True)))
        for of_segment in zip(*values.values(), strict=True)
    )
    return [
        Trajectory(**{**state, "segments": tuple(islice(segments, state["segments"]))})
        for state in part.states
    ]


def _pack_column(values: Sequence[Any]) -> tuple[list[int] | None, Any]:
    """Pack one field of all segments.

    Returns:
        For arrays, the length of each (-1 for None) and their concatenation. For other values, None
        and the values themselves.
    """
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
