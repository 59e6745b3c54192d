"""Readers of whole files of rows, with errors that name the file and the row.

    .jsonl, any other suffix   one object per line, or one JSON array of objects
    .json                      the same
    .csv, .tsv                 a row of names, then rows of texts; an empty cell is an absent field
    .parquet                   Apache Parquet
    .arrow, .feather           Apache Arrow: IPC files and streams

The text formats are UTF-8, UTF-16 or UTF-32, with or without a byte order mark and with any line
ends, and may be compressed (`.gz`, `.zst`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from distill.data.normal_rows import normal_row
from distill.errors import DataError
from distill.libraries import require_library
from distill.lookup import path_meant

# Pairs (number from 1, object) of all rows.
Rows = list[tuple[int, dict[str, Any]]]


def read_rows(path: str) -> Rows:
    """Read all rows of a file, as `file_rows` does.

    Raises:
        DataError: see `file_rows`; or the file has no rows.
    """
    rows = file_rows(path)
    if not rows:
        remedy = "; write one JSON object per line" if suffix_of(path) not in _READERS else ""
        raise DataError(f"{path} has no rows{remedy}")
    return rows


def file_rows(path: str) -> Rows:
    """Read all rows of a file in the format of its suffix, as pairs (number from 1, object).

    The number of a JSONL or CSV row is that of its first line; blank lines are counted and left
    out. Rows are in normal form (`distill.data.normal_rows`).

    Raises:
        DataError: there is no such file, or it has an item that is not a row.
    """
    require_file(path)
    suffix = suffix_of(path)
    rows = _READERS.get(suffix, _json_rows)(path)
    from_arrow = suffix in _ARROW
    return [(number, normal_row(row, from_arrow=from_arrow)) for number, row in rows]


def require_file(path: str) -> None:
    """Raise DataError if there is no file at `path`."""
    if Path(path).exists():
        return
    where = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
    what = "it is not a file; download it" if "://" in path else f"the file does not exist{where}"
    raise DataError(f"cannot read {path!r}: {what}{path_meant(path)}")


def suffix_of(path: str) -> str:
    """Suffix of the format in lower case, ignoring a final `.gz` or `.zst`."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes[-1:] in ([".gz"], [".zst"]):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _text_of(path: str) -> str:
    """Text of a file, decompressed and without a byte order mark."""
    try:
        content = Path(path).read_bytes()
        packed = Path(path).suffix.lower()
        if packed == ".gz":
            content = gzip.decompress(content)
        elif packed == ".zst":
            content = _unpacked_zstd(content)
        return content.decode(json.detect_encoding(content)).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"cannot read {path!r}: {error}; save it as UTF-8, or name it by its format "
            f"({', '.join(sorted(_ARROW))}, .gz, .zst)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path!r}: {error}") from error


def _lines(text: str, newline: str | None) -> TextIO:
    """Lines of a text. A StringIO would take four bytes per character."""
    return io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", newline=newline)


def _unpacked_zstd(content: bytes) -> bytes:
    require_library("pyarrow", "reading *.zst", "pyarrow")
    import pyarrow

    with pyarrow.input_stream(io.BytesIO(content), compression="zstd") as stream:
        return stream.read()


def _json_rows(path: str) -> Rows:
    text = _text_of(path)
    if text.lstrip()[:1] == "[":
        return _array_rows(path, text)
    rows: Rows = []
    for number, line in enumerate(_lines(text, newline=None), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip(), object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:  # also: very long numbers, deep nesting
            what = _what_else(text) if not rows else ""
            why = str(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg.removesuffix(' at')} in column {error.colno}"
                if error.msg.startswith("Unterminated") or error.pos == len(line.rstrip()):
                    why += "; the line is cut off: write each object on one line"
                else:
                    why += f", at {line[error.pos : error.pos + 20].rstrip()!r}"
            raise DataError(f"{path}:{number}: not valid JSON: {why}{what}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {line[:40]!r}")
        rows.append((number, row))
    return rows


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields as an object. Raises ValueError for a name that occurs twice."""
    row = dict(fields)
    if len(row) < len(fields):
        names = [name for name, _ in fields]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {twice[:40]!r} twice; remove one")
    return row


def _array_rows(path: str, text: str) -> Rows:
    """Rows of one JSON array; the number of a row is its index in the array, from 1."""
    try:
        array = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise DataError(f"{path}:{line}: not a valid JSON array: {error}") from error
    for number, row in enumerate(array, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {repr(row)[:40]}")
    return list(enumerate(array, start=1))


def _what_else(text: str) -> str:
    """End of an error message: the likely format of a text whose first line is not JSONL."""
    if text.lstrip()[:1] != "{":
        return ". One JSON object per line is expected; if it is CSV, name it .csv"
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return ". The file is one JSON object; write an array of objects, or one object per line"


def _table_rows(path: str, delimiter: str) -> Rows:
    """Rows of a CSV table whose first row has the names of the columns."""
    text = _text_of(path)
    with _long_cells():
        reader = csv.reader(_lines(text, newline=""), delimiter=delimiter, strict=True)
        try:
            return list(_named(path, _numbered(reader)))
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error


def _numbered(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Pairs (first line, cells) of all rows that are not blank."""
    start = 1
    for cells in reader:
        if any(cell.strip() for cell in cells):
            yield start, cells
        start = reader.line_num + 1


def _named(path: str, cells: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, dict]]:
    line, header = next(cells, (1, []))
    names = [name.strip() for name in header]
    twice = {name for name in names if name and names.count(name) > 1}
    if twice:
        raise DataError(f"{path}:{line}: two columns are called {min(twice)!r}; rename one")
    for number, row in cells:
        if len(row) != len(names):
            raise DataError(
                f"{path}:{number}: {len(row)} cells, but the first row names {len(names)} columns; "
                "a comma or line end within a cell needs quotes around the cell"
            )
        yield number, {n: cell for n, cell in zip(names, row, strict=True) if n and cell}


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lift the csv module's limit on the length of a cell."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet_rows(path: str) -> Rows:
    require_library("pyarrow", f"reading {path!r}", "pyarrow")
    import pyarrow.parquet  # imported here because --help does not need it

    def read() -> Any:
        with pyarrow.parquet.ParquetFile(path) as file:
            return file.read()

    return _arrow_table_rows(path, "parquet", read)


def _arrow_rows(path: str) -> Rows:
    require_library("pyarrow", f"reading {path!r}", "pyarrow")
    import pyarrow.ipc

    def read() -> Any:
        with pyarrow.OSFile(path) as file:
            if file.read(6) == b"ARROW1":
                return pyarrow.ipc.open_file(file).read_all()
        with pyarrow.OSFile(path) as file:
            return pyarrow.ipc.open_stream(file).read_all()

    return _arrow_table_rows(path, "Arrow", read)


def _arrow_table_rows(path: str, what: str, read: Callable[[], Any]) -> Rows:
    import pyarrow

    try:
        table = read()
        rows = table.to_pylist(maps_as_pydicts="strict")
        for field in table.schema:
            if "arrow.json" in str(field.type):
                for row in rows:
                    row[field.name] = _with_parsed_json(row[field.name], field.type)
    except (OSError, pyarrow.ArrowException, ValueError, KeyError) as error:
        raise DataError(f"cannot read {path!r} as {what}: {error}") from error
    return list(enumerate(rows, start=1))


def _with_parsed_json(value: Any, kind: Any) -> Any:
    """Value of an Arrow column, with all parts of Arrow's JSON extension type parsed."""
    import pyarrow.types as kinds

    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if kinds.is_struct(kind):
        return {each.name: _with_parsed_json(value[each.name], each.type) for each in kind}
    if kinds.is_map(kind):
        return {name: _with_parsed_json(inner, kind.item_type) for name, inner in value.items()}
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return [_with_parsed_json(inner, kind.value_type) for inner in value]
    return value


_READERS: dict[str, Callable[[str], Rows]] = {
    ".csv": partial(_table_rows, delimiter=","),
    ".tsv": partial(_table_rows, delimiter="\t"),
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".feather": _arrow_rows,
}
_ARROW = frozenset({".parquet", ".arrow", ".feather"})
SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", *_READERS})


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the message of a DataError that leaves the block with `where` (file:row)."""
    try:
        yield
    except DataError as error:
        error.args = (f"{where}: {error}",)
        raise
