"""Incremental decoding: the part of a text that each token spells, for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from distill.types import TokenArray, Tokenizer

# Decoders write this for bytes that are not (yet) a character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens of one character at most, and tokens without a complete character that are read together.
_CHARACTER, _STRAY = 4, 16


def decode(tokenizer: Tokenizer, ids: Sequence[int] | TokenArray) -> str:
    """Text of the tokens, including special tokens, without clean-up of spaces."""
    return str(
        tokenizer.decode(
            np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


@lru_cache(maxsize=256)
def _end(tokenizer: Tokenizer, ids: bytes, tokens: int) -> tuple[int, str]:
    ids_T = np.frombuffer(ids, np.int32)
    for count in range(tokens, tokens + _CHARACTER):
        text = decode(tokenizer, ids_T[-count:])
        if not text.startswith(_INCOMPLETE):
            return count, text
    return tokens, decode(tokenizer, ids_T[-tokens:])


def end_of_prompt(
    tokenizer: Tokenizer, prompt_T: TokenArray, tokens: int
) -> tuple[TokenArray, str]:
    """Last `tokens` tokens of a prompt and their text, which begins with a whole character.

    A few more tokens are taken where these would begin within a character: a decoder with byte
    fallback writes no character of a run of bytes of which one is incomplete. The text is cached,
    because a group's members share a prompt.
    """
    last_T = prompt_T[-tokens - _CHARACTER :].astype(np.int32)
    count, text = _end(tokenizer, last_T.tobytes(), tokens)
    return prompt_T[-count:], text


def token_spans(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the text, and the start and end of each token's part of it, in characters.

    Tokens that together spell one character, byte by byte, share its part, and so do stray bytes. A
    token is decoded after the tokens before it, since some decoders drop a leading space. Only the
    last piece of these is needed, so the work is linear in the length.
    """
    text, anchor, read = "", 0, 0
    starts_T, stops_T = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    for t in range(len(ids)):
        before, now = decode(tokenizer, ids[anchor:read]), decode(tokenizer, ids[anchor : t + 1])
        stop = t + 1
        if now.endswith(_INCOMPLETE) and stop < len(ids):
            # The following tokens have the rest of the character, or these are stray bytes.
            cut = _cut(tokenizer, ids[anchor:stop], now) if stop - read > _STRAY else None
            if cut is None:
                continue
            stop, now = anchor + cut[0], cut[1]
        piece = now[len(before) :]
        starts_T[read:stop] = len(text)
        text += piece
        stops_T[read:stop] = len(text)
        if piece:
            anchor = read
        read = stop
    return text, starts_T, stops_T


def _cut(tokenizer: Tokenizer, ids: list[int], text: str) -> tuple[int, str] | None:
    """Number of tokens before the last character of `text`, and their text; None if unknown."""
    for cut in range(len(ids) - 1, len(ids) - _CHARACTER, -1):
        before = decode(tokenizer, ids[:cut])
        if before + decode(tokenizer, ids[cut:]) == text:
            return cut, before
    return None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    """Text of each token; all texts joined are the whole text.

    None: the token shares the text of the token before it, a character of several tokens.
    """
    text, starts_T, stops_T = token_spans(tokenizer, list(ids))
    texts: list[str | None] = []
    for t, (start, stop) in enumerate(zip(starts_T, stops_T, strict=True)):
        shared = t > 0 and stop > start and (start, stop) == (starts_T[t - 1], stops_T[t - 1])
        texts.append(None if shared else text[start:stop])
    return texts


def agreement(one: str, other: str) -> int:
    """Length of the longest common prefix of two texts, in characters."""
    same, differ = 0, min(len(one), len(other)) + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        if one.startswith(other[same:middle], same):
            same = middle
        else:
            differ = middle
    return same
