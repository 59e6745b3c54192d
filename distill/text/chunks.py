"""Chunking of long texts: pieces end where a reader would pause, each within a budget of tokens.

The splitting is `semantic-text-splitter`'s: Markdown's sections, blocks and lines, then Unicode's
sentences (also of scripts without spaces), words and characters; the best boundary that fits wins.
Budgets are counted with the model's own tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from distill.chat.template import encode
from distill.errors import DataError
from distill.libraries import require_library

if TYPE_CHECKING:
    from semantic_text_splitter import MarkdownSplitter
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

ChunkKind = Literal["heading", "code", "paragraph", "sentence", "fragment"]

# The splitter's work grows with the square of the number of chunks in what it is given. So it cuts
# a long text into windows of so many characters a token first, and larger ones of these before.
_WINDOW, _WINDOW_STEP = 64, 16
# Text longer than so many characters a token is judged by its beginning, where that is over budget
# by more than how it happens to end may account for.
_READ_AHEAD = 8

_FENCED = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})(?:.*\n)*?(?:[ \t]*(?P=fence)[`~]*[ \t]*$|.*\Z)", re.MULTILINE
)
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]|$)|[^\n]+\n {0,3}(?:=+|-{2,})[ \t]*$", re.MULTILINE)
# Headings, or the line before a code block, and nothing else: worth little without what follows.
_LEAD = re.compile(r"(?:[ \t]*(?:#{1,6}(?:[ \t]|$)|`{3,}|~{3,}).*\s*)+", re.MULTILINE)
# Quotation marks and brackets that close; full stops that need no space behind them, and those that
# do; and the end of a paragraph.
_CLOSING = "[\"'\u2019\u201d\u300d\u300f\uff09)\\]]*"
_SENTENCE_END = re.compile(
    rf"[\u3002\uff01\uff1f\uff1b\u2026]+{_CLOSING}|[.!?]+{_CLOSING}(?=\s|\Z)|\n(?=[ \t]*\n)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`text[start:stop]` of what was chunked, in characters, and how many tokens it is.

    `kind` says what it begins with: a heading; a fenced code block, or a line of one; a paragraph,
    or a line of one, such as an item of a list; a sentence; or a fragment of a sentence.
    """

    text: str
    kind: ChunkKind
    start: int
    stop: int
    num_tokens: int


def require_splitter(feature: str) -> None:
    """Raises ConfigError unless the library that splits texts is installed."""
    require_library("semantic_text_splitter", feature, "semantic-text-splitter")


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Number of tokens of the text on its own, without special tokens.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    return len(encode(tokenizer, text, add_special_tokens=False))


def chunk_text(text: str, *, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Chunk]:
    """The text in order, in chunks of at most `max_tokens`, as full as good boundaries allow.

    A section, block or sentence that fits is not cut, and a heading stays with what follows, where
    both fit. Nothing but whitespace lies between chunks or is lost. A fenced block of more than 64
    characters a token of the budget may lose the splitter's notion of where its code ends; its
    chunks are the worse, and no less exact.

    Raises:
        DataError: `max_tokens` is less than a single character needs, or the tokenizer cannot
            encode the text.
    """
    if max_tokens < 1:
        raise DataError(f"max_tokens={max_tokens} must be at least 1", field="max_tokens")
    count_tokens(tokenizer, text)  # what cannot be encoded is an error of ours, not the splitter's
    splitter = _splitter_class().from_callback(_size(tokenizer, max_tokens), max_tokens)
    spans = _split(splitter, text, _windows(text, _WINDOW * max_tokens))
    kinds = _Kinds.of(text)
    return [
        _chunk(text, span, kinds, tokenizer, max_tokens)
        for span in _led(spans, text, tokenizer, max_tokens)
    ]


def cut_text(text: str, *, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> str:
    """The text, or what of it fits: up to a sentence's end, or a character's where none fits."""
    if count_tokens(tokenizer, text) <= max_tokens:
        return text
    sentence_ends = [found.end() for found in _SENTENCE_END.finditer(text)]
    for ends in (sentence_ends, range(1, len(text) + 1)):
        kept = _longest(text, ends, tokenizer, max_tokens)
        if kept:
            return kept
    return ""


def _longest(
    text: str, ends: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> str:
    """The text up to the last of `ends` that fits; empty where none does."""

    def num_tokens(end: int) -> int:
        return count_tokens(tokenizer, text[:end].rstrip())

    fitting = bisect_right(ends, max_tokens, key=num_tokens)
    # one more character may be fewer tokens, so what the bisection found need not fit
    while fitting and num_tokens(ends[fitting - 1]) > max_tokens:
        fitting -= 1
    return text[: ends[fitting - 1]].rstrip() if fitting else ""


def _splitter_class() -> type[MarkdownSplitter]:
    from semantic_text_splitter import MarkdownSplitter  # only runs that cut texts need it

    return MarkdownSplitter


def _windows(text: str, size: int) -> list[tuple[int, int]]:
    """The text in spans of at most `size` characters, cut at its best boundaries."""
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
        if not piece.isspace()  # of control characters, say, which the splitter would keep
    ]


def _led(
    spans: Sequence[tuple[int, int]],
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> list[tuple[int, int]]:
    """Joins lead-only pieces (headings, opening fences) to the next piece, within the budget."""
    led: list[tuple[int, int]] = []
    for start, stop in spans:
        if led and _LEAD.fullmatch(text, *led[-1]):
            joined = led[-1][0], stop
            if count_tokens(tokenizer, text[slice(*joined)]) <= max_tokens:
                led[-1] = joined
                continue
        led.append((start, stop))
    return led


def _size(tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Callable[[str], int]:
    """Counts tokens, exactly where the count is near the budget."""
    enough = _READ_AHEAD * max_tokens

    def size(piece: str) -> int:
        if len(piece) > enough:
            head = count_tokens(tokenizer, piece[:enough])
            if head > max_tokens * 5 // 4 + 8:
                return head
        return count_tokens(tokenizer, piece)

    return size


def _chunk(
    text: str,
    span: tuple[int, int],
    kinds: _Kinds,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> Chunk:
    start, stop = span
    num_tokens = count_tokens(tokenizer, text[start:stop])
    if num_tokens > max_tokens:
        raise DataError(
            f"max_tokens={max_tokens} is less than the {num_tokens} tokens of "
            f"{text[start:stop][:40]!r}; give at least that many",
            field="max_tokens",
        )
    return Chunk(
        text=text[start:stop], kind=kinds.at(start), start=start, stop=stop, num_tokens=num_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kinds:
    """Positions of fenced blocks and sentence ends in a text. The fenced blocks are in order."""

    text: str
    fence_starts: Sequence[int]
    fence_stops: Sequence[int]
    sentence_ends: frozenset[int]

    @classmethod
    def of(cls, text: str) -> _Kinds:
        fences = [found.span() for found in _FENCED.finditer(text)]
        return cls(
            text=text,
            fence_starts=[start for start, _ in fences],
            fence_stops=[stop for _, stop in fences],
            sentence_ends=frozenset(found.end() for found in _SENTENCE_END.finditer(text)),
        )

    def at(self, start: int) -> ChunkKind:
        fence = bisect_right(self.fence_starts, start) - 1
        if fence >= 0 and start < self.fence_stops[fence]:
            return "code"
        before = start
        while before and self.text[before - 1].isspace():
            before -= 1
        starts_line = not before or "\n" in self.text[before:start]
        if starts_line:
            return "heading" if _HEADING.match(self.text, start) else "paragraph"
        return "sentence" if before in self.sentence_ends else "fragment"
