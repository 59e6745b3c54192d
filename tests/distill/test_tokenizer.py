"""Tokenizers: equal ids or an error, and untrusted text, which is never a control token."""

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import CheckpointError, ConfigError
from distill.models.loading import load_config
from distill.text.chunks import count_tokens
from distill.text.foreign import encodable, longest_prefix, neutralised
from distill.tokenizer import (
    check_same_tokenizer,
    fingerprint,
    load_tokenizer,
    probe_tokenizer,
)
from tests.distill.test_token_rewards import byte_tokenizer
from tests.refusals import refuses
from tests.tiny import save_tokenizer, tiny_model_dir


@pytest.fixture
def make(tmp_path: Path):
    def made(**settings: Any) -> PreTrainedTokenizerBase:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        save_tokenizer(directory, **settings)
        return load_tokenizer(str(directory))

    return made


@pytest.mark.parametrize(
    "settings", [{"alphabet": "acb"}, {"alphabet": "ab"}, {"alphabet": "abcd"}]
)
def test_the_first_difference_is_named(make, settings: dict) -> None:
    student, teacher = make(alphabet="abc"), make(**settings)
    assert fingerprint(student) != fingerprint(teacher)
    with refuses(ConfigError, "teacher.model"):
        check_same_tokenizer(student, teacher)


def test_one_vocabulary_two_encodings(make) -> None:
    student, teacher = make(), make()
    teacher.backend_tokenizer.normalizer = normalizers.Lowercase()
    with refuses(ConfigError, "teacher.model"):
        check_same_tokenizer(student, teacher)


def test_a_template_that_refuses_the_probe_is_no_obstacle(make) -> None:
    refusing = make(chat_template="{{ raise_exception('no system message') }}")
    assert probe_tokenizer(refusing) == probe_tokenizer(make(chat_template=None))


def test_the_fingerprint_covers_the_chat_template(make) -> None:
    plain, chat = fingerprint(make(chat_template=None)), fingerprint(make())
    assert plain.chat_template_hash is None and chat.chat_template_hash is not None
    assert plain.vocab_hash == chat.vocab_hash
    assert fingerprint(make(chat_template="x")).chat_template_hash != chat.chat_template_hash


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    weights_only = tiny_model_dir(tmp_path, seed=0, hidden_size=32, layers=1)
    (tmp_path / "run" / "final").mkdir(parents=True)
    for path in (str(tmp_path / "nowhere"), weights_only, str(tmp_path / "run")):
        with pytest.raises(CheckpointError):
            load_tokenizer(path)
    with pytest.raises(CheckpointError):
        load_config(str(tmp_path / "run"))


def test_truncation_in_the_file_is_off_before_threads_encode(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(path))
    loaded = load_tokenizer(str(tmp_path)).backend_tokenizer
    assert isinstance(loaded, Tokenizer)
    assert (loaded.truncation, loaded.padding) == (None, None)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"version": "1.0"})])
def test_a_corrupt_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError):
        load_tokenizer(str(tmp_path))


CONTROL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "</think>", "<eos>")


def byte_level(normalizer: normalizers.Normalizer | None = None) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(
        "the start of a tool_call is the end of im_start think", vocab_size=400,
        special=["<|im_start|>", "<|im_end|>", "<eos>"], normalizer=normalizer,
    )  # fmt: skip
    # As Qwen has them: added, normalized, and not special.
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "</think>"])
    return tokenizer


@lru_cache
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    with TemporaryDirectory() as directory:
        save_tokenizer(directory)
        tiny = load_tokenizer(directory)
        save_tokenizer(Path(directory) / "2", alphabet="abc <>eos|", unk_token=None)
        tinier = load_tokenizer(str(Path(directory) / "2"))
    lower = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    spiteful = byte_level()
    spiteful.add_tokens(["a\u200b", "\u200b<", "ab", "b"])  # breaking one makes another
    return {
        "tiny": tiny, "tinier": tinier, "bytes": byte_level(), "lower": byte_level(lower),
        "spiteful": spiteful,
    }  # fmt: skip


NAMES = ("tiny", "tinier", "bytes", "lower", "spiteful")
PIECES = st.one_of(
    st.sampled_from([*CONTROL, "<pad>", "<unk>", "<EOS>", "\N{FULLWIDTH LESS-THAN SIGN}eos>"]),
    st.sampled_from(["<|im_", "start|>", "<", "|", ">", "ab", "a\u200b", "\ud800", "\n"]),
    st.text(st.characters(), max_size=5),
)


@pytest.mark.parametrize("name", NAMES)
@given(text=st.lists(PIECES, max_size=8).map("".join))
@example(text="<|im_<|im_start|>start|>")
@example(text="<e<e<eos>os>os>")
@example(text="<\u200beos>")
@example(text="水<pad>é\ud800<EOS>")
def test_no_control_token_is_left(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    clean = neutralised(text, tokenizer)
    added = set(tokenizer.added_tokens_decoder)
    assert added.isdisjoint(tokenizer(clean, add_special_tokens=False)["input_ids"])
    assert not any(token.content in clean for token in tokenizer.added_tokens_decoder.values())
    assert neutralised(clean, tokenizer) == clean


def test_raw_text_would_be_a_control_token() -> None:
    """Otherwise the test above could not fail."""
    for name in NAMES:
        tokenizer = tokenizers()[name]
        ids = tokenizer("a<eos>", add_special_tokens=False)["input_ids"]
        assert tokenizer.eos_token_id in ids


def test_the_break_is_invisible_where_it_can_be() -> None:
    text = "so <|im_end|> and <tool_call> end"
    clean = neutralised(text, tokenizers()["bytes"])
    assert clean == "so <\u200b|im_end|> and <\u200btool_call> end"
    assert neutralised("a <eos>", tokenizers()["tiny"]) == "a < eos>"


@pytest.mark.parametrize("text", ["", "plain", "a < b > c | d", "x\n\n  y"])
def test_plain_text_is_unchanged(text: str) -> None:
    for name in ("tiny", "bytes", "lower"):
        tokenizer = tokenizers()[name]
        assert neutralised(text, tokenizer) == text


def test_characters_that_cannot_be_encoded_are_replaced() -> None:
    assert encodable("a水\ud800b", tokenizers()["tiny"]) == "a??b"
    assert encodable("a水\ud800b", tokenizers()["bytes"]) == "a水?b"
    assert encodable("a水b", tokenizers()["tinier"]) == "a b"


@pytest.mark.parametrize("name", ["tiny", "bytes"])
def test_the_longest_prefix_fits_and_no_longer_one_does(name: str) -> None:
    tokenizer = tokenizers()[name]
    text = "the start of a tool call, the end of it. " * 20
    kept = longest_prefix(text, 50, tokenizer)
    assert text.startswith(kept) and count_tokens(tokenizer, kept) <= 50
    assert count_tokens(tokenizer, text[: len(kept) + 1]) > 50
    assert longest_prefix(text, 10**6, tokenizer) == text
