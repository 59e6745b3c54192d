"""Sources of rows, for `prompts=` and `data=`: one source or several, each with a weight.

    SOURCE[:WEIGHT],SOURCE[:WEIGHT],...

A source is one of

    FILE                          a .jsonl, .json, .csv, .tsv, .parquet or .arrow file (row_files)
    DIR                           a data set that `datasets` saved to disk, or files of one format
    PATTERN                       all matching files, data/train-*.parquet, in name order
    OWNER/NAME[:SUBSET[:SPLIT]]   a data set of the Hugging Face hub; the default split is `train`
    package.module:function       a function that is called without arguments and returns rows
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from glob import glob
from math import gcd, lcm
from pathlib import Path

from distill.data.row_files import SUFFIXES, Rows, file_rows, require_file, suffix_of
from distill.errors import ConfigError, DataError
from distill.lookup import listed

# Largest sum of weights: sources are mixed in blocks that contain each source's exact share.
_LONGEST_BLOCK = 10_000
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*){0,2}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_PATTERN = re.compile(r"[*?\[]")
# Splits, as they begin the names of shards: train-00000-of-00002.parquet.
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")


class Kind(Enum):
    """Kind of a source."""

    FILE = auto()
    DIRECTORY = auto()
    PATTERN = auto()
    HUB = auto()
    FUNCTION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of rows.

    Attributes:
        place: the file, directory, pattern, hub data set or function.
        name: name in metrics, unique among the setting's sources.
        weight: number of the source's rows in each `sum of weights` consecutive rows.
    """

    place: str
    name: str
    weight: int = 1


def parse_sources(setting: str, value: str) -> list[Source]:
    """Sources named by the `value` of `setting`, with weights in lowest terms.

    If a file or directory of exactly that name exists, it is the only source, even if its name
    contains commas or colons.

    Raises:
        ConfigError: an empty or repeated source, or an invalid weight.
    """
    parts = [value] if Path(value).exists() else value.split(",")
    if not all(part.strip() for part in parts):
        raise ConfigError(
            f"{setting}={value}: a source is empty; give files, directories, data sets of the hub "
            "or module:function, separated by commas"
        )
    weighted = [_weighted(setting, part.strip()) for part in parts]
    places = [place for place, _ in weighted]
    if repeated := [place for place, count in Counter(places).items() if count > 1]:
        raise ConfigError(f"{setting}={value} has {repeated[0]} twice; give it a larger weight")
    weights = _whole(setting, value, [weight for _, weight in weighted])
    return [
        Source(place=place, name=name, weight=weight)
        for place, name, weight in zip(places, _names(places), weights, strict=True)
    ]


def kind_of(place: str) -> Kind:
    """Kind of the source `place`, by the file or directory there, or else by its spelling."""
    path = Path(place)
    if path.is_dir():
        return Kind.DIRECTORY
    if _is_pattern(place):
        return Kind.PATTERN
    if path.exists() or suffix_of(place) in SUFFIXES:
        return Kind.FILE
    if _FUNCTION.fullmatch(place):
        return Kind.FUNCTION
    return Kind.HUB if _HUB.fullmatch(place) else Kind.FILE


def require_source(place: str) -> None:
    """Raise DataError if `place` is a file, directory or pattern without files.

    Data sets of the hub and functions are checked when they are read.
    """
    kind = kind_of(place)
    if kind is Kind.FILE:
        require_file(place)
    elif kind is Kind.PATTERN:
        _matching_files(place)
    elif kind is Kind.DIRECTORY and not is_saved(place):
        _files_within(place)


def _is_pattern(place: str) -> bool:
    """True if `place` is a pattern of files (`data/train-*.parquet`) and not an existing file."""
    return bool(_PATTERN.search(place)) and not Path(place).exists()


def shard_rows(place: str) -> Rows:
    """Rows of all files of a directory or a pattern, numbered consecutively.

    Raises:
        DataError: there are no such files, they are of several formats or splits, one of them
            cannot be read, or none has rows.
    """
    paths = _matching_files(place) if _is_pattern(place) else _files_within(place)
    rows = [row for path in paths for _, row in file_rows(path)]
    if not rows:
        raise DataError(f"no file of {place} has rows")
    return list(enumerate(rows, start=1))


def _matching_files(pattern: str) -> list[str]:
    """Files that match the pattern, in name order. Raises DataError if there are none."""
    paths = sorted(path for path in glob(pattern, recursive=True) if Path(path).is_file())
    if not paths:
        raise DataError(f"cannot read {pattern!r}: no file matches the pattern")
    return paths


def is_saved(directory: str) -> bool:
    """True if `datasets` saved a data set to the directory.

    Raises:
        DataError: the directory has several saved splits, or cannot be listed.
    """
    try:
        names = {entry.name for entry in Path(directory).iterdir()}
    except OSError as error:
        raise DataError(f"cannot read {directory!r}: {error}") from error
    if "dataset_dict.json" in names:
        splits = sorted(each.parent.name for each in Path(directory).glob("*/state.json"))
        raise DataError(
            f"cannot read {directory!r}: it has the splits {', '.join(splits)}; give one of "
            f"them, for example {Path(directory) / (splits or ['train'])[0]}"
        )
    return "state.json" in names


def _files_within(directory: str) -> list[str]:
    """Files of rows in the directory, in name order.

    Raises:
        DataError: there are no such files, or they are of several formats or splits.
    """
    files = sorted(path for path in Path(directory).iterdir() if _is_shard(path))
    formats = sorted({suffix_of(path.name) for path in files})
    if len(formats) > 1 and ".json" in formats:  # such as dataset_infos.json next to the shards
        formats.remove(".json")
        files = [path for path in files if suffix_of(path.name) != ".json"]
    if not files:
        below = sorted({str(path.parent) for path in Path(directory).rglob("*") if _is_shard(path)})
        remedy = f"give one of {listed(below)}" if below else "give a file"
        raise DataError(
            f"cannot read {directory!r}: it is not a data set that `datasets` saved to disk, and "
            f"has no files of rows; {remedy}"
        )
    if len(formats) > 1:
        raise _ambiguous(directory, "formats", formats, f"*{formats[0]}")
    splits = sorted({found[1] if (found := _SPLIT.match(path.name)) else "" for path in files})
    if len(splits) > 1:
        first = next(split for split in splits if split)
        raise _ambiguous(directory, "splits", splits, f"{first}*{formats[0]}")
    return [str(path) for path in files]


def _is_shard(path: Path) -> bool:
    if path.name.startswith((".", "_")) or not path.is_file():
        return False
    return suffix_of(path.name) in SUFFIXES


def _ambiguous(directory: str, what: str, found: Sequence[str], pattern: str) -> DataError:
    named = ", ".join(each or "files of no split" for each in found)
    return DataError(
        f"cannot read {directory!r}: its files are of several {what} ({named}); give a pattern, "
        f"for example {Path(directory) / pattern}"
    )


def _weighted(setting: str, part: str) -> tuple[str, Fraction]:
    """A source's place and its weight, 1 by default."""
    place, colon, last = part.rpartition(":")
    if not colon or Path(part).exists():
        return part, Fraction(1)
    if _NUMBER.fullmatch(last):
        weight = Fraction(last)
        if weight <= 0:
            raise ConfigError(
                f"{setting}: weight {last} of {place} must be above 0; or leave it out",
                field=setting,
            )
        return place, weight
    if Path(place).exists() or suffix_of(place) in SUFFIXES:
        raise ConfigError(
            f"{setting}: weight {last!r} of {place} is not a number; write {place}:3", field=setting
        )
    return part, Fraction(1)


def _whole(setting: str, value: str, weights: Sequence[Fraction]) -> list[int]:
    """Weights as the smallest whole numbers with the same ratios."""
    scale = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = gcd(*whole)
    whole = [weight // common for weight in whole]
    if sum(whole) > _LONGEST_BLOCK:
        raise ConfigError(
            f"{setting}={value}: the weights are {':'.join(map(str, whole))} as whole numbers, "
            f"and their sum exceeds {_LONGEST_BLOCK}; give rounder weights"
        )
    return whole


def _names(places: Sequence[str]) -> list[str]:
    """Name of each place: its last part without suffix, or the whole place if names would clash."""
    short = [_short_name(place) for place in places]
    counts = Counter(short)
    return [name if counts[name] == 1 else place for name, place in zip(short, places, strict=True)]


def _short_name(place: str) -> str:
    if kind_of(place) is Kind.FUNCTION:
        return place.partition(":")[2]
    name = Path(place).name
    if kind_of(place) is Kind.HUB:
        return name.partition(":")[0]
    if kind_of(place) is Kind.PATTERN:
        return re.sub(r"\W*[*?\[].*", "", name) or Path(place).parent.name
    return Path(re.sub(r"\.(gz|zst)$", "", name)).stem
