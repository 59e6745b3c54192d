"""Reader of the rows of any source, and their digest, which a resumed run compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.data.columns import Columns, has_column
from distill.data.normal_rows import normal_row
from distill.data.row_files import Rows, read_rows
from distill.data.sources import Kind, Source, is_saved, kind_of, shard_rows
from distill.errors import ConfigError, DataError, IsothermError, described
from distill.libraries import require_library
from distill.lookup import resolve_function


class RowReader:
    """Reader of a run's sources. Each is read once, so the digest covers the rows that are trained.

    Args:
        columns: columns that are renamed in every source.
    """

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns or Columns()
        self._raw: dict[str, Rows] = {}
        self._seen: set[str] = set()

    def __call__(self, place: str) -> Rows:
        """Read all rows of the source at `place`, as pairs (number from 1, object).

        Raises:
            ConfigError, DataError: the source cannot be read, or has an item that is not a row.
        """
        rows = self._read(place)
        self._seen.update(*(row for _, row in rows))
        self._seen.update(
            column
            for column in self._columns.wanted().values()
            if any(has_column(row, column) for _, row in rows)
        )
        return self._columns.as_fields(rows, place)

    def require_columns(self) -> None:
        """Raise ConfigError if the settings name a column that no source read so far has."""
        for setting, column in self._columns.wanted().items():
            if column not in self._seen:
                there = ", ".join(sorted(self._seen)) or "none, because no rows were read"
                raise ConfigError(
                    f"{setting} changes nothing: no row has a column {column!r}; columns: {there}",
                    field=setting.partition("=")[0],
                )

    def digest(self, sources: Sequence[Source]) -> str | None:
        """SHA-256 of the sources and their weights: of a file's bytes, of other sources' rows.

        None if a source is not a file and was not read by this reader, because an environment reads
        it itself.

        Raises:
            DataError: a file cannot be read.
        """
        digests = [self._digest(source.place) for source in sources]
        if None in digests or len(digests) == 1:
            return None if None in digests else digests[0]
        weighted = zip(digests, sources, strict=True)
        lines = "".join(f"{digest} {source.weight}\n" for digest, source in weighted)
        return hashlib.sha256(lines.encode()).hexdigest()

    def _read(self, place: str) -> Rows:
        if place not in self._raw:
            self._raw[place] = _READERS[kind_of(place)](place)
        return self._raw[place]

    def _digest(self, place: str) -> str | None:
        if kind_of(place) is Kind.FILE:
            try:
                with Path(place).open("rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DataError(f"cannot read {place!r}: {error}") from error
        if place not in self._raw:
            return None
        hashed = hashlib.sha256()
        for _, row in self._raw[place]:
            hashed.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        return hashed.hexdigest()


def _directory_rows(path: str) -> Rows:
    if not is_saved(path):
        return shard_rows(path)
    library = _datasets(path)
    return _table_rows(path, lambda: library.load_from_disk(path))


def _hub_rows(place: str) -> Rows:
    """Rows of OWNER/NAME[:SUBSET[:SPLIT]]."""
    name, _, rest = place.partition(":")
    subset, _, split = rest.partition(":")
    library = _datasets(place)
    return _table_rows(
        place, lambda: library.load_dataset(name, subset or None, split=split or "train")
    )


def _datasets(place: str) -> Any:
    what = f"{place!r}, which is not a file but a data set of the hub or one saved to disk"
    require_library("datasets", what, "isotherm[data]")
    import datasets

    return datasets


def _table_rows(place: str, load: Callable[[], Iterable[Mapping[str, Any]]]) -> Rows:
    """Rows of a data set of the library `datasets`, normalised like those of a parquet file."""
    try:
        rows = [normal_row(row, from_arrow=True) for row in load()]
    except Exception as error:  # the library and its readers raise many types of errors
        line = " ".join(str(error).split())
        raise DataError(
            f"cannot read {place!r}: {type(error).__name__}: {line}. OWNER/NAME[:SUBSET[:SPLIT]] "
            "is a data set of the hub, DIR one on disk"
        ) from error
    return _some(place, rows)


def _function_rows(place: str) -> Rows:
    """Rows that a user's function returns."""
    function = resolve_function("source", place, ())
    try:
        rows = list(function())
    except IsothermError:
        raise
    except Exception as error:  # user code may raise anything
        raise DataError(
            f"{place} failed: {described(error)}; it is called without arguments and must return "
            "rows"
        ) from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise DataError(f"{place}:{number}: expected a dictionary, got {repr(row)[:40]}")
    return _some(place, [normal_row(row) for row in rows])


def _some(place: str, rows: Sequence[dict[str, Any]]) -> Rows:
    if not rows:
        raise DataError(f"{place} has no rows")
    return list(enumerate(rows, start=1))


_READERS: dict[Kind, Callable[[str], Rows]] = {
    Kind.FILE: read_rows,
    Kind.DIRECTORY: _directory_rows,
    Kind.PATTERN: shard_rows,
    Kind.HUB: _hub_rows,
    Kind.FUNCTION: _function_rows,
}
