"""Prompt files are read whole or refused by line; the order of prompts is seeded and resumable."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.errors import ConfigError, DataError
from distill.prompts import Prompt, PromptStream, load_prompts, read_jsonl
from distill.rewards import exact_match
from distill.tokenizer import load_tokenizer
from tests.samples import sample
from tests.tiny import VOCAB_SIZE, save_tokenizer

GOOD = '{"prompt": "2 + 2 =", "answer": 4}'
CHAT = '{"messages": [{"role": "user", "content": "hi"}]}'


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    def load_lines(*lines: str, **changes: object) -> list[Prompt]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(lines))
        limits = {"vocab_size": VOCAB_SIZE, "context_length": 128, "max_new_tokens": 8}
        return load_prompts(str(path), changes.pop("tokenizer", tokenizer), **limits | changes)

    return load_lines


def test_text_chat_answers_and_blank_lines(load, tokenizer: PreTrainedTokenizerBase) -> None:
    text, chat = load(GOOD, "", CHAT, "  ")
    assert tokenizer.decode(text.tokens_T.tolist()) == "2 + 2 ="
    assert tokenizer.decode(chat.tokens_T.tolist()) == "u:hi\na:"
    assert (text.answer, text.line) == ("4", 1)
    assert (chat.answer, chat.line) == (None, 3)
    assert text.tokens_T.dtype == np.int32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[1, 2]", r"expected a JSON object, got '\[1, 2\]'"),
        ('{"text": "a"}', "exactly one of `prompt`"),
        ('{"prompt": "a", "messages": []}', "exactly one of `prompt`"),
        ('{"prompt": ""}', "`prompt` must be a non-empty string, got ''"),
        ('{"prompt": 3}', "`prompt` must be a non-empty string, got 3"),
        ('{"messages": []}', "`messages` must be a non-empty list"),
        ('{"messages": "hi"}', "`messages` must be a non-empty list"),
        ('{"messages": ["hi"]}', r"`messages\[0\]` must be an object with a `role`"),
        ('{"messages": [{"content": "hi"}]}', r"`messages\[0\]` must be an object with a `role`"),
        (json.dumps({"prompt": "x" * 121}), "the prompt has 121 tokens, and max_new_tokens=8"),
        (r'{"prompt": "\ud800"}', "cannot encode"),
    ],
)
def test_a_bad_line_is_named(load, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"prompts\.jsonl:3: .*{message}"):
        load(GOOD, CHAT, bad)


def test_the_longest_prompt_that_fits(load) -> None:
    [prompt] = load(json.dumps({"prompt": "x" * 120}))
    assert len(prompt.tokens_T) == 120


def test_ids_outside_the_model_are_refused(load) -> None:
    with pytest.raises(DataError, match=r":2: .* outside the model's vocabulary of 50"):
        load('{"prompt": "0"}', '{"prompt": "Z"}', vocab_size=50)


def test_chat_without_a_template_is_refused(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "plain", chat_template=None)
    with pytest.raises(DataError, match=r":1: .* no chat template"):
        load(CHAT, tokenizer=load_tokenizer(str(tmp_path / "plain")))


def test_a_template_that_refuses_is_quoted(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r":1: .*refuses these messages: no system role"):
        load(CHAT, tokenizer=load_tokenizer(str(tmp_path)))


def test_a_character_that_the_tokenizer_lacks_is_refused(load, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, alphabet="ab", unk_token=None)
    with pytest.raises(DataError, match=":2: the tokenizer cannot encode 'abc'"):
        load('{"prompt": "ab"}', '{"prompt": "abc"}', tokenizer=load_tokenizer(str(tmp_path)))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"empty\.jsonl holds no rows"):
        read_jsonl(str(path))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.jsonl"):
        read_jsonl(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="cannot read"):
        read_jsonl(str(tmp_path))
    (tmp_path / "latin1.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"cannot read .*latin1\.jsonl"):
        read_jsonl(str(tmp_path / "latin1.jsonl"))


@given(size=st.integers(1, 30), seed=st.integers(0, 2**31), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation(size: int, seed: int, epochs: int) -> None:
    stream = PromptStream(size, seed)
    order = [stream.index(position) for position in range(epochs * size)]
    for epoch in range(epochs):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))
    # a resumed run asks from the middle, workers out of order: the answer is the same
    resumed = PromptStream(size, seed)
    backwards = [resumed.index(position) for position in reversed(range(epochs * size))]
    assert backwards[::-1] == order


def test_epochs_and_seeds_shuffle_differently() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        stream = PromptStream(20, seed)
        return [stream.index(20 * number + i) for i in range(20)]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), list(range(20))]
    assert len({tuple(order) for order in orders}) == 4


def test_a_stream_needs_prompts() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        PromptStream(0, 0)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("4", "4", 1), (" 4\n", "4", 1), ("5", "4", 0), ("4.", "4", 0), ("", "4", 0), ("", " ", 1)],
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert exact_match(response, answer) == reward


async def _rewards(builder: SingleTurnGroupBuilder, tokens: list[int]) -> list[float]:
    results = [await env.step(sample(*tokens)) for env in builder.make_envs()]
    assert all(result.observation_T is None for result in results)
    return [result.reward for result in results]


@pytest.mark.parametrize(("answer", "expected"), [("4", 1.0), ("5", 0.0), (None, 0.0)])
def test_a_single_turn_pays_for_the_answer(
    tokenizer: PreTrainedTokenizerBase, answer: str | None, expected: float
) -> None:
    prompt = Prompt(tokens_T=np.array([3], np.int32), answer=answer, line=1)
    builder = SingleTurnGroupBuilder(prompt=prompt, tokenizer=tokenizer, group_size=3)
    assert [env.initial_observation().tolist() for env in builder.make_envs()] == [[3]] * 3
    response = [*tokenizer("4")["input_ids"], tokenizer.eos_token_id]
    assert asyncio.run(_rewards(builder, response)) == [expected] * 3
