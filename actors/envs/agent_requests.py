"""OpenAI's chat completions: the bodies that an agent sends and receives, without the network."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distill.chat.messages import Message
from distill.chat.template import check_messages, check_tools
from distill.engine import Sample
from distill.errors import DataError
from distill.types import StopReason

logger = logging.getLogger(__name__)

# What a request may say about sampling without an effect, with the values that change nothing:
# tokens are sampled from the policy's whole distribution at the run's temperature.
_WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    "temperature": (), "seed": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"), "reasoning_effort": (),
}  # fmt: skip
_MOST_CHOICES, _MOST_STOPS = 128, 16
_logged: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked request for chat completions.

    Attributes:
        messages: in normal form.
        tools: schemas in OpenAI's form; empty also for `tool_choice` "none".
        choices: `n`, the number of samples.
        max_tokens: longest sample; None: the run's `max_new_tokens`.
        with_usage: whether a stream ends with the number of tokens.
    """

    model: str
    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    choices: int
    max_tokens: int | None
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    with_usage: bool

    @classmethod
    def read(cls, body: object) -> ChatRequest:
        """The request of a parsed body. Logs once what it asks for without an effect.

        Raises:
            DataError: a field that is malformed, or asks for what the policy cannot give.
        """
        if not isinstance(body, dict):
            raise DataError("the body must be a JSON object")
        if body.get("functions") is not None:
            raise DataError("`functions` is deprecated; give `tools`", field="functions")
        if body.get("top_logprobs"):
            raise DataError("`top_logprobs` must be 0 or left out", field="top_logprobs")
        _log_without_effect(body)
        tools = () if body.get("tool_choice") == "none" else tuple(check_tools(body) or ())
        longest = body.get("max_completion_tokens", body.get("max_tokens"))
        options = body.get("stream_options")
        return cls(
            model=str(body.get("model") or "policy"),
            messages=check_messages(_with_content(body.get("messages")), "messages"),
            tools=tools,
            choices=_whole(body.get("n"), "n", _MOST_CHOICES) or 1,
            max_tokens=_whole(longest, "max_tokens", None),
            stops=_stops(body.get("stop")),
            logprobs=bool(body.get("logprobs")),
            stream=bool(body.get("stream")),
            with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )


def _with_content(messages: object) -> object:
    """The messages, with the content that clients leave out of an assistant's empty message."""
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


def _whole(value: object, field: str, most: int | None) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise DataError(
            f"`{field}` must be a whole number above 0{limit}, got {value!r}", field=field
        )
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise DataError(
            f"`stop` must be a text or at most {_MOST_STOPS} of them, got {value!r}", field="stop"
        )
    return tuple(stops)


def _log_without_effect(body: Mapping[str, Any]) -> None:
    asked = [
        name
        for name, harmless in _WITHOUT_EFFECT.items()
        if body.get(name) is not None and body[name] not in harmless
    ]
    new = [name for name in asked if name not in _logged]
    if new:
        _logged.update(new)
        logger.warning(
            "an agent asks for %s: no effect, the policy is sampled as the run says",
            ", ".join(f"{name}={json.dumps(body[name])[:80]}" for name in new),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatChoice:
    """One sample as an agent receives it.

    Attributes:
        pieces_T: text of each sampled token; empty if log-probs were not asked for.
    """

    message: Message
    sample: Sample
    pieces_T: Sequence[str] = ()

    @property
    def finish_reason(self) -> str:
        if self.sample.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def logprobs(self) -> dict[str, Any] | None:
        """Log-probs at the run's temperature."""
        if not self.pieces_T:
            return None
        return {
            "content": [
                {
                    "token": piece,
                    "logprob": float(logprob),
                    "bytes": [*piece.encode("utf-8", "replace")],
                    "top_logprobs": [],
                }
                for piece, logprob in zip(self.pieces_T, self.sample.logprobs_T, strict=True)
            ]
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to a request: as one body, or as the parts of a stream."""

    request: ChatRequest
    choices: Sequence[ChatChoice]
    prompt_tokens: int

    def body(self) -> dict[str, Any]:
        """A `chat.completion`."""
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **choice.message},
                "finish_reason": choice.finish_reason,
                "logprobs": choice.logprobs(),
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._head("chat.completion") | {"choices": choices, "usage": self._usage()}

    def parts(self) -> Iterator[dict[str, Any]]:
        """The `chat.completion.chunk`s: each choice whole, as it has been sampled when it comes."""
        head = self._head("chat.completion.chunk")
        for index, choice in enumerate(self.choices):
            delta = dict(choice.message)
            calls = delta.pop("tool_calls", ())
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            said = {"index": index, "delta": delta, "finish_reason": None}
            yield head | {"choices": [said | {"logprobs": choice.logprobs()}]}
            ended = {"index": index, "delta": {}, "finish_reason": choice.finish_reason}
            yield head | {"choices": [ended]}
        if self.request.with_usage:
            yield head | {"choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{uuid.uuid4().hex}"
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.request.model,
        }

    def _usage(self) -> dict[str, int]:
        sampled = sum(len(choice.sample.tokens_T) for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def models_body(names: Sequence[str]) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model_body(name) for name in names]}


def model_body(name: str) -> dict[str, Any]:
    """One model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "isotherm"}


def error_body(message: str, code: str | None, field: str | None) -> dict[str, Any]:
    """An error in the API's form."""
    return {
        "error": {
            "message": message, "type": "invalid_request_error", "param": field, "code": code,
        }
    }  # fmt: skip
