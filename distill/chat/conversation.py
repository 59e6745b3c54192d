"""A conversation and the exact tokens behind it: what the model sees next, turn by turn.

What was sampled is never encoded again. The next observation is what a server of this model would
show it, so the chat template has the last word: where it goes on from all that the model saw and
said, so do the tokens; where it writes any of that otherwise, the history is encoded anew, and
`distill.chat.segments` opens a new segment with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.chat.continuation import added_text, added_tokens, served_continuation
from distill.chat.responses import read_response
from distill.chat.template import Message, chat_text, encode_chat
from distill.chat.thinking import Response, thinking_marks
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
from distill.types import StopReason, TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SHOWN_BEFORE, _SHOWN_AFTER = 40, 80

NO_TEXT = "the sampled tokens are not the tokens of any text"
BEFORE = "the template no longer writes what came before the turn as it did"
TURN = "the template writes the turn otherwise than it was sampled"
STOP = "the template does not write the stop token that the turn ended with"
JOIN = "what follows the turn cannot be encoded on its own"

_logged: set[tuple[int, str]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixBreak:
    """A place where the re-rendered template does not extend the token prefix.

    Attributes:
        turn: of the assistant's turns, the one after which it happened, from 0.
        seen, served: the model's text and the template's, from shortly before they part.
        reason: one of this module's `NO_TEXT`, `BEFORE`, `TURN`, `STOP`, `JOIN`.
    """

    turn: int
    seen: str
    served: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """All that the model saw and said since the last prefix break, as text and as tokens.

    The last turn's text is `text[turn:]`, its stop token's `text[stop:]`. `spoiled`: the tokens
    have no text of their own.
    """

    text: str
    tokens_T: TokenArray
    turn: int
    stop: int
    spoiled: bool = False


_NOTHING = _Seen(text="", tokens_T=np.empty(0, np.int32), turn=0, stop=0)


class Conversation:
    """Messages so far, and what the model sees now. One episode's; not for concurrent use.

    `said` and `hear` take turns. Without tools, a turn is content and nothing else.

    Raises:
        DataError: the chat template refuses the messages.
        ConfigError: there are tools, no `tool_format` is given, and the template tells none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
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
        self._turns = self._calls = 0
        self._seen = _NOTHING
        self._spoken: tuple[int, dict[str, Any]] | None = None  # its place, and it as plain text
        self._observe([dict(message) for message in messages])

    @property
    def observation_T(self) -> TokenArray:
        """int32 ids of all that the model sees now. After `said` it is out of date."""
        return self._observation_T

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, the assistant's included."""
        return list(self._messages)

    @property
    def messages_apart(self) -> list[Message]:
        """The messages so far in OpenAI's form, whatever the template takes."""
        return [self._marks.apart(message) for message in self._messages]

    @property
    def response(self) -> Response:
        """The last turn as it is judged: without tool calls, and without an answer if it was cut
        off within one."""
        assert self._response is not None, "response: said() comes first"
        return self._response

    @property
    def prefix_breaks(self) -> tuple[PrefixBreak, ...]:
        return tuple(self._prefix_breaks)

    def said(self, sample: Sample) -> ParsedTurn:
        """Adds the assistant's turn: its tokens as sampled, and what they say as a message.

        The message has the thinking, what the prompt opened included, where the chat template takes
        it: in a field of its own, or as it was sampled within the content.
        """
        assert self._listening, "said() again: hear() or replace() must come between two turns"
        response = read_response(self._tokenizer, self._observation_T, sample)
        parsed = self._parsed(response)
        self._seen = self._after(sample)
        self._listening = False
        self._turns += 1
        self._calls += len(parsed.calls)
        spoken = self._marks.response(parsed.content, response.opening)
        cut = sample.stop_reason is StopReason.LENGTH and bool(parsed.calls or parsed.malformed)
        self._response = replace(spoken, answer="") if cut else spoken
        plain = self._marks.message(response)
        message = assistant_message(parsed)
        calls = message.get("tool_calls")
        message = self._marks.message(spoken) | {"tool_calls": calls} if calls else plain
        self._spoken = (len(self._messages), plain)
        self._messages = [*self._messages, message]
        return parsed

    def hear(self, messages: Sequence[Message]) -> None:
        """Adds what came back, such as tools' results, and works out the next observation.

        Raises:
            DataError: the template refuses the messages, or they cannot be encoded; nothing is
                added.
        """
        self._observe([*self._messages, *map(dict, messages)])

    def replace(self, messages: Sequence[Message]) -> None:
        """The history is these messages from now on; what the model sees is rendered anew.

        Raises:
            DataError: as of `hear`.
        """
        before = self._seen, self._spoken
        self._seen, self._spoken = _NOTHING, None
        try:
            self._observe([dict(message) for message in messages])
        except DataError:
            self._seen, self._spoken = before
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
        self._listening = True

    def _served(self, messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """The template's text, and the messages that it takes.

        Tool calls that the template refuses (several at once) become plain text. Results that it
        refuses without their calls (gpt-oss) become the user's words.
        """
        try:
            return self._rendered(messages), messages
        except DataError as refused:
            for plain in self._plainer(messages):
                with suppress(DataError):
                    return self._rendered(plain), plain
            raise refused

    def _plainer(self, messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        """The messages with the last turn as plain text; then with its results as the user's."""
        if self._spoken is None:
            return
        at, plain = self._spoken
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
        """The tokens that follow what was seen; or why none can."""
        seen = self._seen
        if seen.spoiled:
            return NO_TEXT, None
        if not served.startswith(seen.text):
            at = agreement(seen.text, served)
            return BEFORE if at < seen.turn else TURN if at < seen.stop else STOP, None
        rest = served[len(seen.text) :]
        bridge_T = served_continuation(self._tokenizer, seen.tokens_T, rest, added=self._added)
        return JOIN, bridge_T

    def _after(self, sample: Sample) -> _Seen:
        observation_T = self._observation_T
        spoken_T = np.asarray(sample.tokens_T, np.int32)
        text = added_text(self._tokenizer, observation_T, spoken_T)
        tokens = self._tokenizer.convert_ids_to_tokens(spoken_T.tolist())
        ended = sample.stop_reason is StopReason.EOS and len(spoken_T) > 0
        stop = decode(self._tokenizer, spoken_T[-1:]) if ended else ""
        whole = self._text + (text or "")
        return _Seen(
            text=whole,
            tokens_T=np.concatenate([observation_T, spoken_T]),
            turn=len(self._text),
            stop=len(whole) - len(stop),
            spoiled=text is None or "\ufffd" in text or any(token is None for token in tokens),
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
        prefix_break = PrefixBreak(
            turn=self._turns - 1, seen=seen.text[shown], served=served[shown], reason=reason
        )
        self._prefix_breaks.append(prefix_break)
        key = (hash(str(self._tokenizer.chat_template)), reason)
        if key not in _logged:
            _logged.add(key)
            logger.warning(
                "a conversation goes on in a new segment: %s. The model had %r; it is shown %r",
                reason,
                prefix_break.seen,
                prefix_break.served,
            )


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    is_result = message["role"] == "tool"
    return {"role": "user", "content": message["content"]} if is_result else message
