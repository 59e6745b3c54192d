"""OpenAI's completions API: prompts of text or of token ids, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from actors.envs.agent_requests import (
    AgentAnswer,
    AgentChoice,
    AgentRequest,
    Body,
    data_events,
    refuse_fields,
)
from distill.errors import DataError

_NOT_THERE = {
    "echo": "the prompt is not returned, and its tokens get no log-probs; leave it out",
    "suffix": "the policy only continues a prompt; leave it out",
    "logprobs": "give 0, for those of the sampled tokens",
}
_HEAD = ("cmpl", "text_completion")


class CompletionsApi:
    """/v1/completions."""

    path = "/v1/completions"

    def read(self, body: Body) -> AgentRequest:
        refuse_fields(body, _NOT_THERE)
        if body.get("best_of") not in (None, body.get("n") or 1):
            raise DataError("`best_of` must equal `n`: all samples are trained", field="best_of")
        return AgentRequest.of(
            body,
            _prompts(body.get("prompt")),
            max_tokens=("max_tokens",),
            logprobs=body.get("logprobs") is not None,
        )

    def body(self, answer: AgentAnswer) -> dict[str, Any]:
        choices = [_choice(index, choice) for index, choice in enumerate(answer.choices)]
        return answer.head(*_HEAD) | {"choices": choices, "usage": answer.usage()}

    def events(self, answer: AgentAnswer) -> Iterator[str]:
        return data_events(_chunks(answer))


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


def _choice(index: int, choice: AgentChoice) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.message["content"],
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice),
    }


def _logprobs(choice: AgentChoice) -> dict[str, Any] | None:
    if not choice.pieces_T:
        return None
    ends = [*accumulate(map(len, choice.pieces_T), initial=0)]
    return {
        "tokens": [*choice.pieces_T],
        "token_logprobs": [each["logprob"] for each in choice.logprobs()],
        "top_logprobs": None,
        "text_offset": ends[:-1],
    }


def _chunks(answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    """Chunks of an answer. Each choice is one chunk, because the answer is already complete."""
    for index, choice in enumerate(answer.choices):
        yield answer.head(*_HEAD) | {"choices": [_choice(index, choice)]}
    if answer.request.with_usage:
        yield answer.head(*_HEAD) | {"choices": [], "usage": answer.usage()}
