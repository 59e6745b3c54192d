"""OpenAI's chat completions, and its completions of text or token ids without a chat template."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar

from actors.envs.agent_requests import (
    AgentAnswer,
    AgentChoice,
    AgentRequest,
    Body,
    ChatPrompt,
    refuse_fields,
    with_content,
)
from distill.chat.template import check_messages, check_tools
from distill.errors import DataError

# Fields that are refused, with the remedies.
_NOT_IN_CHATS = {
    "functions": "it is deprecated; give `tools`",
    "top_logprobs": "leave it out; `logprobs` returns those of the sampled tokens",
}
_NOT_IN_COMPLETIONS = {
    "echo": "the prompt is not returned, and its tokens get no log-probs; leave it out",
    "suffix": "the policy only continues a prompt; leave it out",
    "logprobs": "give 0, for those of the sampled tokens",
}


class _Completions(ABC):
    """The form that the answers of both APIs have.

    `names` are the prefix of an answer's id, and the kinds of an answer and of a chunk.
    """

    names: ClassVar[tuple[str, str, str]]

    def body(self, answer: AgentAnswer) -> dict[str, Any]:
        choices = [{"index": i, **self._choice(each)} for i, each in enumerate(answer.choices)]
        return self._head(answer, self.names[1]) | {"choices": choices, "usage": _usage(answer)}

    def events(self, answer: AgentAnswer) -> Iterator[str]:
        head = self._head(answer, self.names[2])
        for index, choice in enumerate(answer.choices):
            for part in self._parts(choice):
                yield _event(head | {"choices": [{"index": index, **part}]})
        if answer.request.with_usage:
            yield _event(head | {"choices": [], "usage": _usage(answer)})
        yield "data: [DONE]"

    def _head(self, answer: AgentAnswer, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.names[0]}-{answer.name}",
            "object": kind,
            "created": answer.created,
            "model": answer.request.model,
        }

    @abstractmethod
    def _choice(self, choice: AgentChoice) -> dict[str, Any]: ...

    def _parts(self, choice: AgentChoice) -> Iterator[dict[str, Any]]:
        """Chunks of a choice. The content is one chunk, because it is already complete."""
        yield self._choice(choice)


class ChatApi(_Completions):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"
    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def read(self, body: Body) -> AgentRequest:
        refuse_fields(body, _NOT_IN_CHATS)
        tools = () if body.get("tool_choice") == "none" else tuple(check_tools(body) or ())
        messages = check_messages(with_content(body.get("messages")), "messages")
        return AgentRequest.of(
            body,
            [ChatPrompt(messages=messages, tools=tools)],
            max_tokens=("max_completion_tokens", "max_tokens"),
            logprobs=bool(body.get("logprobs")),
        )

    def _choice(self, choice: AgentChoice) -> dict[str, Any]:
        return {
            "message": {"refusal": None, **choice.message},
            "finish_reason": choice.finish_reason,
            "logprobs": {"content": choice.logprobs()} if choice.pieces_T else None,
        }

    def _parts(self, choice: AgentChoice) -> Iterator[dict[str, Any]]:
        delta = dict(choice.message)
        calls = delta.pop("tool_calls", ())
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        logprobs = self._choice(choice)["logprobs"]
        yield {"delta": delta, "finish_reason": None, "logprobs": logprobs}
        yield {"delta": {}, "finish_reason": choice.finish_reason}


class CompletionsApi(_Completions):
    """/v1/completions."""

    path = "/v1/completions"
    names = ("cmpl", "text_completion", "text_completion")

    def read(self, body: Body) -> AgentRequest:
        refuse_fields(body, _NOT_IN_COMPLETIONS)
        if body.get("best_of") not in (None, body.get("n") or 1):
            raise DataError("`best_of` must equal `n`: all samples are trained", field="best_of")
        return AgentRequest.of(
            body,
            _prompts(body.get("prompt")),
            max_tokens=("max_tokens",),
            logprobs=body.get("logprobs") is not None,
        )

    def _choice(self, choice: AgentChoice) -> dict[str, Any]:
        logprobs = None
        if choice.pieces_T:
            logprobs = {
                "tokens": [*choice.pieces_T],
                "token_logprobs": [each["logprob"] for each in choice.logprobs()],
                "top_logprobs": None,
                "text_offset": [*accumulate(map(len, choice.pieces_T), initial=0)][:-1],
            }
        return {
            "text": choice.message["content"],
            "finish_reason": choice.finish_reason,
            "logprobs": logprobs,
        }


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str) or _is_tokens(value):
        return [value]  # pyright: ignore[reportReturnType]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(e, str) or _is_tokens(e) for e in value)
    ):
        return value
    raise DataError(
        f"`prompt` must be a text, token ids, or a list of such prompts, got {str(value)[:80]}",
        field="prompt",
    )


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id_) is int for id_ in value)


def _usage(answer: AgentAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
    }


def _event(part: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(part)}"
