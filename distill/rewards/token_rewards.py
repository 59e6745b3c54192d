"""Rewards of single tokens: each occurrence of a phrase earns a bonus."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from distill.chat.token_text import decode, token_spans
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
    return spread(found, starts_T, stops_T)


def spread(
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
