"""OpenAI's chat completions API: parser of requests, and bodies of answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actors.envs.agent_requests import (
    AgentAnswer,
    AgentChoice,
    AgentRequest,
    Body,
    ChatPrompt,
    data_events,
    refuse_fields,
)
from distill.chat.template import check_messages, check_tools

_NOT_THERE = {
    "functions": "it is deprecated; give `tools`",
    "top_logprobs": "leave it out; `logprobs` returns those of the sampled tokens",
}


class ChatApi:
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def read(self, body: Body) -> AgentRequest:
        refuse_fields(body, _NOT_THERE)
        tools = () if body.get("tool_choice") == "none" else tuple(check_tools(body) or ())
        messages = check_messages(with_content(body.get("messages")), "messages")
        return AgentRequest.of(
            body,
            [ChatPrompt(messages=messages, tools=tools)],
            max_tokens=("max_completion_tokens", "max_tokens"),
            logprobs=bool(body.get("logprobs")),
        )

    def body(self, answer: AgentAnswer) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **choice.message},
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice),
            }
            for index, choice in enumerate(answer.choices)
        ]
        return answer.head("chatcmpl", "chat.completion") | {
            "choices": choices,
            "usage": answer.usage(),
        }

    def events(self, answer: AgentAnswer) -> Iterator[str]:
        return data_events(_chunks(answer))


def with_content(messages: object) -> object:
    """Add empty content to assistant messages from which the client omitted it."""
    if not isinstance(messages, list):
        return messages
    return [each | {"content": ""} if _is_empty(each) else each for each in messages]


def _is_empty(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and message.get("content") is None
        and not message.get("tool_calls")
    )


def _chunks(answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    """Chunks of an answer. Each choice is one chunk, because the answer is already complete."""
    head = answer.head("chatcmpl", "chat.completion.chunk")
    for index, choice in enumerate(answer.choices):
        delta = dict(choice.message)
        calls = delta.pop("tool_calls", ())
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        chunk = {"index": index, "delta": delta, "finish_reason": None}
        yield head | {"choices": [chunk | {"logprobs": _logprobs(choice)}]}
        ended = {"index": index, "delta": {}, "finish_reason": choice.finish_reason}
        yield head | {"choices": [ended]}
    if answer.request.with_usage:
        yield head | {"choices": [], "usage": answer.usage()}


def _logprobs(choice: AgentChoice) -> dict[str, Any] | None:
    return {"content": choice.logprobs()} if choice.pieces_T else None
