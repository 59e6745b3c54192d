"""Encoding of text as the continuation of given tokens, such that decoding returns the same text.

Some tokenizers put a space before any text (Llama 2's normalizer, Metaspace), so text that is
encoded by itself may decode to a different text. Therefore the text is encoded after an anchor, a
short text whose tokens are cut off again. Anchors are tried until the tokens decode to the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping

import numpy as np

from distill.chat.template import encode_chat
from distill.chat.token_text import decode, end_of_prompt
from distill.errors import DataError
from distill.types import TokenArray, Tokenizer

# The text of a token depends on neighbours at most this many tokens away.
_NEIGHBOURS = 8
# Anchors of several kinds of characters, since a tokenizer may merge an anchor with the text.
_ANCHORS = ("\n", "0", ":", "e", ")")


def continuation(tokenizer: Tokenizer, before_T: TokenArray, text: str) -> TokenArray | None:
    """Tokens that add exactly `text` to the text of `before_T`; None if no encoding does.

    Texts are compared in Unicode's normal form NFC, which many tokenizers apply.
    """
    tokens_T = _whole(tokenizer, before_T, text)
    return _in_parts(tokenizer, before_T, text) if tokens_T is None else tokens_T


def require_continuation(
    tokenizer: Tokenizer, before_T: TokenArray, text: str, *, exact: bool
) -> TokenArray:
    """Like `continuation`, for text that must be encoded.

    Args:
        exact: False: if no encoding keeps the text, return its tokens when encoded by itself.

    Raises:
        DataError: no encoding keeps the text.
    """
    tokens_T = continuation(tokenizer, before_T, text)
    if tokens_T is None:
        tokens_T = encode_chat(tokenizer, text)
        if not exact:
            return tokens_T
        got = decode(tokenizer, tokens_T.tolist())
        at = next((i for i, (a, b) in enumerate(zip(text, got, strict=False)) if a != b), len(got))
        raise DataError(
            f"the tokenizer cannot encode this text exactly: {text[max(0, at - 20) : at + 20]!r} "
            f"becomes {got[max(0, at - 20) : at + 20]!r}; change the text, or leave the row out"
        )
    return tokens_T


def added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Texts of the tokenizer's added tokens by id."""
    return {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}


def served_continuation(
    tokenizer: Tokenizer,
    before_T: TokenArray,
    text: str,
    *,
    added: Mapping[int, str],
) -> TokenArray | None:
    """Tokens of `text` after `before_T`, as in a server's encoding of the whole rendered chat.

    None if no encoding keeps the text. Added tokens never merge with their neighbours, but may
    absorb the white space after them, so if `before_T` ends with one, `text` is encoded after it.

    Args:
        added: see `added_tokens`.
    """
    if not len(before_T):
        return encode_chat(tokenizer, text)
    last = added.get(int(before_T[-1]))
    tokens_T = None if last is None else _encoded_after(tokenizer, last, text)
    return continuation(tokenizer, before_T, text) if tokens_T is None else tokens_T


def added_text(tokenizer: Tokenizer, before_T: TokenArray, tokens_T: TokenArray) -> str | None:
    """Text that `tokens_T` add to the text of `before_T`; None if they change that text."""
    end_T, before = end_of_prompt(tokenizer, before_T, _NEIGHBOURS)
    both = decode(tokenizer, np.concatenate([end_T, tokens_T]))
    return both[len(before) :] if both.startswith(before) else None


def _whole(tokenizer: Tokenizer, before_T: TokenArray, text: str) -> TokenArray | None:
    for anchor in _anchors(tokenizer, before_T):
        tokens_T = _encoded_after(tokenizer, anchor, text)
        if tokens_T is not None:
            joined = added_text(tokenizer, before_T, tokens_T)
            if joined is not None and _normal(joined) == _normal(text):
                return tokens_T
    return None


def _in_parts(tokenizer: Tokenizer, before_T: TokenArray, text: str) -> TokenArray | None:
    """Tokens of the text, encoded in parts between its added tokens.

    Some tokenizers put a space after each added token, which this avoids.
    """
    ids = {token: id_ for id_, token in added_tokens(tokenizer).items()}
    longest_first = sorted(ids, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if ids else [text]
    if len(parts) == 1:
        return None
    tokens_T = np.empty(0, np.int32)
    for part in filter(None, parts):
        so_far_T = np.concatenate([before_T, tokens_T])
        part_T = np.asarray([ids[part]]) if part in ids else _whole(tokenizer, so_far_T, part)
        if part_T is None:
            return None
        tokens_T = np.concatenate([tokens_T, part_T])
    return tokens_T.astype(np.int32)


def _anchors(tokenizer: Tokenizer, before_T: TokenArray) -> Iterator[str]:
    """Anchors to try: none, the text of the last tokens, others."""
    yield ""
    yield end_of_prompt(tokenizer, before_T, _NEIGHBOURS)[1]
    yield from _ANCHORS


def _encoded_after(tokenizer: Tokenizer, anchor: str, text: str) -> TokenArray | None:
    """Tokens of `text` when encoded after `anchor`; None if a token spans the boundary."""
    if not anchor:
        return encode_chat(tokenizer, text)
    anchor_T, both_T = encode_chat(tokenizer, anchor), encode_chat(tokenizer, anchor + text)
    return both_T[len(anchor_T) :] if np.array_equal(both_T[: len(anchor_T)], anchor_T) else None


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)
