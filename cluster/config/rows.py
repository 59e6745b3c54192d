"""Settings that name sources of rows: how they are read, and what they held."""

from __future__ import annotations

from collections.abc import Mapping

from distill.data.row_reader import RowReader
from distill.data.sources import Source, parse_sources
from distill.errors import ConfigError

# What is in them must stay over a run's life; they may move.
ROWS = ("prompts", "eval_prompts", "sft_data", "data", "validation")


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


def digests_of(config: object, readers: Mapping[str, RowReader]) -> dict[str, str]:
    """SHA-256 of the rows that each setting of `ROWS` names, by the reader that has read them."""
    found = {}
    for name in ROWS:
        value = getattr(config, name, None)
        if value is not None and (reader := readers.get(name)) is not None:
            digest = reader.digest(parse_sources(name, value))
            if digest is not None:
                found[name] = digest
    return found
