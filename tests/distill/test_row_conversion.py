"""Rows that are too long are refused in one error, or dropped."""

import logging
from collections.abc import Callable

import pytest

from distill.data.row_conversion import LongRows, TooLong
from distill.errors import DataError
from tests.refusals import refuses

LENGTHS = [3, 9, 1, 12, 8]
ROWS = [(2 * number, length) for number, length in enumerate(LENGTHS, 1)]


def fitting(_number: int, length: int) -> int:
    if length > 8:
        raise TooLong(f"{length} tokens", length=length, field="data.max_length")
    return length


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_that_are_too_long_are_one_error(threads: int) -> None:
    with refuses(TooLong, "data.max_length", names="a.jsonl:8: 12 tokens") as caught:
        LongRows().converted("a.jsonl", ROWS, fitting, threads=threads)
    assert "2 of 5" in str(caught.value)


@pytest.mark.parametrize("threads", [1, 4])
def test_rows_that_are_too_long_are_dropped_with_one_warning(
    threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    long = LongRows(drop=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # training and evaluation may read the same source
            made = long.converted("a.jsonl", ROWS, fitting, threads=threads)
            assert made == [3, 1, 8]
    [record] = caplog.records
    assert "2 of 5" in record.getMessage() and "a.jsonl" in record.getMessage()
    assert long.dropped == {"a.jsonl": {4, 8}}


def test_a_source_of_long_rows_alone_is_refused() -> None:
    with refuses(TooLong, "data.max_length"):
        LongRows(drop=True).converted("a.jsonl", ROWS[1:2], fitting)


def test_many_rows_stay_in_order() -> None:
    numbers = range(1, 9999)
    made = LongRows().converted("a.jsonl", ((n, n % 7) for n in numbers), lambda n, row: (n, row))
    assert made == [(n, n % 7) for n in numbers]


def _refused(number: int) -> Callable[[int, int], int]:
    def convert(given: int, length: int) -> int:
        if given == number:
            raise DataError("`prompt` is blank", field="prompt")
        return fitting(given, length)

    return convert


def test_another_fault_is_named_also_after_long_rows() -> None:
    for drop in (False, True):
        with refuses(DataError, "prompt", names="a.jsonl:10: `prompt`"):
            LongRows(drop=drop).converted("a.jsonl", ROWS, _refused(10))


def test_the_digest_changes_with_the_dropped_rows() -> None:
    def digest(rows: list[tuple[int, int]]) -> str:
        long = LongRows(drop=True)
        long.converted("a.jsonl", rows, fitting)
        return long.digest(["a.jsonl", "b.jsonl"])

    assert digest(ROWS[:1]) == ""
    assert "2 rows" in digest(ROWS)
    assert len({digest(ROWS), digest(ROWS[:2]), digest([*ROWS[:3], (11, 9)])}) == 3
