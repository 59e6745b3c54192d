"""Rewards of single tokens: occurrences of phrases, and first mentions of key facts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from distill.chat.token_text import decode, token_spans
from distill.errors import DataError
from distill.text.bm25_words import CJK
from distill.types import FloatArray, TokenArray, Tokenizer


def phrase_bonuses(
    tokens_T: TokenArray, tokenizer: Tokenizer, bonuses: Mapping[str, float]
) -> FloatArray:
    """Compute token rewards, float32 (len(tokens_T),): each occurrence of a phrase earns its value.

    The value is spread evenly over the tokens whose text overlaps the occurrence, so the rewards
    sum to the values of all occurrences. Occurrences of one phrase are counted from left to right
    and do not overlap each other; different phrases may overlap. Special tokens are text like any
    other. A character that several tokens encode byte by byte belongs to the text of each of them.
    """
    ids = tokens_T.tolist()
    text = decode(tokenizer, ids)
    if not any(phrase in text for phrase in bonuses):
        return np.zeros(len(tokens_T), np.float32)
    text, starts_T, stops_T = token_spans(tokenizer, ids)
    found = (
        (match, value)
        for phrase, value in bonuses.items()
        for match in re.finditer(re.escape(phrase), text)
    )
    return _spread(found, starts_T, stops_T)


def key_fact_bonuses(
    tokens_T: TokenArray,
    tokenizer: Tokenizer,
    facts: Sequence[str],
    value: float,
    answer: str | None = None,
) -> FloatArray:
    """Compute token rewards, float32 (len(tokens_T),): a fact's first mention earns `value`.

    Mentions are those of `first_mentions`. The value is spread evenly over the tokens whose text
    overlaps the mention, so the rewards sum to `value` times the number of facts mentioned.

    Args:
        answer: part of the text in which facts count, such as the text after the thinking; if it
            occurs several times, its last occurrence. None: the whole text.

    Raises:
        DataError: a fact is blank.
    """
    text, starts_T, stops_T = token_spans(tokenizer, tokens_T.tolist())
    searched = text if answer is None else answer.strip()
    start = text.rfind(searched)
    found = first_mentions(facts, text, start, start + len(searched)) if start >= 0 else []
    return _spread(((match, value) for match in found if match is not None), starts_T, stops_T)


def first_mentions(
    facts: Sequence[str], text: str, start: int = 0, stop: int = sys.maxsize
) -> list[re.Match[str] | None]:
    """Find the first mention of each fact; None for a fact that does not occur.

    Case, and the amount of whitespace between a fact's words, do not matter. A fact must occur as
    whole words: 42 is not in 1428, but is in 第42章. Facts that differ only in case and whitespace
    count as one.

    Raises:
        DataError: a fact is blank.
    """
    distinct = {_folded(fact): fact for fact in facts}.values()
    patterns = [re.compile(_pattern(fact), re.IGNORECASE) for fact in distinct]
    return [pattern.search(text, start, stop) for pattern in patterns]


def _folded(fact: str) -> str:
    folded = " ".join(fact.casefold().split())
    if not folded:
        raise DataError(f"a key fact is {fact!r}; give text, or leave the fact out")
    return folded


def _pattern(fact: str) -> str:
    parts = fact.split()
    before = rf"(?:(?<!\w)|(?<=[{CJK}]))" if _joins(parts[0][0]) else ""
    after = rf"(?:(?!\w)|(?=[{CJK}]))" if _joins(parts[-1][-1]) else ""
    return before + r"\s+".join(map(re.escape, parts)) + after


def _joins(character: str) -> bool:
    """True if the character, next to a letter or digit, would be part of a longer word."""
    return re.fullmatch(rf"[^\W{CJK}]", character) is not None


def _spread(
    found: Iterable[tuple[re.Match[str], float]], starts_T: np.ndarray, stops_T: np.ndarray
) -> FloatArray:
    """Token rewards, float32 (T,): the value of each match, over the tokens that overlap it.

    Args:
        starts_T, stops_T: span of each token, as `token_spans` returns them: neither decreases.
    """
    rewards_T = np.zeros(len(starts_T), np.float64)
    texts_N = np.flatnonzero(stops_T > starts_T)  # tokens that have text
    starts_N, stops_N = starts_T[texts_N], stops_T[texts_N]
    for match, value in found:
        first = np.searchsorted(stops_N, match.start(), side="right")
        overlaps = texts_N[first : np.searchsorted(starts_N, match.end())]
        rewards_T[overlaps] += value / len(overlaps)
    return rewards_T.astype(np.float32)
