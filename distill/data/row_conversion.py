"""Conversion of all rows of a source, in which rows that are too long are one error, or dropped."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import TypeVar

from tqdm import tqdm

from distill.data.row_files import located
from distill.errors import DataError

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
Converted = TypeVar("Converted")
# Threads that convert rows, and rows that they are given at once. Tokenizers leave the interpreter
# free while they encode; the rest of a conversion runs in one thread at a time, so more threads
# than these add nothing.
_THREADS, _AT_ONCE = min(8, os.cpu_count() or 1), 4096


class TooLong(DataError):
    """A row with more tokens than a model has room for; `length` is its number of tokens."""

    def __init__(self, message: str, *, length: int = 0, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.length = length


@dataclass(frozen=True, slots=True)
class _Refused:
    """A row that is too long."""

    number: int
    error: TooLong


def _progress(place: str, total: int) -> tqdm:
    """Progress bar on standard error; it appears after 2 s, and seldom changes in a log."""
    return tqdm(
        desc=f"checking {place}",
        total=total,
        unit=" rows",
        delay=2,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        leave=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRows:
    """Treatment of rows that are too long: all are refused in one error, or dropped.

    Attributes:
        drop: True: drop them, with a warning that says how many.
        dropped: numbers of the dropped rows, by source.
    """

    drop: bool = False
    dropped: dict[str, set[int]] = field(default_factory=dict)

    def converted(
        self,
        place: str,
        rows: Sequence[tuple[int, Row]],
        convert: Callable[[int, Row], Converted],
        *,
        threads: int = _THREADS,
    ) -> list[Converted]:
        """Results of `convert(number, row)` for the rows of a source, in order.

        Args:
            rows: pairs (number, row).
            convert: raises TooLong for a row that is too long.
            threads: number of threads that call `convert`.

        Raises:
            DataError: a row is wrong; the message names the source, the row and the fault.
            TooLong: rows are too long, and they are not dropped or no other rows are left.
        """

        def one(numbered: tuple[int, Row]) -> Converted | _Refused:
            number, row = numbered
            try:
                with located(f"{place}:{number}"):
                    return convert(number, row)
            except TooLong as error:
                return _Refused(number, error.with_traceback(None))

        # The first row alone: it fills caches.
        batches = [rows[:1], *(rows[i : i + _AT_ONCE] for i in range(1, len(rows), _AT_ONCE))]
        made: list[Converted] = []
        refused: list[_Refused] = []
        with ThreadPoolExecutor(threads) as pool, _progress(place, len(rows)) as bar:
            for result in chain.from_iterable(pool.map(one, batch) for batch in batches):
                bar.update()
                if isinstance(result, _Refused):
                    refused.append(result)
                else:
                    made.append(result)
        if refused:
            self._settle(place, refused, len(made) + len(refused))
        return made

    def digest(self, places: Sequence[str]) -> str:
        """Text about the dropped rows of these sources that changes with them; empty for none."""
        dropped = [sorted(self.dropped.get(place, ())) for place in places]
        if not any(dropped):
            return ""
        hashed = blake2b(repr(dropped).encode(), digest_size=8).hexdigest()
        return f", without {sum(map(len, dropped)):,} rows that are too long ({hashed})"

    def _settle(self, place: str, refused: Sequence[_Refused], total: int) -> None:
        """Raise the error for the rows that are too long, or record that they are dropped."""
        longest = max(refused, key=lambda each: each.error.length)
        count = f"{len(refused):,} of {total:,} rows"
        if not self.drop or len(refused) == total:
            remedy = "" if self.drop else ", or leave such rows out with drop_too_long=True"
            raise TooLong(
                f"{count} are too long; the longest: {longest.error}{remedy}",
                length=longest.error.length,
                field=longest.error.field,
            )
        before = self.dropped.setdefault(place, set())
        numbers = {each.number for each in refused}
        if not numbers <= before:
            logger.warning(
                "dropped %s of %s, which are too long; the longest: %s", count, place, longest.error
            )
        before |= numbers
