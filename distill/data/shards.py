"""Data sets of several files: the shards in a directory or of a pattern, in name order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from distill.data.row_files import SUFFIXES, Rows, read_rows, suffix_of
from distill.errors import DataError
from distill.lookup import listed

_PATTERN = re.compile(r"[*?\[]")
# Splits, as they begin the names of shards: train-00000-of-00002.parquet.
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")


def is_pattern(place: str) -> bool:
    """True if `place` is a pattern of files (`data/train-*.parquet`) and not an existing file."""
    return bool(_PATTERN.search(place)) and not Path(place).exists()


def shard_rows(place: str) -> Rows:
    """Rows of all files of a directory or a pattern, numbered consecutively.

    Raises:
        DataError: there are no such files, they are of several formats or splits, or one of them
            cannot be read.
    """
    paths = matching_files(place) if is_pattern(place) else files_within(place)
    rows = [row for path in paths for _, row in read_rows(path)]
    return list(enumerate(rows, start=1))


def matching_files(pattern: str) -> list[str]:
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


def files_within(directory: str) -> list[str]:
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
