"""Phrases pay the tokens that spell them, with any tokenizer, and no more than their value."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.chat.token_text import decode, token_texts
from distill.rewards.token_rewards import phrase_bonuses
from tests.tiny import token_id


def byte_tokenizer(
    *corpus: str,
    vocab_size: int = 257,
    special: Sequence[str] = ("<eos>",),
    normalizer: normalizers.Normalizer | None = None,
) -> PreTrainedTokenizerBase:
    """Bytes and merges of the corpus, up to `vocab_size` tokens; `special` come first."""
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def llama_tokenizer() -> PreTrainedTokenizerBase:
    """Words with their leading space, and bytes; the decoder drops a space at the start."""
    tokens = ["<unk>", "<eos>", "▁so", "▁well", "▁", "so", "", "<0xC3>", "<0xA9>"]
    ids = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def paid(tokenizer: PreTrainedTokenizerBase, ids: list[int], bonuses: dict) -> list[float]:
    row_T = phrase_bonuses(np.array(ids, np.int32), tokenizer, bonuses)
    assert row_T.dtype == np.float32 and row_T.shape == (len(ids),)
    return row_T.tolist()


def test_an_occurrence_is_spread_over_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("so: is it so?")["input_ids"]
    assert paid(tokenizer, ids, {"so": 3.0}) == [1.5, 1.5, *[0.0] * 8, 1.5, 1.5, 0.0]


def test_a_token_that_holds_more_than_the_phrase_is_paid() -> None:
    tokenizer = byte_tokenizer(*["also"] * 50, vocab_size=260)
    [also] = tokenizer("also")["input_ids"]
    bang = tokenizer("!")["input_ids"]
    assert paid(tokenizer, [*bang, also, *bang], {"so": 1.0}) == [0, 1, 0]
    assert paid(tokenizer, [*bang, also, *bang], {"so!": 1.0}) == [0, 0.5, 0.5]
    assert paid(tokenizer, [*bang, also, *bang], {"al": 1.0, "so": 0.5}) == [0, 1.5, 0]


def test_occurrences_of_one_phrase_do_not_overlap(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("aaaaa")["input_ids"]
    assert paid(tokenizer, ids, {"aa": 2.0}) == [1, 1, 1, 1, 0]
    assert paid(tokenizer, ids, {"aa": 2.0, "aaa": -3.0}) == [0, 0, 0, 1, 0]


def test_bytes_of_a_character_share_it() -> None:
    """é is two tokens and 你 three; each byte's text is the whole character."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("né你!")["input_ids"]
    assert len(ids) == 7
    assert paid(tokenizer, ids, {"é": 1.0}) == pytest.approx([0, 0.5, 0.5, 0, 0, 0, 0])
    assert paid(tokenizer, ids, {"你!": 1.0}) == pytest.approx([0, 0, 0, *[0.25] * 4])
    assert paid(tokenizer, ids, {"n": 1.0}) == [1, 0, 0, 0, 0, 0, 0]


def test_bytes_that_are_no_character_lose_nothing() -> None:
    """A stray first byte and the letter after it have one text: the phrase pays both."""
    tokenizer = byte_tokenizer()
    stray = tokenizer("é")["input_ids"][0]
    ids = [*tokenizer("so")["input_ids"], stray, *tokenizer("so")["input_ids"]]
    assert paid(tokenizer, ids, {"so": 3.0}) == pytest.approx([1.5, 1.5, 1, 1, 1])


def test_a_space_that_the_decoder_drops_at_the_start() -> None:
    tokenizer = llama_tokenizer()
    assert tokenizer.decode([2, 3, 6, 2]) == "so well so"
    assert paid(tokenizer, [2, 3, 2], {" so": 1.0, "well": 2.0}) == [0, 2, 1]
    assert paid(tokenizer, [2, 3, 2], {"so": 1.0}) == [1, 0, 1]
    assert paid(tokenizer, [4, 5, 2], {"so": 1.0}) == [0, 1, 1]


def test_a_token_without_text_is_not_paid() -> None:
    tokenizer = llama_tokenizer()
    assert paid(tokenizer, [2, 3, 6, 2], {"well so": 1.0}) == [0, 0.5, 0, 0.5]
    assert paid(tokenizer, [2, 3, 6, 2], {" so": 1.0}) == [0, 0, 0, 1]


def test_bytes_as_tokens_of_their_own() -> None:
    tokenizer = llama_tokenizer()
    assert tokenizer.decode([2, 7, 8, 2]) == "soé so"
    assert paid(tokenizer, [2, 7, 8, 2], {"é": 1.0, " so": 2.0}) == [0, 0.5, 0.5, 2]


@pytest.mark.parametrize("before", ["", "so"])
def test_stray_bytes_are_read_in_linear_time(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = byte_tokenizer(), 0
    [first, *others] = tokenizer("🙂")["input_ids"]
    ids = [*tokenizer(before)["input_ids"], *[first] * 500, *others, *tokenizer("né")["input_ids"]]
    whole = decode(tokenizer, ids)
    decode_all = tokenizer.decode

    def counting(tokens: list[int], **options: bool) -> str | list[str]:
        nonlocal decoded
        decoded += len(tokens)
        return decode_all(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    texts = token_texts(tokenizer, ids)
    assert "".join(text or "" for text in texts) == whole
    assert texts[-3:] == ["n", "é", None] and texts[-4] is None
    assert whole.endswith("🙂né")
    assert decoded < 100 * len(ids)


PHRASES = {"a": 0.5, "ab": -1.25, "é": 2.0, "你好": 3.0, " b": 0.125, "🙂a": -4.0}
MERGED = byte_tokenizer(*["ab abé 你好 🙂a", "éab 你好ab b🙂"] * 20, vocab_size=275)


@given(st.text(alphabet="ab é你好🙂", max_size=40), st.integers(0, 2**16))
def test_the_row_adds_up_to_its_occurrences(text: str, seed: int) -> None:
    """With the usual tokens, or single bytes in between."""
    rng = random.Random(seed)
    ids: list[int] = []
    for token in MERGED(text)["input_ids"]:
        split = rng.random() < 0.5
        piece = MERGED.convert_ids_to_tokens(token)
        ids += [token_id(MERGED, byte) for byte in piece] if split else [token]
    assert MERGED.decode(ids) == text
    total = sum(text.count(phrase) * value for phrase, value in PHRASES.items())
    row = paid(MERGED, ids, PHRASES)
    assert sum(row) == pytest.approx(total, abs=1e-4)
