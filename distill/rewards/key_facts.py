"""Token-level rewards from an oracle: the first mention of each key fact is paid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distill.chat.token_text import token_spans
from distill.errors import DataError
from distill.text.bm25_words import CJK
from distill.types import FloatArray, TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def key_fact_bonuses(
    tokens_T: TokenArray,
    tokenizer: PreTrainedTokenizerBase,
    facts: Sequence[str],
    value: float,
    answer: str | None = None,
) -> FloatArray:
    """float32 (len(tokens_T),): each fact pays `value` once, to the tokens that say it first.

    Case does not matter, nor how much whitespace stands between a fact's words. A fact is found as
    whole words: 42 is not in 1428, and is in 第42章. Facts that are the same but for case and
    whitespace are one. The value is spread evenly over the tokens whose text overlaps the
    occurrence, so the row adds up to `value` times the number of facts that were said.

    Args:
        answer: the part of the text that may say facts, such as what follows the thinking; where
            it occurs several times, the last counts. None: all of the text.

    Raises:
        DataError: a fact without text.
    """
    rewards_T = np.zeros(len(tokens_T), np.float64)
    text, starts_T, stops_T = token_spans(tokenizer, tokens_T.tolist())
    has_text_T = stops_T > starts_T
    said = text if answer is None else answer.strip()
    start = text.rfind(said)
    for fact in {_folded(fact): fact for fact in facts}.values():
        pattern = re.compile(_pattern(fact), re.IGNORECASE)
        found = pattern.search(text, start, start + len(said)) if start >= 0 else None
        if found is not None:
            says_T = (starts_T < found.end()) & (stops_T > found.start()) & has_text_T
            rewards_T[says_T] += value / says_T.sum()
    return rewards_T.astype(np.float32)


def _folded(fact: str) -> str:
    folded = " ".join(fact.casefold().split())
    if not folded:
        raise DataError(f"a key fact is {fact!r}; give text, or leave it out")
    return folded


def _pattern(fact: str) -> str:
    parts = fact.split()
    before = rf"(?:(?<!\w)|(?<=[{CJK}]))" if _joins(parts[0][0]) else ""
    after = rf"(?:(?!\w)|(?=[{CJK}]))" if _joins(parts[-1][-1]) else ""
    return before + r"\s+".join(map(re.escape, parts)) + after


def _joins(character: str) -> bool:
    """True if a letter or digit beside it would make it part of a longer word."""
    return re.fullmatch(rf"[^\W{CJK}]", character) is not None
