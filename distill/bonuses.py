"""Rewards of single tokens: phrases that pay wherever the model writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.types import FloatArray, TokenArray

# What a decoder writes for bytes that are not (yet) a character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def phrase_bonuses(
    tokens_T: TokenArray, tokenizer: PreTrainedTokenizerBase, bonuses: Mapping[str, float]
) -> FloatArray:
    """float32 (len(tokens_T),): each occurrence of a phrase pays its value to its tokens.

    The value is spread evenly over the tokens that spell the occurrence, those whose text overlaps
    it, so the row adds up to the values of all occurrences. Occurrences of one phrase are counted
    from left to right and do not overlap one another; different phrases may overlap. Special tokens
    are text like any other. A character that several tokens spell byte by byte is the text of each
    of them.
    """
    rewards_T = np.zeros(len(tokens_T), np.float64)
    ids = tokens_T.tolist()
    text = _decode(tokenizer, ids)
    if not any(phrase in text for phrase in bonuses):
        return rewards_T.astype(np.float32)
    text, starts_T, stops_T = _spans(tokenizer, ids)
    has_text_T = stops_T > starts_T
    for phrase, value in bonuses.items():
        for found in re.finditer(re.escape(phrase), text):
            spells_T = (starts_T < found.end()) & (stops_T > found.start()) & has_text_T
            rewards_T[spells_T] += value / spells_T.sum()
    return rewards_T.astype(np.float32)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _spans(
    tokenizer: PreTrainedTokenizerBase, ids: list[int]
) -> tuple[str, np.ndarray, np.ndarray]:
    """(text, start of each token's part of it, end of it).

    A token is decoded behind the ones before it, since some decoders drop a leading space; only the
    last piece of them is needed for that, so the work is linear in the length.
    """
    text, anchor, read = "", 0, 0
    starts_T, stops_T = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    for t in range(len(ids)):
        before, now = _decode(tokenizer, ids[anchor:read]), _decode(tokenizer, ids[anchor : t + 1])
        if now.endswith(_INCOMPLETE) and t + 1 < len(ids):
            continue  # the rest of the character is in the tokens that follow
        piece = now[len(before) :]
        starts_T[read : t + 1] = len(text)
        text += piece
        stops_T[read : t + 1] = len(text)
        if piece:
            anchor = read
        read = t + 1
    return text, starts_T, stops_T
