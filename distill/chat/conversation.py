"""Conversation with its exact tokens: the model's next observation after each turn.

Sampled tokens are never re-encoded. The next observation is the prompt that a server of this model
would build with the chat template. If the rendered text extends everything that the model saw and
sampled, the tokens are extended too. If the template renders a part of it differently, the whole
history is encoded again, and `distill.chat.segments` begins a new segment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distill.chat.continuation import added_text, added_tokens, served_continuation
from distill.chat.responses import Response, read_response, thinking_marks
from distill.chat.template import Message, chat_text, encode_chat
from distill.chat.token_text import agreement, decode
from distill.chat.tool_calls import (
    ParsedTurn,
    assistant_message,
    detect_format,
    parse_turn,
)
from distill.chat.tool_formats import ToolFormat
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason, TokenArray, Tokenizer

logger = logging.getLogger(__name__)

_SHOWN_BEFORE, _SHOWN_AFTER = 40, 80

NO_TEXT = "the sampled tokens do not decode to valid text"
BEFORE = "the template renders the messages before the turn differently"
TURN = "the template renders the turn differently from how it was sampled"
STOP = "the template does not render the stop token at the end of the turn"
JOIN = "the text after the turn cannot be encoded separately"

_logged: set[tuple[int, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBreak:
    """Break of the token prefix: the re-rendered history does not extend the model's tokens.

    Attributes:
        seen, served: the text that the model saw and the rendered text, both from shortly before
            they differ.
        reason: one of this module's `NO_TEXT`, `BEFORE`, `TURN`, `STOP`, `JOIN`.
    """

    seen: str
    served: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """Text and tokens of everything that the model saw and sampled since the last prefix break.

    `text[turn:]` is the text of the last turn, `text[stop:]` that of its stop token. `undecodable`
    is True if the turn's tokens do not decode to valid text.
    """

    text: str
    tokens_T: TokenArray
    turn: int
    stop: int
    undecodable: bool = False


_NOTHING = _Seen(text="", tokens_T=np.empty(0, np.int32), turn=0, stop=0)


class Conversation:
    """Messages of one episode so far, and the model's current observation. Not for concurrent use.

    Calls of `add_sample` and `add_messages` alternate. Without tools, a turn consists of content
    only.

    Raises:
        DataError: the chat template refuses the messages.
        ConfigError: there are tools, no `tool_format` is given, and none is detected from the
            template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        self._format: ToolFormat | None = tool_format
        if tools and tool_format is None:
            self._format = detect_format(tokenizer)
        self._added = added_tokens(tokenizer)
        self._marks = thinking_marks(tokenizer)
        self._response: Response | None = None
        self._prefix_breaks: list[PrefixBreak] = []
        self._calls = 0
        self._seen = _NOTHING
        self._last_turn: tuple[int, dict[str, Any]] | None = None  # index, plain text
        self._observe([dict(message) for message in messages])

    @property
    def observation_T(self) -> TokenArray:
        """Ids (int32) of the model's current observation. Outdated after `add_sample`."""
        return self._observation_T

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages so far, including the assistant's."""
        return list(self._messages)

    @property
    def openai_messages(self) -> list[Message]:
        """Messages so far in OpenAI's form, which may differ from the template's form."""
        return [self._marks.to_openai(message) for message in self._messages]

    @property
    def response(self) -> Response:
        """Last turn without tool calls, for rewards; its answer is empty if a call was cut off."""
        assert self._response is not None, "response: add_sample() comes first"
        return self._response

    @property
    def prefix_breaks(self) -> tuple[PrefixBreak, ...]:
        return tuple(self._prefix_breaks)

    def branch(self) -> Conversation:
        """Copy of the conversation that continues independently."""
        other = copy(self)
        other._prefix_breaks = list(self._prefix_breaks)
        return other

    def add_sample(self, sample: Sample) -> ParsedTurn:
        """Add the assistant's turn: its sampled tokens, and the message that they decode to.

        The message includes the thinking, including the part in the prompt, in the form that the
        chat template renders: in a separate field, or within the content as sampled.
        """
        assert self._sample_due, "add_messages() or replace() must come between two turns"
        response = read_response(self._tokenizer, self._observation_T, sample)
        parsed = self._parsed(response)
        self._seen = self._after(sample)
        self._sample_due = False
        self._calls += len(parsed.calls)
        parsed_response = self._marks.response(parsed.content, response.opening)
        cut = sample.stop_reason is StopReason.LENGTH and bool(parsed.calls or parsed.malformed)
        self._response = replace(parsed_response, answer="") if cut else parsed_response
        plain = self._marks.message(response)
        message = assistant_message(parsed)
        calls = message.get("tool_calls")
        message = self._marks.message(parsed_response) | {"tool_calls": calls} if calls else plain
        self._last_turn = (len(self._messages), plain)
        self._messages = [*self._messages, message]
        return parsed

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Add messages that follow a turn, such as tool results, and compute the next observation.

        Raises:
            DataError: the template refuses the messages, or they cannot be encoded. The
                conversation is then unchanged.
        """
        self._observe([*self._messages, *map(dict, messages)])

    def replace(self, messages: Sequence[Message]) -> None:
        """Replace the history with these messages, and compute the observation from them.

        Raises:
            DataError: see `add_messages`.
        """
        before = self._seen, self._last_turn
        self._seen, self._last_turn = _NOTHING, None
        try:
            self._observe([dict(message) for message in messages])
        except DataError:
            self._seen, self._last_turn = before
            raise

    def _observe(self, messages: list[dict[str, Any]]) -> None:
        text, messages = self._served(messages)
        reason, bridge_T = self._continued(text)
        if bridge_T is None:
            tokens_T = encode_chat(self._tokenizer, text)
            self._break_prefix(text, reason)
            self._seen = _NOTHING
        else:
            tokens_T = np.concatenate([self._seen.tokens_T, bridge_T])
        self._messages, self._text, self._observation_T = messages, text, tokens_T
        self._sample_due = True

    def _served(self, messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Render the messages; return the text and the messages that the template accepted.

        Tool calls that the template refuses (several in one turn) become plain text. Tool results
        that it refuses without their calls (gpt-oss) become user messages.
        """
        try:
            return self._rendered(messages), messages
        except DataError as refused:
            for plain in self._plainer(messages):
                with suppress(DataError):
                    return self._rendered(plain), plain
            raise refused

    def _plainer(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the messages with the last turn as plain text, then also with results as user's."""
        if self._last_turn is None:
            return
        at, plain = self._last_turn
        before, after = messages[:at], messages[at + 1 :]
        if messages[at] != plain:
            yield [*before, plain, *after]
        if self._format and any(message["role"] == "tool" for message in after):
            yield [*before, plain, *map(_as_user, after)]

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        return chat_text(
            self._tokenizer, messages, tools=self._tools or None, add_generation_prompt=True
        )

    def _continued(self, served: str) -> tuple[str, TokenArray | None]:
        """Return the reason for a prefix break, and the tokens that continue `_seen` or None."""
        seen = self._seen
        if seen.undecodable:
            return NO_TEXT, None
        if not served.startswith(seen.text):
            at = agreement(seen.text, served)
            return BEFORE if at < seen.turn else TURN if at < seen.stop else STOP, None
        rest = served[len(seen.text) :]
        bridge_T = served_continuation(self._tokenizer, seen.tokens_T, rest, added=self._added)
        return JOIN, bridge_T

    def _after(self, sample: Sample) -> _Seen:
        observation_T = self._observation_T
        sampled_T = np.asarray(sample.tokens_T, np.int32)
        text = added_text(self._tokenizer, observation_T, sampled_T)
        tokens = self._tokenizer.convert_ids_to_tokens(sampled_T.tolist())
        ended = sample.stop_reason is StopReason.EOS and len(sampled_T) > 0
        stop = decode(self._tokenizer, sampled_T[-1:]) if ended else ""
        whole = self._text + (text or "")
        return _Seen(
            text=whole,
            tokens_T=np.concatenate([observation_T, sampled_T]),
            turn=len(self._text),
            stop=len(whole) - len(stop),
            undecodable=text is None or "\ufffd" in text or any(token is None for token in tokens),
        )

    def _parsed(self, response: Response) -> ParsedTurn:
        text = response.sampled
        if self._format is None:
            return ParsedTurn(text=text, content=text)
        return parse_turn(
            text,
            self._format,
            self._tools,
            marks=self._marks,
            opened=bool(response.opening),
            first=self._calls,
        )

    def _break_prefix(self, served: str, reason: str) -> None:
        seen = self._seen
        at = seen.turn if reason == NO_TEXT else agreement(seen.text, served)
        shown = slice(max(0, at - _SHOWN_BEFORE), at + _SHOWN_AFTER)
        prefix_break = PrefixBreak(seen=seen.text[shown], served=served[shown], reason=reason)
        self._prefix_breaks.append(prefix_break)
        key = (hash(str(self._tokenizer.chat_template)), reason)
        if key not in _logged:
            _logged.add(key)
            logger.warning(
                "a conversation continues in a new segment: %s. Before: %r; now: %r",
                reason,
                prefix_break.seen,
                prefix_break.served,
            )


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    is_result = message["role"] == "tool"
    return {"role": "user", "content": message["content"]} if is_result else message
