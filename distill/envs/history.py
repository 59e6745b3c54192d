"""Conversations stored by another program, which sends the whole history with each request.

The history of a request is compared, message by message, with the histories and answers of earlier
requests. The longest match is continued with its tokens as sampled (`distill.chat.conversation`);
sampled tokens are not encoded again. If no match covers all of the assistant's turns, the program
has rewritten its history: the remaining turns are encoded as received, and a new segment begins.

    (none) -- system, user -- [answer 1] -- tool -- [answer 2]         one node per answer
                                   \\-- tool, user -- [answer 3]       branches may be concurrent
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from distill.chat.conversation import Conversation
from distill.chat.messages import Message, parsed_json
from distill.chat.tool_calls import detect_format
from distill.engine import Sample
from distill.text.foreign import neutralised
from distill.types import Tokenizer

# Fields of a message that are passed to the chat template; clients add fields of their own.
_FIELDS = (
    "role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning",
)  # fmt: skip


class Histories:
    """All conversations of one episode, indexed by the messages that its program received.

    Attributes:
        rewritten: number of requests whose history has messages changed before or between answers
            that the program received.
        unmatched: number of requests with an assistant's message that the program never received.
        prefix_breaks: number of requests whose history the chat template renders differently from
            the sampled tokens (`Conversation.prefix_breaks`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._answered: dict[bytes, Conversation] = {}
        self._sent: set[bytes] = set()
        self.rewritten = self.unmatched = self.prefix_breaks = 0

    def match_request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> PendingAnswer:
        """Match a request with the conversations; its `observation_T` is what the model sees.

        Args:
            messages: at least one message, in normal form (`check_messages`).
            tools: schemas for the chat template.

        Raises:
            DataError: the chat template refuses the messages.
            ConfigError: there are tools, and the template does not support them.
        """
        given = [{name: m[name] for name in _FIELDS if name in m} for m in messages]
        keys = [_digest(b"", [*tools])]
        for message in given:
            keys.append(_digest(keys[-1], _compared(message)))
        known = max((i for i, key in enumerate(keys) if key in self._answered), default=0)
        self._count(given[known:])
        neutral = [self._neutral(message) for message in given]
        if known:
            conversation = self._answered[keys[known]].branch()
            breaks = len(conversation.prefix_breaks)
            conversation.add_messages(neutral[known:])
            self.prefix_breaks += len(conversation.prefix_breaks) - breaks
        else:
            tool_format = detect_format(self._tokenizer) if tools else None
            conversation = Conversation(
                self._tokenizer, neutral, tools=tools, tool_format=tool_format
            )
        return PendingAnswer(self, conversation, keys[-1], tools)

    def keep(self, key: bytes, message: Message, conversation: Conversation) -> None:
        """Record that the program received `message` as the answer to the history of `key`."""
        compared = _compared(message)
        self._sent.add(_digest(b"", compared))
        self._answered[_digest(key, compared)] = conversation

    def _count(self, rest: Sequence[Message]) -> None:
        """Classify and count a request by the messages that follow its longest match."""
        answers = [message for message in rest if message["role"] == "assistant"]
        if any(_digest(b"", _compared(message)) not in self._sent for message in answers):
            self.unmatched += 1
        elif answers:
            self.rewritten += 1

    def _neutral(self, message: dict[str, Any]) -> dict[str, Any]:
        """Remove the template's control tokens from a tool's result, as for our own tools."""
        if message["role"] != "tool":
            return message
        return message | {"content": neutralised(str(message.get("content", "")), self._tokenizer)}


class PendingAnswer:
    """A request that awaits samples; `to_message` converts a sample to a message.

    Attributes:
        observation_T: int32 ids that the model sees.
        messages, tools: messages and schemas from which `observation_T` was rendered.
    """

    def __init__(
        self,
        histories: Histories,
        conversation: Conversation,
        key: bytes,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self._histories, self._conversation, self._key = histories, conversation, key
        self.observation_T = conversation.observation_T
        self.messages, self.tools = conversation.messages, tools

    def to_message(self, sample: Sample, stops: Sequence[str] = ()) -> dict[str, Any]:
        """Convert a sample to the message for the program, in OpenAI's format.

        The thinking is in `reasoning_content`; calls that cannot be parsed stay in the content,
        which ends before the first of `stops`.
        """
        conversation = self._conversation.branch()
        conversation.add_sample(sample)
        message = dict(conversation.openai_messages[-1])
        content = str(message.get("content") or "")
        for stop in stops:
            content = content.partition(stop)[0]
        message["content"] = content
        self._histories.keep(self._key, message, conversation)
        return message


def _compared(message: Message) -> list[object]:
    """Parts of a message by which it is recognised in a later history.

    Clients drop the reasoning, and serialise a call's arguments again.
    """
    calls = [
        [call.get("id"), call["function"]["name"], parsed_json(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], message.get("content") or "", calls, message.get("tool_call_id")]


def _digest(before: bytes, value: object) -> bytes:
    written = json.dumps(value, sort_keys=True, ensure_ascii=True).encode()
    return blake2b(before + written, digest_size=16).digest()
