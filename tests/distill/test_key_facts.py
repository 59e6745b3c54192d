"""Key facts pay once, at their first occurrence, as whole words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.rewards.key_facts import key_fact_bonuses
from tests.distill.test_token_rewards import byte_tokenizer

CORPUS = "Paris has 42 bridges; 巴黎有42座桥。 The Straße in Paris"
BYTES = byte_tokenizer(*[CORPUS] * 20, vocab_size=320)


def paid(
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
    row = paid("so it is: it", "it", value=3.0, tokenizer=tokenizer)
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
    assert sum(paid(text, fact)) == pytest.approx(1)


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
    assert not any(paid(text, fact))


def test_facts_add_up_and_repetitions_count_once() -> None:
    row = paid(CORPUS, "Paris", "paris ", "42 bridges", "桥", "London", value=0.5)
    assert sum(row) == pytest.approx(1.5)
    assert not any(paid(CORPUS))


def test_facts_in_thinking_do_not_count() -> None:
    thought = "<think>Paris has 42</think>"
    assert sum(paid(f"{thought} 42\n", "Paris", "42", answer=" 42\n")) == pytest.approx(1)
    assert not any(paid(thought, "Paris", answer=""))
    twice = "<think>Paris</think>in <think>42</think>Paris"
    assert not any(paid(twice, "Paris", answer="in Paris"))


def test_facts_may_overlap(tokenizer: PreTrainedTokenizerBase) -> None:
    row = paid("a b c", "a b", "b c", value=3.0, tokenizer=tokenizer)
    assert row == [1, 1, 2, 1, 1]


FACTS = ["Paris", "42 bridges", "桥", "is it"]


@given(st.lists(st.sampled_from([*FACTS, "so", "paris", "42", "\n", "é"]), max_size=12))
def test_the_row_adds_up_to_the_contained_facts(said: list[str]) -> None:
    text = " ".join(said)
    folded = f" {' '.join(text.casefold().split())} "
    kept = sum(f" {fact.casefold()} " in folded for fact in FACTS)
    assert sum(paid(text, *FACTS, value=0.25)) == pytest.approx(0.25 * kept, abs=1e-5)
