"""Condensing of a long history to a token budget: by keywords, a model, or a custom function.

A condensed history does not extend the tokens that the model saw before, so the next turn begins a
new segment. The teacher scores that segment after the condensed history too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from distill.chat.responses import read_response
from distill.chat.template import Message, render_messages, render_text
from distill.engine import GenerateRequest, SamplingModel
from distill.errors import DataError
from distill.libraries import require_library
from distill.lookup import resolve_function
from distill.sampling import Sampling
from distill.text.bm25_words import words
from distill.text.chunks import Chunk, chunk_text, count_tokens, cut_text
from distill.text.foreign import neutralised
from distill.types import TokenArray, Tokenizer

if TYPE_CHECKING:
    import bm25s

# Beginning of the user message that replaces condensed messages.
SUMMARY_PREFIX = "Summary of the conversation so far: "
# Text between the summary and the list of blocks that can be read in full.
IN_FULL = "\n\nIn full, by the tool read_block:\n"
# Text between pieces that were not neighbours.
GAP = "\n[...]\n"
INSTRUCTION = (
    "Summarise the text below. Keep names, numbers, decisions and open questions; add nothing that "
    "it does not say; answer with the summary alone."
)
# Smallest chunk in tokens that `ModelCondenser` summarises.
LEAST_CHUNK = 16
# Smallest and largest size, in tokens, of the pieces that `KeywordCondenser` keeps or drops whole:
# a sentence or two.
_PIECE_TOKENS = 16, 48
# Number of a text's own terms that rank its pieces in addition to the focus.
_SALIENT_TERMS = 32
# A single thread, as for rewards: condensing takes long, and a user's function may not be
# thread-safe.
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="condense")


class Condenser(Protocol):
    """Condenses a text to at most `max_tokens` tokens, counted without special tokens.

    `focus` is the text that decides what matters: the question, or the latest message. It may be
    empty.

    Raises:
        DataError: the text cannot be condensed to this length.
    """

    async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str: ...


def load_condenser(name: str, tokenizer: Tokenizer, setting: str = "env.condenser") -> Condenser:
    """`keywords`, or the function at `package.module:function`, checked.

    The function takes (text, focus, max_tokens) and returns a string; it may be async.

    Raises:
        ConfigError: the name is unknown, the function cannot be imported or is not callable, or the
            library bm25s is missing.
    """
    if name == "keywords":
        require_library("bm25s", f"{setting}=keywords", "bm25s", setting)
        return KeywordCondenser(tokenizer=tokenizer)
    function = resolve_function(setting, name, ["keywords"])
    return CheckedCondenser(name=name, function=function, tokenizer=tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCondenser:
    """Condenser that calls a user's function and checks its result. Pickled by name.

    Raises:
        DataError: the function returned something other than a string, or exceeded the budget.
    """

    name: str
    function: Callable[[str, str, int], Any]
    tokenizer: Tokenizer

    async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str:
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(_THREAD, self.function, text, focus, max_tokens)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, str):
            raise DataError(
                f"condenser {self.name} returned {result!r}; it must return a string",
                field="condenser",
            )
        num_tokens = count_tokens(self.tokenizer, result)
        if num_tokens > max_tokens:
            raise DataError(
                f"condenser {self.name} returned {num_tokens} tokens, more than max_tokens="
                f"{max_tokens}; count with the model's tokenizer, and cut the text",
                field="condenser",
            )
        return result

    def __reduce__(self) -> tuple[Callable[..., Condenser], tuple[str, Tokenizer]]:
        return load_condenser, (self.name, self.tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeywordCondenser:
    """Condenser that keeps the pieces closest to the focus, verbatim, in order, joined by `[...]`.

    Pieces are ranked by BM25 against the focus, and pieces with equal scores by BM25 against the
    text's own salient terms, which are frequent in the text but occur in few of its pieces.

    Raises:
        DataError: `max_tokens` is less than a single character needs.
    """

    tokenizer: Tokenizer

    async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_THREAD, self.condense, text, focus, max_tokens)

    def condense(self, text: str, focus: str, max_tokens: int) -> str:
        """Condense a text in the caller's thread."""
        if count_tokens(self.tokenizer, text) <= max_tokens:
            return text
        least, most = _PIECE_TOKENS
        size = min(max(least, min(most, max_tokens // 4)), max_tokens)
        pieces = chunk_text(text, tokenizer=self.tokenizer, max_tokens=size)
        kept = self._affordable(pieces, _ranked(pieces, focus), max_tokens)
        condensed = _joined(text, pieces, kept)
        while count_tokens(self.tokenizer, condensed) > max_tokens:
            kept.pop()  # joined text may have more tokens than the sum over its parts
            condensed = _joined(text, pieces, kept)
        return condensed

    def _affordable(self, pieces: Sequence[Chunk], ranked: Sequence[int], budget: int) -> list[int]:
        """Indices of the best pieces that fit together, including gaps; the best first."""
        gap_tokens = count_tokens(self.tokenizer, GAP)
        kept: dict[int, None] = {}
        used = -gap_tokens  # there is one gap fewer than there are runs of neighbours
        for i in ranked:
            runs = 1 - (i - 1 in kept) - (i + 1 in kept)
            cost = pieces[i].num_tokens + runs * gap_tokens
            if used + cost <= budget:
                kept[i] = None
                used += cost
        return list(kept)


def _ranked(pieces: Sequence[Chunk], focus: str) -> list[int]:
    words_P = [words(piece.text) for piece in pieces]
    if not any(words_P):
        return list(range(len(pieces)))
    import bm25s

    index = bm25s.BM25()
    index.index(words_P, show_progress=False)
    focused_P = _scores(index, words(focus), len(pieces))
    salient_P = _scores(index, _salient(words_P), len(pieces))
    return np.lexsort((-salient_P, -focused_P)).tolist()  # stable: equal pieces keep their order


def _scores(index: bm25s.BM25, query: Sequence[str], num_pieces: int) -> np.ndarray:
    unique = list(dict.fromkeys(query))
    return index.get_scores(unique) if unique else np.zeros(num_pieces, np.float32)


def _salient(words_P: Sequence[Sequence[str]]) -> list[str]:
    occurrences = Counter(word for piece in words_P for word in piece)
    pieces_with = Counter(word for piece in words_P for word in set(piece))

    def salience(word: str) -> float:
        return occurrences[word] * math.log(len(words_P) / pieces_with[word])

    return sorted(occurrences, key=salience, reverse=True)[:_SALIENT_TERMS]


def _joined(text: str, pieces: Sequence[Chunk], kept: Sequence[int]) -> str:
    """Kept pieces in order; neighbours are joined by the original text between them."""
    parts: list[str] = []
    for i in sorted(kept):
        if i - 1 in kept:
            parts.append(text[pieces[i - 1].stop : pieces[i].stop])
        else:
            parts += [GAP, pieces[i].text] if parts else [pieces[i].text]
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class ModelCondenser:
    """Condenser that summarises chunks with a model, and then the summaries until they fit.

    A summary that exceeds its share of the budget is cut at a sentence's end. Thinking is removed.

    Attributes:
        sampler: the model that summarises.
        tokenizer: the model's tokenizer.
        sampling: sampling parameters; max_new_tokens must leave room for the summary, and for
            thinking if the model thinks.
        instruction: text before the focus and the chunk in each prompt.
        chunk_tokens: size of a chunk, at least LEAST_CHUNK. It must fit the model's context
            together with the instruction and the summary.

    Raises:
        DataError, EngineError: raised by the sampler.
    """

    sampler: SamplingModel
    tokenizer: Tokenizer
    sampling: Sampling
    instruction: str = INSTRUCTION
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        assert self.chunk_tokens >= LEAST_CHUNK

    async def __call__(self, text: str, *, focus: str, max_tokens: int) -> str:
        num_tokens = count_tokens(self.tokenizer, text)
        if num_tokens <= max_tokens:
            return text
        chunks = chunk_text(text, tokenizer=self.tokenizer, max_tokens=self.chunk_tokens)
        # At least a quarter of a chunk, because much shorter summaries would be meaningless.
        share = max(max_tokens // len(chunks), min(max_tokens, self.chunk_tokens // 4))
        summaries = await asyncio.gather(*(self._summary(c.text, focus, share) for c in chunks))
        joined = "\n\n".join(filter(None, summaries))
        if len(chunks) * share <= max_tokens or count_tokens(self.tokenizer, joined) >= num_tokens:
            return cut_text(joined, tokenizer=self.tokenizer, max_tokens=max_tokens)
        return await self(joined, focus=focus, max_tokens=max_tokens)

    async def _summary(self, text: str, focus: str, max_tokens: int) -> str:
        request = GenerateRequest(
            prompt_tokens_T=self._prompt(text, focus, max_tokens),
            sampling=self.sampling,
            num_samples=1,
            seed=0,
        )
        [sample] = await self.sampler.generate(request)
        response = read_response(self.tokenizer, request.prompt_tokens_T, sample)
        answer = neutralised(response.answer.strip(), self.tokenizer)
        return cut_text(answer, tokenizer=self.tokenizer, max_tokens=max_tokens)

    def _prompt(self, text: str, focus: str, max_tokens: int) -> TokenArray:
        parts = [f"{self.instruction} Write at most {max_tokens} tokens."]
        if focus:
            parts.append(f"What matters most is what bears on this:\n{focus}")
        parts.append(f"Text:\n{text}")
        prompt = "\n\n".join(parts)
        if self.tokenizer.chat_template:
            return render_messages(self.tokenizer, [{"role": "user", "content": prompt}])
        return render_text(self.tokenizer, f"{prompt}\n\nSummary:\n")


class TooLongToCondense(DataError):
    """Error for a history whose fixed messages exceed the token budget."""


async def condense_history(
    messages: Sequence[Message],
    *,
    condenser: Condenser,
    tokenizer: Tokenizer,
    max_tokens: int,
    keep_last: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    keep_blocks: Callable[[Sequence[Message], int], str] | None = None,
) -> list[Message]:
    """Condense messages to at most `max_tokens` rendered tokens, including the generation prompt.

    Messages that fit are returned unchanged. Otherwise the system message and the last `keep_last`
    messages stay, together with the calls that belong to tool results among them. All messages
    between are replaced by one user message: `SUMMARY_PREFIX` and the condenser's summary, with the
    latest user message that stays as its focus.

    Args:
        keep_last: number of messages to keep. If the template requires user and assistant to
            alternate, this must be even when the last message is the user's.
        tools: schemas for the chat template.
        keep_blocks: called with the condensed messages and a number of tokens, at most half of the
            summary's budget; stores the messages and returns a list of them of at most that length,
            which is put after the summary. None: no list.

    Raises:
        TooLongToCondense: the messages that must stay exceed `max_tokens`, or leave too few tokens
            for a summary.
        DataError: the template refuses the messages.
    """

    def num_tokens(given: Sequence[Message]) -> int:
        return len(render_messages(tokenizer, given, tools=tools))

    assert keep_last >= 0
    total = num_tokens(messages)
    if total <= max_tokens:
        return list(messages)
    head, middle, tail = _split_messages(messages, keep_last)
    fixed = num_tokens([*head, _summary_message(""), *tail]) if middle else total
    if fixed > max_tokens:
        raise TooLongToCondense(
            f"max_tokens={max_tokens} is less than the {fixed} tokens that cannot be condensed: a "
            f"system prompt of {_content_tokens(tokenizer, head)}, the last {len(tail)} messages "
            f"with {_content_tokens(tokenizer, tail)}, and the text of the template; give more "
            "tokens, a shorter system prompt, or a smaller keep_last"
        )
    budget, summary, listed = max_tokens - fixed, "", ""
    if keep_blocks is not None and middle:
        room = budget // 2 - count_tokens(tokenizer, IN_FULL)
        if listing := keep_blocks(middle, max(0, room)):
            listed = IN_FULL + listing
            budget -= count_tokens(tokenizer, listed)
    if budget > 0:
        text = "\n\n".join(map(transcript, middle))
        try:
            summary = await condenser(text, focus=_focus(tail or messages), max_tokens=budget)
        except DataError as error:
            raise TooLongToCondense(
                f"max_tokens={max_tokens} is less than the {fixed} tokens that cannot be "
                f"condensed, plus a summary of the rest ({error})"
            ) from error
        summary = cut_text(summary, tokenizer=tokenizer, max_tokens=budget)
    condensed = [*head, _summary_message(summary + listed), *tail]
    while (excess := num_tokens(condensed) - max_tokens) > 0:
        budget -= excess  # text may have more tokens within the template than by itself
        if budget <= 0 and listed:
            budget += count_tokens(tokenizer, listed)
            listed = ""
        summary = cut_text(summary, tokenizer=tokenizer, max_tokens=budget)
        condensed = [*head, _summary_message(summary + listed), *tail]
    return condensed


def _split_messages(
    messages: Sequence[Message], keep_last: int
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split messages into the system message, those to condense, and the last ones that stay."""
    head = 1 if messages and messages[0]["role"] in ("system", "developer") else 0
    stays = max(head, len(messages) - keep_last)
    while head < stays < len(messages) and messages[stays]["role"] == "tool":
        stays -= 1
    return list(messages[:head]), list(messages[head:stays]), list(messages[stays:])


def is_summary(message: Message) -> bool:
    """True for a user message that replaces condensed messages."""
    content = str(message.get("content") or "")
    return message["role"] == "user" and content.startswith(SUMMARY_PREFIX)


def _summary_message(summary: str) -> Message:
    return {"role": "user", "content": SUMMARY_PREFIX + summary}


def transcript(message: Message) -> str:
    """Message as text; for a message of condensed messages, only its summary."""
    content = str(message.get("content") or "")
    if is_summary(message):
        content = content.removeprefix(SUMMARY_PREFIX).partition(IN_FULL)[0]
    calls = [
        json.dumps(c.get("function", c), ensure_ascii=False)
        for c in message.get("tool_calls") or ()
    ]
    return "\n".join([f"{message['role']}: {content}", *(f"calls {call}" for call in calls)])


def _focus(messages: Sequence[Message]) -> str:
    """Content of the last user message or, if there is none, of the last message."""
    user_messages = [m for m in messages if m["role"] == "user"] or messages
    return str(user_messages[-1].get("content") or "")


def _content_tokens(tokenizer: Tokenizer, messages: Sequence[Message]) -> int:
    return sum(count_tokens(tokenizer, str(m.get("content") or "")) for m in messages)
