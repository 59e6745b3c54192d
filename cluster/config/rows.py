"""Settings that name sources of rows: how they are read, and what they held."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from distill.data.columns import Columns
from distill.data.row_reader import RowReader
from distill.data.sources import Source, parse_sources
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.rules import get
from distill.settings import flagged, values_of

# Flag of fields that name sources of rows. What is in them must stay over a run's life; they may
# move.
ROWS: Final[dict[str, Any]] = {"path": "rows"}


def unweighted_sources(setting: str, value: str) -> list[Source]:
    """The sources of a setting whose rows are each taken once.

    Raises:
        ConfigError: see `parse_sources`; or one has a weight.
    """
    sources = parse_sources(setting, value)
    if any(source.weight != 1 for source in sources):
        raise ConfigError(
            f"{setting}={value}: weights change nothing, for each row is taken once; leave them out"
        )
    return sources


def reader_of(columns: type[Columns], config: Any, fields: Collection[str] | None) -> RowReader:
    """A reader of rows that uses the column names of the run's settings.

    Raises:
        ConfigError: a column is to be read as a field that is none of `fields`; None: any is one.
    """
    for field, column in config.columns.items():
        if fields is not None and field not in fields:
            raise ConfigError(
                f"columns.{field}={column}: no such field is read; {known_names(field, fields)}",
                field=f"columns.{field}",
                value=column,
            )
    return RowReader(columns(**values_of(columns, config)))


def digests_of(config: object, readers: Mapping[str, RowReader]) -> dict[str, str]:
    """SHA-256 of the rows that each setting flagged `ROWS` names, by the reader that read them."""
    found = {}
    for name in flagged(type(config), ROWS):
        value = get(config, name)
        if value is not None and (reader := readers.get(name)) is not None:
            digest = reader.digest(parse_sources(name, value))
            if digest is not None:
                found[name] = digest
    return found
