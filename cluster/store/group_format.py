"""Format of kept groups: Arrow IPC streams with one row per group.

    group_id   int64
    attempt    int32: attempt of the lease that delivered the group; null in files of steps
    group      JSON: fields of the group, its trajectories and their segments, except arrays; and
               the number of rows of each array field in each segment (-1: the field is None)
    tokens_T, action_mask_T, ...   one list per array field: all segments, concatenated
    advantages_T   advantages of all tokens, likewise; empty in files that hold none

Any Arrow reader opens the files (`.arrow` for `polars.read_ipc_stream`, `pyarrow.ipc`). Reading
executes no code, and restores every group exactly. `experts_TLK` is stored as bytes, because its
dtype differs between models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.columns import MEMBER_FIELDS, PER_TOKEN, GroupColumns, pack
from distill.durable_files import sync_directory, whole_write
from distill.errors import DataError
from distill.errors import described as error_text
from distill.types import (
    FloatArray,
    GroupFacts,
    StopReason,
    TopLogprobs,
    TrajectoryGroup,
    shared_fields,
)

if TYPE_CHECKING:
    import pyarrow

# Array fields of segments and of their `TopLogprobs`, and the dtypes in which they are stored.
_EXPERTS, _ADVANTAGES = "experts_TLK", "advantages_T"
_TOP = {"ids_NK": np.dtype(np.int32), "logprobs_NK": np.dtype(np.float32)}
_DTYPES = {
    **PER_TOKEN,
    "policy_top_ids_NK": np.dtype(np.int32),
    "teacher_context_T": np.dtype(np.int32),
    _EXPERTS: np.dtype(np.uint8),
    **{f"teacher_top.{name}": dtype for name, dtype in _TOP.items()},
    _ADVANTAGES: np.dtype(np.float32),
}
_FACTS = [each.name for each in fields(GroupFacts)]
# Errors of reading a file that is damaged or of another version, Arrow's errors included.
UNREADABLE = (
    *(DataError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError),
    *(NotImplementedError, MemoryError),
)
# Errors of writing a file: the disk is full, or the machine has no pyarrow, which only `local=True`
# can do without.
UNWRITABLE = (OSError, ImportError)


class GroupRow(NamedTuple):
    """A group to write.

    Attributes:
        facts: the group or its metadata.
        columns: the group's trajectories.
        attempt: attempt of the lease that delivered the group; None if unknown.
        advantages_L: advantages of the tokens of all segments; None if unknown.
    """

    facts: GroupFacts
    columns: GroupColumns
    attempt: int | None = None
    advantages_L: FloatArray | None = None


class StoredGroups(NamedTuple):
    """Contents of a file: its groups, their advantages (see `GroupRow`; else empty), its note."""

    groups_P: list[TrajectoryGroup]
    advantages_P: list[FloatArray]
    note: dict[str, Any]


def write_groups(
    path: Path,
    groups_P: Sequence[TrajectoryGroup],
    note: Mapping[str, Any],
    advantages_P: Sequence[FloatArray | None] | None = None,
) -> None:
    """Write groups and a JSON note to a file, atomically, and sync it to disk.

    Raises:
        DataError: a field of a group does not have the shape or dtype of its type.
        OSError: for example, the disk is full.
    """
    import pyarrow

    rows = [
        GroupRow(group, pack(group.trajectories_G), advantages_L=advantages_L)
        for group, advantages_L in zip(
            groups_P, advantages_P or [None] * len(groups_P), strict=True
        )
    ]
    path.parent.mkdir(exist_ok=True)
    with whole_write(path) as partial, partial.open("wb") as file:
        with pyarrow.ipc.new_stream(
            file, schema({"note": dict(note), "groups": len(rows)})
        ) as stream:
            stream.write_batch(batch_of(rows))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def read_groups(path: Path, remedy: str) -> StoredGroups:
    """Read a file that `write_groups` wrote.

    Raises:
        DataError: the file is damaged, or of another version; the message ends with `remedy`.
    """
    import pyarrow

    with _readable(path, remedy):
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(path.read_bytes())) as stream:
            described, batches = _described(stream), list(stream)
        groups_P = [group for batch in batches for group in groups_of(batch)]
        if len(groups_P) != described["groups"]:
            raise DataError(f"it holds {len(groups_P)} of {described['groups']} groups")
        advantages_P = [
            each.values.to_numpy(zero_copy_only=False)
            for batch in batches
            for each in batch.column(_ADVANTAGES)
        ]
        return StoredGroups(groups_P, advantages_P, described["note"])


def read_note(path: Path, remedy: str) -> dict[str, Any]:
    """Read the note of a file that `write_groups` wrote. Raises as `read_groups`."""
    import pyarrow

    with _readable(path, remedy), pyarrow.OSFile(str(path)) as file:
        return _described(pyarrow.ipc.open_stream(file))["note"]


@contextmanager
def _readable(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise DataError(
            f"{path} cannot be read ({error_text(error)}): it is damaged, or was written by "
            f"another version of isotherm; {remedy}"
        ) from error


def _described(stream: pyarrow.ipc.RecordBatchStreamReader) -> dict[str, Any]:
    return json.loads((stream.schema.metadata or {})[b"isotherm"])


def schema(described: Mapping[str, Any]) -> pyarrow.Schema:
    """Schema of a file, with a JSON description as metadata."""
    import pyarrow

    columns: list[tuple[str, pyarrow.DataType]] = [
        ("group_id", pyarrow.int64()),
        ("attempt", pyarrow.int32()),
        ("group", pyarrow.large_string()),
    ]
    for name, dtype in _DTYPES.items():
        columns.append((name, pyarrow.large_list(pyarrow.from_numpy_dtype(dtype))))
    return pyarrow.schema(columns, metadata={"isotherm": json.dumps(described)})


def batch_of(rows: Sequence[GroupRow]) -> pyarrow.RecordBatch:
    import pyarrow

    flat = [_flat(row) for row in rows]
    columns: list[pyarrow.Array] = [
        pyarrow.array([row.facts.group_id for row in rows], pyarrow.int64()),
        pyarrow.array([row.attempt for row in rows], pyarrow.int32()),
        pyarrow.array([text for text, _ in flat], pyarrow.large_string()),
    ]
    for name, dtype in _DTYPES.items():
        parts = [arrays.get(name, np.empty(0, dtype)) for _, arrays in flat]
        offsets = np.fromiter(accumulate(map(len, parts), initial=0), np.int64, len(parts) + 1)
        values = np.concatenate(parts) if parts else np.empty(0, dtype)
        columns.append(
            pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
        )
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema({}))


def groups_of(
    batch: pyarrow.RecordBatch, rows: Sequence[int] | None = None
) -> list[TrajectoryGroup]:
    """Groups of a record batch, or of the given rows.

    Arrays are read-only views of the batch if Arrow allows it.

    Raises:
        UNREADABLE: the batch is damaged, or of another version.
    """
    batch.validate(full=True)
    starts, flat = {}, {}
    for name in _DTYPES:
        column = batch.column(name)
        starts[name] = column.offsets.to_numpy()
        flat[name] = column.values.to_numpy(zero_copy_only=False)
    texts = batch.column("group")
    return [
        _group(
            json.loads(texts[row].as_py()),
            {name: flat[name][at[row] : at[row + 1]] for name, at in starts.items()},
        )
        for row in (range(len(batch)) if rows is None else rows)
    ]


def _flat(row: GroupRow) -> tuple[str, dict[str, np.ndarray]]:
    columns = row.columns
    arrays = {name: values.reshape(-1) for name, values in columns.arrays.items()}
    shapes = {name: values.shape[1:] for name, values in columns.arrays.items() if values.ndim > 1}
    dtype = ""
    if (experts := arrays.get(_EXPERTS)) is not None:
        dtype, arrays[_EXPERTS] = str(experts.dtype), experts.view(np.uint8)
    values = dict(columns.values)
    del values["teacher_states"]  # too large to store; the teacher's engine recomputes them
    tops: Sequence[TopLogprobs | None] = values.pop("teacher_top")
    if there := [top for top in tops if top is not None]:
        for name in _TOP:
            parts = [getattr(top, name).reshape(-1) for top in there]
            arrays[f"teacher_top.{name}"] = np.concatenate(parts)
    if row.advantages_L is not None:
        arrays[_ADVANTAGES] = row.advantages_L
    described = shared_fields(GroupFacts, row.facts) | {
        "members": dict(zip(MEMBER_FIELDS, zip(*columns.members_G, strict=True), strict=True)),
        "segments_G": columns.segments_G,
        "lengths": columns.lengths,
        "shapes": shapes,
        "experts_dtype": dtype,
        "teacher_top": [None if top is None else top.ids_NK.shape for top in tops],
        "values": values,
    }
    return json.dumps(described, separators=(",", ":"), default=_plain), arrays


def _plain(value: Any) -> Any:
    """Convert a value for JSON: metrics may be mappings of any class, with NumPy scalars."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} of {type(value)} in a group")


def _group(described: dict[str, Any], flat: dict[str, np.ndarray]) -> TrajectoryGroup:
    lengths = {name: tuple(each) for name, each in described["lengths"].items()}
    if dtype := described["experts_dtype"]:
        flat[_EXPERTS] = flat[_EXPERTS].view(dtype)
    arrays = {
        name: _shaped(name, flat[name], lengths[name], described["shapes"].get(name, ()))
        for name in lengths
    }
    if sum(described["segments_G"]) != len(lengths["tokens_T"]):
        raise DataError(f"a kept group has {len(lengths['tokens_T'])} segments")
    members = described["members"] | {
        "stop_reason": [StopReason(each) for each in described["members"]["stop_reason"]]
    }
    values = {name: tuple(each) for name, each in described["values"].items()}
    values["scored_by"] = tuple(map(tuple, values["scored_by"]))
    values["teacher_top"] = tuple(_tops(described["teacher_top"], flat))
    values["teacher_states"] = (None,) * len(lengths["tokens_T"])
    columns = GroupColumns(
        members_G=tuple(zip(*(members[name] for name in MEMBER_FIELDS), strict=True)),
        segments_G=tuple(described["segments_G"]),
        tokens_S=lengths["tokens_T"],
        arrays=arrays,
        lengths=lengths,
        values=values,
    )
    facts = {name: described[name] for name in _FACTS if name in described}
    return TrajectoryGroup(trajectories_G=tuple(columns.trajectories()), **facts)


def _shaped(
    name: str, values: np.ndarray, lengths: Sequence[int], shape: Sequence[int]
) -> np.ndarray:
    shaped = values.reshape(sum(max(each, 0) for each in lengths), *shape)
    if not len(values) == shaped.size:
        raise DataError(f"{name} of a kept group has {len(values)} values")
    return shaped


def _tops(
    shapes: Sequence[Sequence[int] | None], flat: Mapping[str, np.ndarray]
) -> Iterator[TopLogprobs | None]:
    start = 0
    for shape in shapes:
        if shape is None:
            yield None
            continue
        end = start + shape[0] * shape[1]
        parts = {name: flat[f"teacher_top.{name}"][start:end].reshape(shape) for name in _TOP}
        yield TopLogprobs(**parts)
        start = end
