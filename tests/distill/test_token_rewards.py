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
from distill.rewards.token_rewards import key_fact_bonuses, phrase_bonuses
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


CORPUS = "Paris has 42 bridges; 巴黎有42座桥。 The Straße in Paris"
BYTES = byte_tokenizer(*[CORPUS] * 20, vocab_size=320)


def facts_paid(
    text: str,
    *facts: str,
    value: float = 1.0,
    tokenizer: PreTrainedTokenizerBase = BYTES,
    answer: str | None = None,
) -> list[float]:
    tokens_T = np.array(tokenizer(text)["input_ids"], np.int32)
    row_T = key_fact_bonuses(tokens_T, tokenizer, facts, value, answer)
    assert row_T.dtype == np.float32 and row_T.shape == tokens_T.shape
    return row_T.tolist()


def test_the_first_occurrence_is_paid_over_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    row = facts_paid("so it is: it", "it", value=3.0, tokenizer=tokenizer)
    assert row == [0, 0, 0, 1.5, 1.5, *[0] * 7]


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("it is in PARIS", "Paris"),
        ("42  \n bridges", "42 bridges"),
        ("42 bridges", " 42\tbridges\n"),
        ("die Straße", "straße"),
        ("第42章", "42"),
        ("巴黎有42座桥", "有42座"),
        ("it costs $5.", "$5"),
        ("about C++, say", "C++"),
        ("no; a.b", "a.b"),
    ],
)
def test_texts_that_contain_a_fact(text: str, fact: str) -> None:
    assert sum(facts_paid(text, fact)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("1428", "42"),
        ("comparison", "Paris"),
        ("4 2", "42"),
        ("acb", "a.b"),
        ("", "so"),
        ("so", "s"),
    ],
)
def test_texts_that_do_not_contain_a_fact(text: str, fact: str) -> None:
    assert not any(facts_paid(text, fact))


def test_facts_add_up_and_repetitions_count_once() -> None:
    row = facts_paid(CORPUS, "Paris", "paris ", "42 bridges", "桥", "London", value=0.5)
    assert sum(row) == pytest.approx(1.5)
    assert not any(facts_paid(CORPUS))


def test_facts_in_thinking_do_not_count() -> None:
    thought = "<think>Paris has 42</think>"
    assert sum(facts_paid(f"{thought} 42\n", "Paris", "42", answer=" 42\n")) == pytest.approx(1)
    assert not any(facts_paid(thought, "Paris", answer=""))
    twice = "<think>Paris</think>in <think>42</think>Paris"
    assert not any(facts_paid(twice, "Paris", answer="in Paris"))


def test_facts_may_overlap(tokenizer: PreTrainedTokenizerBase) -> None:
    row = facts_paid("a b c", "a b", "b c", value=3.0, tokenizer=tokenizer)
    assert row == [1, 1, 2, 1, 1]


FACTS = ["Paris", "42 bridges", "桥", "is it"]


@given(st.lists(st.sampled_from([*FACTS, "so", "paris", "42", "\n", "é"]), max_size=12))
def test_the_row_adds_up_to_the_contained_facts(facts: list[str]) -> None:
    text = " ".join(facts)
    folded = f" {' '.join(text.casefold().split())} "
    kept = sum(f" {fact.casefold()} " in folded for fact in FACTS)
    assert sum(facts_paid(text, *FACTS, value=0.25)) == pytest.approx(0.25 * kept, abs=1e-5)
