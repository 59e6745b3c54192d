"""Chunking of long texts at good boundaries, with a token budget for each chunk.

The library `semantic-text-splitter` splits at the highest-level boundary that fits: Markdown
sections, blocks and lines, then Unicode sentences (also in scripts without spaces), words and
characters. Budgets are counted with the model's own tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distill.chat.template import encode
from distill.errors import DataError
from distill.libraries import require_library
from distill.types import Tokenizer

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter

# The splitter's time is quadratic in the number of chunks of a text. So a long text is first cut
# into windows of `_WINDOW` characters per token of the budget, and a longer one before that into
# windows larger by the factor `_WINDOW_STEP`, and so on.
_WINDOW, _WINDOW_STEP = 64, 16
# Of a text with more than this many characters per token of the budget, first only the beginning is
# counted. It decides if it is over budget by more than its cut end can account for.
_READ_AHEAD = 8

# Only headings or the first line of a code block: a chunk of little use without the text after it.
_LEAD = re.compile(r"(?:[ \t]*(?:#{1,6}(?:[ \t]|$)|`{3,}|~{3,}).*\s*)+", re.MULTILINE)
# Closing quotation marks and brackets. A sentence ends with punctuation that needs no space after
# it, with punctuation that does, or at the end of a paragraph.
_CLOSING = "[\"'\u2019\u201d\u300d\u300f\uff09)\\]]*"
_SENTENCE_END = re.compile(
    rf"[\u3002\uff01\uff1f\uff1b\u2026]+{_CLOSING}|[.!?]+{_CLOSING}(?=\s|\Z)|\n(?=[ \t]*\n)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Chunk of a text.

    Attributes:
        text: the chunk's text, `[start:stop]` of the whole text.
        start, stop: positions in the whole text, in characters.
        num_tokens: number of tokens of the chunk.
    """

    text: str
    start: int
    stop: int
    num_tokens: int


def require_splitter(feature: str) -> None:
    """Raise ConfigError unless the library that splits texts is installed."""
    require_library("semantic_text_splitter", feature, "semantic-text-splitter")


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Number of tokens of the text, without special tokens.

    Raises:
        DataError: the tokenizer cannot encode the text.
    """
    return len(encode(tokenizer, text))


def chunk_text(text: str, *, tokenizer: Tokenizer, max_tokens: int) -> list[Chunk]:
    """Split a text into chunks of at most `max_tokens`, as large as good boundaries allow.

    A section, block or sentence that fits is not cut, and a heading stays with the text after it if
    both fit. Only whitespace lies between chunks. In a fenced block of more than 64 characters per
    token of the budget, the splitter may not recognise the end of the code; the boundaries of its
    chunks are then worse, but no text is lost.

    Raises:
        DataError: `max_tokens` is less than a single character needs, or the tokenizer cannot
            encode the text.
    """
    if max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens} must be at least 1")
    count_tokens(tokenizer, text)  # raises DataError, which the splitter would not
    splitter = _splitter_class().from_callback(_size(tokenizer, max_tokens), max_tokens)
    spans = _split(splitter, text, _windows(text, _WINDOW * max_tokens))
    return [
        _chunk(text, span, tokenizer, max_tokens)
        for span in _join_headings(spans, text, tokenizer, max_tokens)
    ]


def cut_text(text: str, *, tokenizer: Tokenizer, max_tokens: int) -> str:
    """Cut a text to `max_tokens`: at a sentence's end or, if no sentence fits, at a character."""
    if count_tokens(tokenizer, text) <= max_tokens:
        return text
    sentence_ends = [found.end() for found in _SENTENCE_END.finditer(text)]
    for ends in (sentence_ends, range(1, len(text) + 1)):
        kept = _longest(text, ends, tokenizer, max_tokens)
        if kept:
            return kept
    return ""


def _longest(text: str, ends: Sequence[int], tokenizer: Tokenizer, max_tokens: int) -> str:
    """Text up to the last of `ends` that fits; empty if none fits."""

    def num_tokens(end: int) -> int:
        return count_tokens(tokenizer, text[:end].rstrip())

    fitting = bisect_right(ends, max_tokens, key=num_tokens)
    # A longer text may have fewer tokens, so the result of the bisection may not fit.
    while fitting and num_tokens(ends[fitting - 1]) > max_tokens:
        fitting -= 1
    return text[: ends[fitting - 1]].rstrip() if fitting else ""


def _splitter_class() -> type[MarkdownSplitter]:
    from semantic_text_splitter import MarkdownSplitter  # only runs that split texts need it

    return MarkdownSplitter


def _windows(text: str, size: int) -> list[tuple[int, int]]:
    """Spans of at most `size` characters that cover the text, cut at its best boundaries."""
    spans = [(0, len(text))]
    if len(text) > size * _WINDOW_STEP:
        spans = _windows(text, size * _WINDOW_STEP)
    return spans if len(text) <= size else _split(_splitter_class()(size), text, spans)


def _split(
    splitter: MarkdownSplitter, text: str, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    return [
        (start + offset, start + offset + len(piece))
        for start, stop in spans
        for offset, piece in splitter.chunk_indices(text[start:stop])
        if not piece.isspace()  # such as control characters, which the splitter keeps
    ]


def _join_headings(
    spans: Sequence[tuple[int, int]],
    text: str,
    tokenizer: Tokenizer,
    max_tokens: int,
) -> list[tuple[int, int]]:
    """Join pieces of only headings or opening fences to the next piece, within the budget."""
    led: list[tuple[int, int]] = []
    for start, stop in spans:
        if led and _LEAD.fullmatch(text, *led[-1]):
            joined = led[-1][0], stop
            if count_tokens(tokenizer, text[slice(*joined)]) <= max_tokens:
                led[-1] = joined
                continue
        led.append((start, stop))
    return led


def _size(tokenizer: Tokenizer, max_tokens: int) -> Callable[[str], int]:
    """Return a function that counts tokens; counts are exact near or below the budget."""
    enough = _READ_AHEAD * max_tokens

    def size(piece: str) -> int:
        if len(piece) > enough:
            head = count_tokens(tokenizer, piece[:enough])
            if head > max_tokens * 5 // 4 + 8:
                return head
        return count_tokens(tokenizer, piece)

    return size


def _chunk(text: str, span: tuple[int, int], tokenizer: Tokenizer, max_tokens: int) -> Chunk:
    start, stop = span
    num_tokens = count_tokens(tokenizer, text[start:stop])
    if num_tokens > max_tokens:
        raise DataError(
            f"max_tokens={max_tokens} is less than the {num_tokens} tokens of "
            f"{text[start:stop][:40]!r}; give at least that many"
        )
    return Chunk(text=text[start:stop], start=start, stop=stop, num_tokens=num_tokens)
