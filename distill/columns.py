"""Columns of sampled trajectories: one flat array for each field of their segments.

A group has dozens of small arrays, and checking or pickling an array costs microseconds,
independent of its size. A rollout worker therefore packs and checks a group once (`checked`). The
sums of the metrics (`distill.objective.sums`) and the payloads of the queue are computed from the
columns, and a learner worker unpacks views of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain, islice, pairwise
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from distill.errors import DataError
from distill.json_values import is_number
from distill.privileged import check_context
from distill.sampling import check_temperature
from distill.types import LOGPROB_SLACK, Segment, TopLogprobs, Trajectory, TrajectoryGroup

_INT, _BOOL, _FLOAT = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)
_LOGPROBS = (
    "behaviour_logprobs_T", "teacher_logprobs_T", "teacher_logprobs_q1_T", "reference_logprobs_T",
)  # fmt: skip
# Fields of a segment that have one value per token, and their dtypes.
PER_TOKEN = {
    "tokens_T": _INT, "action_mask_T": _BOOL, "versions_T": _INT,
    **dict.fromkeys((*_LOGPROBS, "bonuses_T"), _FLOAT),
}  # fmt: skip
_ARRAYS = (*PER_TOKEN, "policy_top_ids_NK", "teacher_context_T", "experts_TLK")
_FIELDS = tuple(field.name for field in fields(Segment))
_OF_SEGMENT = attrgetter(*_FIELDS)
MEMBER_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name != "segments")
_OF_MEMBER = attrgetter(*MEMBER_FIELDS)

# Number of rows of a field in each segment; -1 if the segment lacks the field.
Lengths: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupColumns:
    """Consecutive trajectories of a group, packed.

    Declared without slots, like other classes that a step pickles hundreds of times: a dataclass
    with slots is pickled by Python code, which takes twice as long.

    Attributes:
        members_G: values of `MEMBER_FIELDS` for each trajectory, in that order.
        segments_G: number of segments of each trajectory.
        tokens_S: number of tokens of each segment.
        arrays: array fields by name, concatenated over all segments; fields that no segment has
            are omitted.
        lengths: number of rows that each segment has in these arrays, by field name.
        values: other fields by name, one value per segment.
    """

    members_G: tuple[tuple[Any, ...], ...]
    segments_G: tuple[int, ...]
    tokens_S: tuple[int, ...]
    arrays: Mapping[str, np.ndarray]
    lengths: Mapping[str, Lengths]
    values: Mapping[str, tuple[Any, ...]]

    def all_have(self, name: str) -> bool:
        """True if every segment has this array field."""
        return name in self.arrays and -1 not in self.lengths[name]

    def per_token(self, name: str) -> npt.NDArray[np.float32] | None:
        """Values of a float field at all tokens, NaN in segments that lack the field.

        None if no segment has the field.
        """
        values = self.arrays.get(name)
        if values is None or self.all_have(name):
            return values
        has_S = [length >= 0 for length in self.lengths[name]]
        filled_L = np.full(sum(self.tokens_S), np.nan, np.float32)
        filled_L[np.repeat(has_S, self.tokens_S)] = values
        return filled_L

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        tops = sum(map(_top_bytes, self.values["teacher_top"]))
        return tops + sum(array.nbytes for array in self.arrays.values())

    def trajectories(self) -> list[Trajectory]:
        """Trajectories whose arrays are read-only views of the columns."""
        per_token = list(pairwise(accumulate(self.tokens_S, initial=0)))
        columns: dict[str, Sequence[Any]] = dict(self.values)
        for name, values in self.arrays.items():
            values.flags.writeable = False
            if self.lengths[name] == self.tokens_S:
                columns[name] = [values[start:end] for start, end in per_token]
            else:
                columns[name] = _views(values, self.lengths[name])
        names = tuple(columns)
        segments = (
            Segment(**dict(zip(names, of_segment, strict=True)))
            for of_segment in zip(*columns.values(), strict=True)
        )
        return [
            Trajectory(
                segments=tuple(islice(segments, count)),
                **dict(zip(MEMBER_FIELDS, member, strict=True)),
            )
            for count, member in zip(self.segments_G, self.members_G, strict=True)
        ]

    def parts(self, least_bytes: int) -> list[GroupColumns]:
        """Split into runs of trajectories, each of at least `least_bytes`.

        A group of less than twice that size is not split.
        """
        if self.nbytes < 2 * least_bytes:
            return [self]
        ends, size = [], 0
        segments = iter(self._segment_bytes())
        for member, count in enumerate(self.segments_G):
            size += sum(islice(segments, count))
            if size >= least_bytes:
                ends.append(member + 1)
                size = 0
        ends[-1] = len(self.segments_G)  # a remainder that is too small joins the last run
        return [self._run(first, end) for first, end in pairwise([0, *ends])]

    def _segment_bytes(self) -> list[int]:
        sizes_S = list(map(_top_bytes, self.values["teacher_top"]))
        for name, values in self.arrays.items():
            of_row = values.itemsize * math.prod(values.shape[1:])
            for at, length in enumerate(self.lengths[name]):
                sizes_S[at] += max(length, 0) * of_row
        return sizes_S

    def _run(self, first: int, end: int) -> GroupColumns:
        """Columns of the trajectories from `first` to before `end`."""
        start, stop = sum(self.segments_G[:first]), sum(self.segments_G[:end])
        arrays = {}
        for name, values in self.arrays.items():
            rows_S = [max(length, 0) for length in self.lengths[name]]
            arrays[name] = values[sum(rows_S[:start]) : sum(rows_S[:stop])]
        return GroupColumns(
            members_G=self.members_G[first:end],
            segments_G=self.segments_G[first:end],
            tokens_S=self.tokens_S[start:stop],
            arrays=arrays,
            lengths={name: lengths[start:stop] for name, lengths in self.lengths.items()},
            values={name: values[start:stop] for name, values in self.values.items()},
        )


def joined(parts: Sequence[GroupColumns]) -> GroupColumns:
    """Inverse of `GroupColumns.parts`."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.arrays)
    lengths: dict[str, Lengths] = {}
    for name in names:
        of_parts = (part.lengths.get(name, (-1,) * len(part.tokens_S)) for part in parts)
        lengths[name] = tuple(chain.from_iterable(of_parts))
    return GroupColumns(
        members_G=tuple(chain.from_iterable(part.members_G for part in parts)),
        segments_G=tuple(chain.from_iterable(part.segments_G for part in parts)),
        tokens_S=tuple(chain.from_iterable(part.tokens_S for part in parts)),
        arrays={
            name: np.concatenate([part.arrays[name] for part in parts if name in part.arrays])
            for name in names
        },
        lengths=lengths,
        values={
            name: tuple(chain.from_iterable(part.values[name] for part in parts))
            for name in parts[0].values
        },
    )


def pack(trajectories: Sequence[Trajectory]) -> GroupColumns:
    """Columns of trajectories.

    Raises:
        DataError: an array does not have one value of its dtype per token.
    """
    segments = [segment for each in trajectories for segment in each.segments]
    columns = dict(zip(_FIELDS, zip(*map(_OF_SEGMENT, segments), strict=True), strict=True))
    tokens_S = tuple(map(len, columns["tokens_T"]))
    arrays: dict[str, np.ndarray] = {}
    lengths: dict[str, Lengths] = {}
    for name in _ARRAYS:
        parts_S = columns.pop(name)
        present = [part for part in parts_S if part is not None]
        if not present:
            continue
        if (dtype := PER_TOKEN.get(name)) is not None:
            _check_shapes(name, dtype, parts_S, tokens_S)
        complete = len(present) == len(parts_S)
        lengths_S = tuple(-1 if part is None else len(part) for part in parts_S)
        # Fields with the lengths of the tokens share one tuple, which a pickle stores once.
        lengths[name] = tokens_S if complete and lengths_S == tokens_S else lengths_S
        arrays[name] = np.concatenate(present)
    return GroupColumns(
        members_G=tuple(map(_OF_MEMBER, trajectories)),
        segments_G=tuple(len(each.segments) for each in trajectories),
        tokens_S=tokens_S,
        arrays=arrays,
        lengths=lengths,
        values=columns,
    )


def checked(group: TrajectoryGroup) -> GroupColumns:
    """Check that a group obeys the rules of its types, and pack it.

    This is the only check of a group.

    Raises:
        DataError: a rule is broken; the message and `field` name the field.
    """
    if group.group_id < 0:
        raise _error("group_id", f"{group.group_id} is negative")
    if not group.trajectories_G:
        raise _error("trajectories_G", f"of group {group.group_id} is empty")
    for trajectory in group.trajectories_G:
        if not trajectory.segments:
            raise _error("segments", "of a trajectory is empty")
        for name, value in (("reward", trajectory.reward), *trajectory.metrics.items()):
            if not is_number(value):
                raise _error(name, f"= {value!r} of a trajectory is not a finite number")
    segments = list(group.segments())
    temperatures = {segment.temperature for segment in segments}
    for temperature in temperatures:
        check_temperature(temperature, "Segment.temperature")
    if len(temperatures) > 1:
        raise _error("temperature", f"differs within group {group.group_id}: {temperatures}")
    columns = pack(group.trajectories_G)
    actions_S = _check_actions(columns)
    for name in (*_LOGPROBS, "bonuses_T"):
        _check_floats(name, columns)
    for segment, actions in zip(segments, actions_S, strict=True):
        _check_optional_parts(segment, actions)
    return columns


def _check_actions(columns: GroupColumns) -> list[int]:
    """Check tokens, and positions and versions of actions; return each segment's action count."""
    mask_L, versions_L = columns.arrays["action_mask_T"], columns.arrays["versions_T"]
    tokens_L = columns.arrays["tokens_T"]
    _refuse("tokens_T", tokens_L < 0, columns, "is a negative id")
    _refuse("versions_T", mask_L & (versions_L < 0), columns, "on an action token")
    starts_S = [0, *accumulate(columns.tokens_S)]
    index_N = np.flatnonzero(mask_L)
    before_S = np.searchsorted(index_N, starts_S).tolist()
    places = [*index_N.tolist(), len(mask_L)]
    stored_S = columns.values["first_action"]
    for at, start, length, stored in zip(
        before_S[:-1], starts_S[:-1], columns.tokens_S, stored_S, strict=True
    ):
        first = places[at] - start
        if first >= length:
            raise _error("action_mask_T", "is False everywhere: there is nothing to train on")
        if first == 0:
            raise _error("action_mask_T", "[0] is True: the first token has no context")
        if first != stored:
            raise _error("first_action", f"= {stored}, but the first action is at {first}")
    return [end - start for start, end in pairwise(before_S)]


def _check_floats(name: str, columns: GroupColumns) -> None:
    values_L = columns.arrays.get(name)
    if values_L is None:
        return
    if name == "bonuses_T":
        _refuse(name, ~np.isfinite(values_L), columns, "is not finite")
        return
    good_L = (values_L <= LOGPROB_SLACK) & (values_L > -np.inf)  # both are False for a NaN
    if good_L.all():
        return
    mask_L = columns.arrays["action_mask_T"]
    if not columns.all_have(name):
        mask_L = mask_L[np.repeat([n >= 0 for n in columns.lengths[name]], columns.tokens_S)]
    why = "on an action token: a log-prob must be finite and at most 0"
    _refuse(name, mask_L & ~good_L, columns, why)


def _check_optional_parts(segment: Segment, actions: int) -> None:
    check_context(
        segment.teacher_context_T,
        segment.teacher_replaces,
        segment.first_action,
        "teacher_replaces",
    )
    for name in ("teacher_top", "policy_top_ids_NK"):
        rows = getattr(segment, name)
        if rows is not None and len(rows) != actions:
            raise _error(name, f"has {len(rows)} rows for {actions} action tokens")
    experts_TLK = segment.experts_TLK
    if experts_TLK is not None and (
        experts_TLK.ndim != 3
        or len(experts_TLK) != len(segment)
        or experts_TLK.dtype not in (np.uint8, np.uint16)
    ):
        raise _error(
            "experts_TLK",
            f"has shape {experts_TLK.shape} and dtype {experts_TLK.dtype}; it must be (tokens, "
            f"layers, experts of a token) in uint8 or uint16, of {len(segment)} tokens",
        )


def _check_shapes(
    name: str, dtype: np.dtype, parts_S: Sequence[np.ndarray | None], tokens_S: Sequence[int]
) -> None:
    for values_T, length in zip(parts_S, tokens_S, strict=True):
        if values_T is None:
            continue
        if not length or values_T.dtype != dtype or values_T.shape != (length,):
            raise _error(
                name,
                f"has shape {values_T.shape} and dtype {values_T.dtype}; it must have one {dtype} "
                f"for each of at least one token, here {length}",
            )


def _refuse(name: str, bad_L: npt.NDArray[np.bool_], columns: GroupColumns, why: str) -> None:
    """Raise DataError if any value of a column is bad.

    The message has the first bad value and its index in its segment.
    """
    if not bad_L.any():
        return
    where = first = int(np.argmax(bad_L))
    for length in columns.lengths[name]:
        if where < length:
            break
        where -= max(length, 0)
    value = columns.arrays[name][first]
    raise _error(name, f"[{where}] = {value} {why} ({np.count_nonzero(bad_L)} are bad)")


def _error(field: str, what: str) -> DataError:
    space = "" if what.startswith("[") else " "
    return DataError(f"{field}{space}{what}", field=field)


def _views(values: np.ndarray, lengths_S: Lengths) -> list[np.ndarray | None]:
    views, start = [], 0
    for length in lengths_S:
        views.append(values[start : start + length] if length >= 0 else None)
        start += max(length, 0)
    return views


def _top_bytes(top: TopLogprobs | None) -> int:
    return 0 if top is None else top.ids_NK.nbytes + top.logprobs_NK.nbytes
