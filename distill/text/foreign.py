"""Sanitising of external text for a model's context: encodable, no control tokens, truncated."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import count

from distill.chat.template import encode
from distill.errors import DataError
from distill.types import Tokenizer

# Characters to insert into a control token, in order of preference: the least visible that the
# tokenizer supports is used.
_BREAKS = ("\N{ZERO WIDTH SPACE}", " ", "_", ".", "-")
_REPLACEMENTS = ("\N{REPLACEMENT CHARACTER}", "?", "_", " ")
# The inserted character may complete another token in a contrived vocabulary. After this many
# rounds, tokens are removed instead.
_ROUNDS = 8


def neutralised(text: str, tokenizer: Tokenizer) -> str:
    """Return `text` without any added token of the tokenizer, special or not.

    Tool results and web pages may contain `<|im_end|>` or `<tool_call>`, which would end the turn
    or forge one. A zero-width space (or another character, if the tokenizer does not support it) is
    inserted after the first character of each. Added tokens of only white space stay, because no
    template uses them as marks. The result is `encodable`.
    """
    text = encodable(text, tokenizer)
    gap = _first(_BREAKS, tokenizer)
    for round_ in count():
        spans = _control_spans(text, tokenizer)
        if not spans:
            return text
        for start, end in reversed(spans):
            token = text[start:end]
            broken = token[0] + gap + token[1:] if round_ < _ROUNDS and len(token) > 1 else ""
            text = text[:start] + broken + text[end:]
        # The tokenizer may support the token's letters only as parts of the token.
        text = encodable(text, tokenizer)
    raise AssertionError("text does not shrink for ever")


def encodable(text: str, tokenizer: Tokenizer) -> str:
    """Return `text` with surrogates and characters that the tokenizer does not support replaced."""
    whole = text.encode("utf-8", "replace").decode()
    if _is_known(whole, tokenizer):
        return whole
    unknown = {c for c in set(whole) if not _is_known(c, tokenizer)}
    instead = _first(_REPLACEMENTS, tokenizer) if unknown else ""
    return "".join(instead if c in unknown else c for c in whole)


def longest_prefix(text: str, max_tokens: int, tokenizer: Tokenizer) -> str:
    """Longest prefix of an `encodable` text with at most `max_tokens` tokens."""
    if len(encode(tokenizer, text)) <= max_tokens:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(encode(tokenizer, text[:middle])) <= max_tokens:
            fits = middle
        else:
            too_long = middle
    return text[:fits]


def _is_known(text: str, tokenizer: Tokenizer) -> bool:
    """True if the text encodes without the unknown token."""
    try:
        ids = encode(tokenizer, text)
    except DataError:
        return False
    return tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids


def _first(candidates: tuple[str, ...], tokenizer: Tokenizer) -> str:
    """First candidate that the tokenizer encodes as known tokens; empty if there is none."""
    for text in candidates:
        if _is_known(text, tokenizer) and encode(tokenizer, text):
            return text
    return ""


def _control_spans(text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Spans of added tokens in the text, as written or after the tokenizer's normalisation."""
    added = {
        token.content: id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip()
    }
    written = _pattern(frozenset(added)).finditer(text) if added else ()
    if spans := [match.span() for match in written]:
        return spans
    # A normalizer may turn other spellings into a token, such as capitals or full-width letters.
    ids = set(added.values())
    if ids.isdisjoint(encode(tokenizer, text)):
        return []
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
    return [(start, end) for id_, (start, end) in pairs if id_ in ids and end > start]


@lru_cache(maxsize=16)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Pattern of the tokens; of several that begin at one position, the longest matches."""
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)))
