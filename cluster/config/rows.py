"""Settings that name sources of rows: columns, readers, and digests of the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Final

import chz

from distill.data.columns import Columns, PromptColumns
from distill.data.row_conversion import LongRows
from distill.data.row_reader import RowReader
from distill.data.sources import Source, parse_sources
from distill.envs.base import EnvConfig
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.rules import IN_MEMORY, above, at_least, get, needs, setting
from distill.settings import ESSENTIAL, Section, flagged

# Metadata of fields that name sources of rows. The contents must not change while a run is resumed;
# the files may move.
ROWS: Final[dict[str, Any]] = {"path": "rows"}
# A check of a row's fields, which raises DataError.
RowCheck = Callable[[Mapping[str, Any]], object]


@chz.chz
class LongRowSettings:
    """Treatment of rows that are too long."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "data."

    drop_too_long: bool = chz.field(
        default=False,
        doc="leave out rows of all sources that are too long: rows longer than max_length (sft, "
        "dpo, reward_model) or the models' contexts, and prompts that leave no room for "
        "max_new_tokens. By default they are an error that says how many they are. config.json "
        "records how many were left out",
    )

    def long_rows(self) -> LongRows:
        return LongRows(drop=self.drop_too_long)


@chz.chz
class PromptSettings(PromptColumns, LongRowSettings):
    """Sources of prompts, and their columns."""

    within: ClassVar[str] = "data."
    main: ClassVar[str] = "source"

    source: str | None = chz.field(
        default=None,
        doc="prompts: a JSONL, JSON, CSV, parquet or Arrow file, saved or hub data set, or "
        "module:function; several with weights: a.jsonl:3,b.parquet:1. Each row has `prompt` "
        "(string) or `messages` (chat), optionally `answer` and more (docs/data.md). Environments "
        "that make their own problems take none",
        metadata=ESSENTIAL | ROWS,
    )

    def row_reader(self, env: EnvConfig) -> tuple[RowReader, RowCheck]:
        """Reader of the rows, and check of a row's fields."""
        return reader_of(self, env.row_fields), env.check_row

    def check(self, env: EnvConfig) -> None:
        """Raise ConfigError for prompts that the environment does not read, or that are missing."""
        for field in ("source", *chz.chz_fields(PromptColumns)):
            check_read(f"data.{field}", getattr(self, field), env)
        if self.source is not None:
            parse_sources("data.source", self.source)
        elif env.reads_prompts:
            raise ConfigError(
                f"env={type(env).__name__} reads a file of prompts; give prompts=FILE.jsonl",
                field="data.source",
            )


@chz.chz
class StepPromptSettings(PromptSettings):
    """Sources of a run's prompts, their columns, and prompts per step."""

    batch_size: int = setting(
        at_least(1),
        IN_MEMORY,
        default=32,
        doc="prompts (groups) per optimizer step",
        metadata=ESSENTIAL,
    )


@chz.chz
class SftMixSettings:
    """Supervised rows that updates train on in addition to rollouts."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "sft."

    data: str | None = chz.field(
        default=None,
        doc="supervised rows, in the format of recipe=sft, that every update trains on too",
        metadata=ROWS,
    )
    coef: float | None = setting(
        needs("sft.data"),
        above(0, "leave sft.data out to train on rollouts alone"),
        default=None,
        doc="weight of the cross-entropy of sft.data, of which an update has 8 rows; default: 0.1",
    )

    @chz.validate
    def _sources_are_readable(self) -> None:
        if self.data is not None:
            parse_sources("sft.data", self.data)


@chz.chz
class RowSettings(Columns, LongRowSettings):
    """Sources of a run's rows, their columns, and rows per step."""

    within: ClassVar[str] = "data."
    main: ClassVar[str] = "source"

    source: str = chz.field(
        doc="sources of rows, in the format of prompts= (docs/data.md), with weights if several. "
        "sft: each row has `prompt` and `completion` (EOS is appended), `messages` (chat; every "
        "assistant turn is trained), or `tokens` and `loss_mask` (token ids, as "
        "cluster.rollouts_to_sft writes them). dpo, reward_model: each has `chosen` and "
        "`rejected`, and `prompt` (string) or `messages` (chat) before them, or whole "
        "conversations in both",
        metadata=ESSENTIAL | ROWS,
    )
    batch_size: int = setting(
        at_least(1),
        IN_MEMORY,
        default=32,
        doc="rows (pairs, for dpo and reward_model) per optimizer step",
        metadata=ESSENTIAL,
    )
    max_length: int | None = setting(
        at_least(2), default=None, doc="longest row, in tokens; default: the model's context"
    )

    @chz.validate
    def _sources_are_readable(self) -> None:
        parse_sources("data.source", self.source)


def check_read(setting: str, value: object, env: EnvConfig) -> None:
    """Raise ConfigError for a setting of a file of problems, if the environment reads no file."""
    if value and not env.reads_prompts:
        raise ConfigError(
            f"{setting}={value} changes nothing: env={type(env).__name__} does not read a file; "
            "leave it out",
            value=value,
        )


def unweighted_sources(setting: str, value: str) -> list[Source]:
    """Sources of a setting of which each row is used once, so weights are not allowed.

    Raises:
        ConfigError: a source has a weight, or as `parse_sources`.
    """
    sources = parse_sources(setting, value)
    if any(source.weight != 1 for source in sources):
        raise ConfigError(
            f"{setting}={value}: weights change nothing, because each row is used once; leave them "
            "out"
        )
    return sources


def by_source(metrics: Iterable[str], rows: str | None) -> list[str]:
    """Names of the same metrics of each source of held-out rows, if there are several sources."""
    sources = parse_sources("eval.source", rows) if rows else []
    if len(sources) < 2:
        return []
    return [f"{metric}/source={source.name}" for metric in metrics for source in sources]


def reader_of(columns: Columns, fields: Collection[str] | None) -> RowReader:
    """Reader of rows with the given names of columns.

    Args:
        fields: allowed fields; None: any.

    Raises:
        ConfigError: a column is mapped to another field.
    """
    for field, column in columns.columns.items():
        if fields is not None and field not in fields:
            raise ConfigError(
                f"columns.{field}={column}: no such field is read; {known_names(field, fields)}",
                value=column,
            )
    return RowReader(columns)


def digests_of(config: object, readers: Mapping[str, RowReader], long: LongRows) -> dict[str, str]:
    """SHA-256 of the rows of each setting with the metadata `ROWS`, from the readers by setting.

    Args:
        long: the rows that were dropped, which the digests then name.
    """
    found = {}
    for name in flagged(type(config), ROWS):
        value = get(config, name)
        if value is not None and (reader := readers.get(name)) is not None:
            sources = parse_sources(name, value)
            digest = reader.digest(sources)
            if digest is not None:
                found[name] = digest + long.digest([source.place for source in sources])
    return found
