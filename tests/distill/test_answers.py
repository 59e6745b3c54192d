"""Answers of rows keep their meaning, and are checked before a run."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.data.answers import answer_text
from distill.data.prompts import PromptContext, load_prompts
from distill.errors import DataError
from distill.rewards.registry import (
    check_answers,
    json_schema,
    last_number,
    load_reward,
    matches,
    math_equal,
    unit_tests,
)
from tests.refusals import refuses
from tests.rows import write_rows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (-0.0, "0"),
        (0.00001, "0.00001"),
        (1e16, "10000000000000000"),
        (3.2e8, "320000000"),
        (2**70, str(2**70)),
        (np.float64(18.5), "18.5"),
        (np.float32(0.1), "0.1"),
        (np.int64(-7), "-7"),
        (Decimal("18.50"), "18.5"),
        (Decimal("1E+3"), "1000"),
        ("1e-05", "1e-05"),
        (" 72.0 ", " 72.0 "),
        (None, None),
    ],
)
def test_numbers_are_written_in_plain_decimals(value: object, text: str | None) -> None:
    assert answer_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_a_number_keeps_its_value_and_is_read_by_last_number(value: float | int) -> None:
    text = answer_text(value)
    assert text is not None and "e" not in text.lower()
    assert type(value)(text) == value
    assert last_number(f"It is {text}.", text) == 1.0


@pytest.mark.parametrize(
    "value",
    ["", "  \n", float("nan"), float("inf"), Decimal("NaN"), True, np.bool_(True), [72], {"a": 1}],
)
def test_invalid_answers_are_refused(value: object) -> None:
    with refuses(DataError, "answer"):
        answer_text(value)


def test_an_answer_that_is_refused_is_named_by_file_and_row(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": 72.0}\n{"prompt": "a", "answer": ""}\n')
    context = PromptContext(
        tokenizer=tokenizer, vocab_size=999, context_length=99, max_new_tokens=1
    )
    with refuses(DataError, "answer", names="prompts.jsonl:2:"):
        load_prompts(str(path), context)


@pytest.mark.parametrize(
    ("reward", "good", "bad"),
    [
        (last_number, "#### 18", "eighteen"),
        (math_equal, r"\frac12", "$ $"),
        (unit_tests, "assert f(1) == 2", "assert f(1) =="),
        (unit_tests, "assert f(1) == 2", "# none"),
        (matches, r"\d+", "("),
        (json_schema, '{"type": "object"}', "{"),
    ],
)
def test_a_reward_reads_its_answers_before_the_run(reward, good: str, bad: str) -> None:
    check_answers(reward, [("rows:1", good), ("rows:2", None)])
    with refuses(DataError, "answer", names="rows:2:"):
        check_answers(reward, [("rows:1", good), ("rows:2", bad), ("rows:3", bad)])


def test_thousands_of_equal_answers_are_read_once(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "counting_reward.py").write_text(
        "read = []\n"
        "def reward(response, answer):\n    return 0.0\n"
        "def check(answer):\n"
        "    read.append(answer)\n"
        "    if answer == 'bad':\n        raise ValueError('it is bad')\n"
        "reward.check_answer = check\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("counting_reward:reward")
    check_answers(reward, [(f"rows:{i}", "good") for i in range(5000)])
    with refuses(DataError, "reward", names="rows:7:"):
        check_answers(reward, [("rows:7", "bad")])
    import counting_reward  # pyright: ignore[reportMissingImports] - written above

    assert counting_reward.read == ["good", "bad"]


@pytest.mark.usefixtures("hub_cache")
def test_sampling_for_sft_reads_answers_first(tmp_path: Path, capfd) -> None:
    from cluster.sample_to_sft import main

    path = write_rows(tmp_path / "prompts.jsonl", {"prompt": "a", "answer": "eighteen"})
    arguments = [f"prompts={path}", f"data={tmp_path / 'data.jsonl'}", "model=a/b"]
    assert main([*arguments, "reward=last_number", "temperature=1", "max_new_tokens=4"]) == 2
    assert "prompts.jsonl:1" in "".join("".join(capfd.readouterr()).split())
