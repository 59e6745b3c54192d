"""Text answers as the student's tokens: their end, and truncation."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.template import render_messages, render_text
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.data.written_answers import written_sample
from distill.errors import DataError
from distill.tokenizer import load_tokenizer
from distill.types import StopReason
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, token_id

LONG = 1 << 20
CHAT = [{"role": "user", "content": "hi"}]
# Writes a stop token after each turn, and a line behind it; one that opens a turn with thoughts.
ENDS = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
THINKS = ENDS.replace(
    "[{{ m.role[0] }}]", "[{{ m.role[0] }}]{% if m.role == 'assistant' %}?!{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    save_tokenizer(tmp_path)
    return load_tokenizer(str(tmp_path))


def encoder_of(
    tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = (EOS,), template: str = ""
) -> ExampleEncoder:
    if template:
        tokenizer.chat_template = template
    return ExampleEncoder(
        tokenizer=tokenizer, vocab_size=VOCAB_SIZE, max_length=LONG, stop_ids=stop_ids
    )


def plain(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    return Prompt(tokens_T=render_text(tokenizer, "1 + 1 ="), answer=None, line=1, text="1 + 1 =")


def chat(tokenizer: PreTrainedTokenizerBase) -> Prompt:
    tokens_T = render_messages(tokenizer, CHAT)
    return Prompt(tokens_T=tokens_T, answer=None, line=1, messages=CHAT)


def written_text(
    encoder: ExampleEncoder, prompt: Prompt, text: str, *, ended: bool, limit: int = LONG
) -> tuple[str, StopReason]:
    """The sample's text with stop tokens, and its stop reason."""
    sample = written_sample(encoder, prompt, text, ended=ended, max_new_tokens=limit)
    assert len(sample.tokens_T) == len(sample.logprobs_T) == len(sample.versions_T)
    assert sample.tokens_T.dtype == np.int32 and not sample.logprobs_T.any()
    return str(encoder.tokenizer.decode(sample.tokens_T.tolist())), sample.stop_reason


@pytest.mark.parametrize(
    ("text", "ended", "limit", "expected", "stop"),
    [
        ("two", True, LONG, "two<eos>", StopReason.EOS),
        ("two", False, LONG, "tw", StopReason.LENGTH),  # "two" may be the start of a longer token
        ("two", True, 4, "two<eos>", StopReason.EOS),  # it just fits, as a sample's stop token does
        ("two", True, 3, "two", StopReason.LENGTH),  # one more token would be the stop
        ("two", False, 2, "tw", StopReason.LENGTH),
        ("long" * 4000, True, 7, "longlon", StopReason.LENGTH),
        ("long" * 4000, True, LONG, "long" * 4000 + "<eos>", StopReason.EOS),
        ("t", False, LONG, "t", StopReason.LENGTH),  # all there is
        ("two\ufffd\ufffd", False, LONG, "tw", StopReason.LENGTH),  # cut within a character
        ("two<eos>", True, LONG, "two<eos>", StopReason.EOS),  # a server that lets it through
        ("two<eos>rest", True, LONG, "two<eos>", StopReason.EOS),
        ("two<eos>rest", False, LONG, "two<eos>", StopReason.EOS),
        (" two\n", True, LONG, " two\n<eos>", StopReason.EOS),
    ],
)
def test_where_an_answer_ends(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    ended: bool,
    limit: int,
    expected: str,
    stop: StopReason,
) -> None:
    encoder = encoder_of(tokenizer)
    assert written_text(encoder, plain(tokenizer), text, ended=ended, limit=limit) == (
        expected,
        stop,
    )


@pytest.mark.parametrize("template", [ENDS, ""])
def test_a_begun_answer_gets_its_continuation(
    tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    encoder = encoder_of(tokenizer, template=template)
    messages = [*CHAT, {"role": "assistant", "content": "it is "}]
    tokens_T = render_messages(tokenizer, messages)
    prompt = Prompt(tokens_T=tokens_T, answer=None, line=1, messages=messages)
    assert written_text(encoder, prompt, "two", ended=True) == ("two<eos>", StopReason.EOS)
    assert written_text(encoder, prompt, "two", ended=False) == ("tw", StopReason.LENGTH)


@pytest.mark.parametrize(
    ("template", "text", "ended", "expected", "stop"),
    [
        (ENDS, "two", True, "two<eos>", StopReason.EOS),
        (ENDS, "two", False, "tw", StopReason.LENGTH),
        (ENDS, "0", False, "0", StopReason.LENGTH),
        (ENDS, "10", False, "1", StopReason.LENGTH),  # as it ends as the probe does
        (THINKS, "two", True, "?!two<eos>", StopReason.EOS),  # as the template opens a turn
        (THINKS, "two", False, "?!tw", StopReason.LENGTH),
        ("", "two", True, "two\n<eos>", StopReason.EOS),  # a template that writes no stop token
        ("", "two", False, "tw", StopReason.LENGTH),
    ],
)
def test_a_turn_is_written_by_the_student_s_template(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    text: str,
    ended: bool,
    expected: str,
    stop: StopReason,
) -> None:
    encoder = encoder_of(tokenizer, template=template)
    assert written_text(encoder, chat(tokenizer), text, ended=ended) == (expected, stop)


def test_the_end_is_the_run_s_and_not_the_tokenizer_s(tokenizer: PreTrainedTokenizerBase) -> None:
    """A student whose config names another stop token than its tokenizer, and pads with its EOS."""
    other, pad = token_id(tokenizer, "z"), token_id(tokenizer, "<pad>")
    for stops in ((other,), (pad, other)):
        prompt = plain(tokenizer)
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "two", ended=True)
        assert text == "two" + str(tokenizer.decode([min(stops)])) and stop is StopReason.EOS
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "two", ended=False)
        assert text == "tw" and stop is StopReason.LENGTH
        # Its own EOS is a token like any other there.
        text, stop = written_text(encoder_of(tokenizer, stops), prompt, "a<eos>bz", ended=True)
        assert text == "a<eos>bz" and stop is StopReason.EOS
    text, _ = written_text(encoder_of(tokenizer, (EOS, other)), plain(tokenizer), "two", ended=True)
    assert text == "two<eos>", "its own, where it is one of them"


def test_text_without_valid_tokens_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = plain(tokenizer)
    with pytest.raises(DataError):
        written_text(encoder_of(tokenizer), prompt, "", ended=False)
    small = replace(encoder_of(tokenizer), vocab_size=20)
    with pytest.raises(DataError):
        written_text(small, prompt, "two", ended=True)
