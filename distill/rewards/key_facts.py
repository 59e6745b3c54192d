"""Token-level rewards from an oracle: the first mention of each key fact earns a reward."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from distill.chat.token_text import token_spans
from distill.errors import DataError
from distill.rewards.token_rewards import spread
from distill.text.bm25_words import CJK
from distill.types import FloatArray, TokenArray, Tokenizer


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
    return spread(((match, value) for match in found if match is not None), starts_T, stops_T)


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
