"""Lists of records that are pickled as columns: one array per field, not one per record.

A step of short answers has hundreds of samples and scores of a few tokens each. As separate arrays,
each would be pickled and sent by Ray as a separate buffer, which takes most of the time.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

Record = TypeVar("Record")


class RecordList(list[Record]):
    """List of instances of one dataclass, which is unpickled as a plain list of equal records.

    Arrays of the unpickled records are views of the columns.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if not self:
            return list, ()
        record = type(self[0])
        names = [field.name for field in fields(record)]  # pyright: ignore[reportArgumentType]
        return _records, (record, {n: _column([getattr(each, n) for each in self]) for n in names})


class _Rows(NamedTuple):
    """Concatenated arrays, and the length of each."""

    flat: np.ndarray
    lengths: list[int]


class _Tuples(NamedTuple):
    """Columns of tuples that have the same length, at least 1."""

    columns: tuple[Any, ...]


def _column(values: list[Any]) -> Any:
    kinds = {
        (type(v), v.dtype, v.shape[1:]) if isinstance(v, np.ndarray) else type(v) for v in values
    }
    if len(kinds) > 1:
        return values
    if isinstance(values[0], np.ndarray):
        return _Rows(np.concatenate(values), [len(each) for each in values])
    if kinds == {tuple} and values[0] and len({len(each) for each in values}) == 1:
        return _Tuples(tuple(_column(list(each)) for each in zip(*values, strict=True)))
    return values


def _values(column: Any) -> list[Any]:
    match column:
        case _Rows(flat, lengths):
            ends = pairwise(accumulate(lengths, initial=0))
            return [flat[start:end] for start, end in ends]
        case _Tuples(columns):
            return list(zip(*map(_values, columns), strict=True))
        case _:
            return column


def _records(record: type[Record], columns: dict[str, Any]) -> list[Record]:
    values = zip(*map(_values, columns.values()), strict=True)
    return [record(**dict(zip(columns, each, strict=True))) for each in values]
