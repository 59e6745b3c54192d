"""Columns of any name are read as fields; a misspelt field is noticed, any other is left alone."""

from __future__ import annotations

import pytest

from distill.data.columns import (
    Columns,
    PromptColumns,
    refuse_misspelt,
)
from distill.data.prompts import FIELDS
from distill.errors import DataError
from tests.refusals import refuses

GSM8K = {"question": "Natalia sold 48 clips. How many?", "answer": "48/2 = 24\n#### 72"}


def mapped(columns: Columns, *rows: dict) -> list[dict]:
    return [row for _, row in columns.as_fields(list(enumerate(rows, 1)), "file")]


def test_gsm8k_as_it_comes() -> None:
    columns = PromptColumns(columns={"prompt": "question"}, answer_pattern="#### (.+)")
    assert mapped(columns, GSM8K) == [{"prompt": GSM8K["question"], "answer": "72"}]


def test_columns_are_read_as_fields_and_others_stay() -> None:
    columns = PromptColumns(columns={"prompt": "question", "answer": "solution"})
    row = {"question": "a", "solution": 4, "answer": "long", "prompt": "raw", "level": 3}
    assert mapped(columns, row) == [{"prompt": "a", "answer": 4, "level": 3}]


def test_a_chat_in_the_prompt_s_column_is_messages() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert mapped(PromptColumns(columns={"prompt": "prompt"}), {"prompt": chat}) == [
        {"messages": chat}
    ]


def test_a_row_that_lacks_an_optional_column_has_no_such_field() -> None:
    columns = PromptColumns(columns={"prompt": "q", "answer": "a"})
    rows = mapped(columns, {"q": "x", "a": "1"}, {"q": "y"})
    assert rows == [{"prompt": "x", "answer": "1"}, {"prompt": "y"}]


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (PromptColumns(columns={"prompt": "questoin"}), "columns.prompt"),
        (
            PromptColumns(answer_pattern="=> (.+)"),
            "answer_pattern",
        ),
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


def test_completions_and_pairs() -> None:
    columns = Columns(columns={"prompt": "question", "completion": "answer"})
    assert mapped(columns, GSM8K) == [{"prompt": GSM8K["question"], "completion": GSM8K["answer"]}]
    pairs = Columns(columns={"prompt": "q", "chosen": "good", "rejected": "bad"})
    row = {"q": "1", "good": "2", "bad": "3"}
    assert mapped(pairs, row) == [{"prompt": "1", "chosen": "2", "rejected": "3"}]


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
def test_other_columns_are_left_alone(name: str) -> None:
    refuse_misspelt({"prompt": "a", "answer": "b", name: "c"}, FIELDS)
