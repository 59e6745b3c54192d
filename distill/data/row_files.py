"""Files of rows: JSONL or parquet, read whole, with errors that name the file and the row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from distill.errors import DataError


def read_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of every row: of a parquet file by its suffix, else of JSONL.

    A JSONL row's number is its line's, blank lines counted and left out. Parquet cannot tell an
    absent field from a null one, so its nulls are left out, at any depth.

    Raises:
        DataError: no such file, nothing in it, or something in it that is not a row.
    """
    parquet = Path(path).suffix.lower() == ".parquet"
    rows = _parquet_rows(path) if parquet else _jsonl_rows(path)
    if not rows:
        remedy = "" if parquet else "; write one JSON object per line"
        raise DataError(f"{path} holds no rows{remedy}")
    return rows


def _jsonl_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
    rows: list[tuple[int, dict[str, Any]]] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:  # numbers or brackets without end
                    raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number}: expected a JSON object, got {line[:40]!r}")
                rows.append((number, row))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path!r}: {error}") from error
    return rows


def _parquet_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist(maps_as_pydicts="strict")
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise DataError(f"cannot read {path!r} as parquet: {error}") from error
    return [(number, _without_nulls(row)) for number, row in enumerate(rows, start=1)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts `where` (file:row) before the message of a DataError that leaves the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
