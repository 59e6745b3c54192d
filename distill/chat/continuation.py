"""Encoding of text as the continuation of given tokens, such that decoding returns the same text.

Some tokenizers put a space before any text (Llama 2's normalizer, Metaspace), so text that is
encoded by itself may decode to a different text. Therefore the text is encoded after an anchor, a
short text whose tokens are cut off again. Anchors are tried until the tokens decode to the text.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from distill.chat.template import encode_chat
from distill.chat.token_text import agreement, decode, end_of_prompt
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Added:
    """Texts of added tokens by id, and the ids of those that divide a text before it is normalized.

    The tokens after such a token do not depend on the text before it.
    """

    texts: Mapping[int, str]
    dividing: list[int]


_added: WeakKeyDictionary[Tokenizer, _Added] = WeakKeyDictionary()


def _added_of(tokenizer: Tokenizer) -> _Added:
    known = _added.get(tokenizer)
    if known is None:  # listing the 6,400 added tokens of Gemma 3 takes 5 ms
        tokens = tokenizer.added_tokens_decoder
        known = _added[tokenizer] = _Added(
            texts={id_: str(token) for id_, token in tokens.items()},
            dividing=[
                i for i, token in tokens.items() if tokenizer.is_fast and not token.normalized
            ],
        )
    return known


def added_tokens(tokenizer: Tokenizer) -> Mapping[int, str]:
    """Texts of the tokenizer's added tokens by id, as they were at the first call."""
    return _added_of(tokenizer).texts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedChat:
    """Rendered chat and its tokens, from which chats that begin like it are encoded.

    Attributes:
        starts, ends: characters at which added tokens begin and end in the text.
        positions: positions of these tokens in `tokens_T`.
    """

    tokenizer: Tokenizer
    text: str
    tokens_T: TokenArray
    starts: list[int]
    ends: list[int]
    positions: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> EncodedChat:
        tokens_T, added = encode_chat(tokenizer, text), _added_of(tokenizer)
        positions = np.flatnonzero(np.isin(tokens_T, added.dividing)).tolist()
        written = [added.texts[id_] for id_ in tokens_T[positions].tolist()]
        longest_first = sorted(set(written), key=len, reverse=True)
        found = [*re.finditer("|".join(map(re.escape, longest_first)), text)] if written else []
        if [match[0] for match in found] != written:
            found, positions = [], []
        starts, ends = [match.start() for match in found], [match.end() for match in found]
        return cls(
            tokenizer=tokenizer,
            text=text,
            tokens_T=tokens_T,
            starts=starts,
            ends=ends,
            positions=positions,
        )

    def encode(self, text: str) -> TokenArray:
        """Tokens of another rendered chat, as from `encode_chat`.

        Only the text from the last added token on that both chats share is encoded.
        """
        if text == self.text:
            return self.tokens_T
        shared = bisect_right(self.ends, agreement(self.text, text)) - 1
        if shared < 0:
            return encode_chat(self.tokenizer, text)
        rest_T = encode_chat(self.tokenizer, text[self.starts[shared] :])
        return np.concatenate([self.tokens_T[: self.positions[shared]], rest_T])


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
