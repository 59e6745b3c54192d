"""The demo's task: right sums, disjoint held-out problems, and a tokenizer from disk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.demos.arithmetic import (
    ANSWER_TOKENS,
    Problem,
    Problems,
    train_tokenizer,
    write_prompts,
    write_sft,
    write_sft_with_errors,
)
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import PromptContext, load_prompts
from distill.data.row_files import read_rows
from distill.data.sft_rows import load_sft_rows
from distill.tokenizer import load_tokenizer

PROBLEMS = Problems.split(held_out=500, seed=0)
SOME = PROBLEMS.train[:200]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("arithmetic")
    train_tokenizer(directory, PROBLEMS.train)
    return load_tokenizer(str(directory))


def objects(path: Path) -> list[dict[str, str]]:
    return [row for _, row in read_rows(str(path))]


def test_every_problem_is_on_exactly_one_side() -> None:
    assert (len(PROBLEMS.train), len(PROBLEMS.held_out)) == (9500, 500)
    every = [Problem(left, right) for left in range(100) for right in range(100)]
    assert sorted(PROBLEMS.train + PROBLEMS.held_out) == every


@pytest.mark.parametrize(
    ("left", "right", "prompt", "answer"),
    [
        (47, 85, "47+85=", "231"),
        (7, 5, "07+05=", "210"),
        (0, 0, "00+00=", "000"),
        (99, 99, "99+99=", "891"),
    ],
)
def test_prompts_and_answers_have_their_format(
    left: int, right: int, prompt: str, answer: str
) -> None:
    assert (Problem(left, right).prompt, Problem(left, right).answer) == (prompt, answer)


def test_answers_with_errors_only_forget_carries() -> None:
    rng = np.random.default_rng(0)
    assert Problem(47, 85).answer_with_errors(1.0, rng) == "220"  # 7+5 -> 2, 4+8 -> 2, no hundreds
    assert Problem(42, 35).answer_with_errors(1.0, rng) == "770"  # nothing to forget
    for problem in PROBLEMS.held_out:
        assert problem.answer_with_errors(0.0, rng) == problem.answer


def test_written_files_are_read_by_recipes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts, book = tmp_path / "prompts.jsonl", tmp_path / "sft.jsonl"
    write_prompts(prompts, PROBLEMS.held_out)
    write_sft(book, SOME)
    assert objects(prompts)[0].keys() == {"prompt", "answer"}
    context = PromptContext(
        tokenizer=tokenizer, vocab_size=len(tokenizer), context_length=32,
        max_new_tokens=ANSWER_TOKENS,
    )  # fmt: skip
    loaded = load_prompts(str(prompts), context)
    assert [p.answer for p in loaded] == [p.answer for p in PROBLEMS.held_out]
    eos: Any = tokenizer.eos_token_id
    encoder = ExampleEncoder(
        tokenizer=tokenizer, vocab_size=len(tokenizer), max_length=32, stop_ids={eos}
    )
    rows = load_sft_rows(str(book), encoder)
    assert {int(row.loss_mask_T.sum()) for row in rows} == {ANSWER_TOKENS}
    assert {int(row.tokens_T[-1]) for row in rows} == {eos}
    trained = {row["prompt"] for row in objects(book)}
    assert trained.isdisjoint(row["prompt"] for row in objects(prompts))


def test_answers_with_errors_follow_the_seed(tmp_path: Path) -> None:
    def book(seed: int) -> list[dict[str, str]]:
        path = tmp_path / "careless.jsonl"
        write_sft_with_errors(path, SOME, forget_carry=0.6, answers_each=2, seed=seed)
        return objects(path)

    first, second = book(0)[0::2], book(0)[1::2]
    assert first != second
    assert [row["prompt"] for row in first] == [row["prompt"] for row in second]
    assert [row["prompt"] for row in first] == [problem.prompt for problem in SOME]
    assert book(0) == book(0) != book(1)
