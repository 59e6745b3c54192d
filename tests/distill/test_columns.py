"""Columns of any name are read as fields; misspelt fields are refused, others ignored."""

import pytest

from distill.data.columns import Columns, PromptColumns, refuse_misspelt
from distill.data.prompts import FIELDS
from distill.errors import DataError
from tests.refusals import refuses

GSM8K = {"question": "Natalia sold 48 clips. How many?", "answer": "48/2 = 24\n#### 72"}


def mapped(columns: Columns, *rows: dict) -> list[dict]:
    return [row for _, row in columns.as_fields(list(enumerate(rows, 1)), "file")]


CHAT = [{"role": "user", "content": "hi"}]
PAIRS = Columns(columns={"prompt": "q", "chosen": "good", "rejected": "bad"})


@pytest.mark.parametrize(
    ("columns", "rows", "fields"),
    [
        (
            PromptColumns(columns={"prompt": "question", "answer": "solution"}),
            [{"question": "a", "solution": 4, "answer": "long", "prompt": "raw", "level": 3}],
            [{"prompt": "a", "answer": 4, "level": 3}],
        ),
        (PromptColumns(columns={"prompt": "prompt"}), [{"prompt": CHAT}], [{"messages": CHAT}]),
        (
            PromptColumns(columns={"prompt": "q", "answer": "a"}),
            [{"q": "x", "a": "1"}, {"q": "y"}],
            [{"prompt": "x", "answer": "1"}, {"prompt": "y"}],
        ),
        (
            PAIRS,
            [{"q": "1", "good": "2", "bad": "3"}],
            [{"prompt": "1", "chosen": "2", "rejected": "3"}],
        ),
    ],
    ids=["others stay", "a chat", "an optional column", "pairs"],
)
def test_columns_are_read_as_fields(columns: Columns, rows: list, fields: list) -> None:
    assert mapped(columns, *rows) == fields


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (PromptColumns(columns={"prompt": "questoin"}), "columns.prompt"),
        (PromptColumns(answer_pattern="=> (.+)"), "answer_pattern"),
        (Columns(columns={"completion": "reply"}), "columns.completion"),
        (Columns(columns={"chosen": "good"}), "columns.chosen"),
        (Columns(columns={"rejected": "bad"}), "columns.rejected"),
    ],
)
def test_a_column_that_is_not_there_is_named(columns: Columns, field: str) -> None:
    with refuses(DataError, field):
        mapped(columns, GSM8K)


def test_an_answer_key_that_no_row_has_is_named() -> None:
    with refuses(DataError, "columns.answer"):
        mapped(PromptColumns(columns={"answer": "anwser"}), {"prompt": "a"})


@pytest.mark.parametrize(
    ("pattern", "answer", "found"),
    [
        ("#### (.+)", "#### 1,234 \n", "1,234"),
        (r"\\boxed\{(.*?)\}", r"\boxed{1} so \boxed{2}", "2"),
        (r"\d+$", "of 3, 14", "14"),
        (r"(\d+)|none", 17, "17"),
    ],
)
def test_the_last_match_or_its_first_group(pattern: str, answer: object, found: str) -> None:
    columns = PromptColumns(answer_pattern=pattern)
    assert mapped(columns, {"prompt": "a", "answer": answer}) == [{"prompt": "a", "answer": found}]
    assert mapped(columns, {"prompt": "a"}) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("slip", "beside"),
    [
        *((slip, {"prompt": "a"}) for slip in ("anwser", "Answer", "teacher_promt", "bonusses")),
        *((slip, {}) for slip in ("promt", "Prompt", "mesages")),
    ],
)
def test_a_misspelt_field_is_noticed(slip: str, beside: dict[str, str]) -> None:
    with refuses(DataError, slip):
        refuse_misspelt(beside | {slip: "b"}, FIELDS)


@pytest.mark.parametrize(
    "name",
    ["id", "level", "tags", "lag", "prompt_id", "answer_type", "message", "promt", "question", ""],
)
def test_other_columns_are_ignored(name: str) -> None:
    refuse_misspelt({"prompt": "a", "answer": "b", name: "c"}, FIELDS)
