"""Requests of agents and their answers, in a form that is common to OpenAI's APIs; no network.

    agent_completions   chat completions, completions   \\
                                                         }   AgentRequest -> samples -> AgentAnswer
    agent_responses     responses                       /

An `Api` converts bodies to requests and answers to bodies. Everything else is the same for all APIs
and is done by `agent_endpoint`.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from distill.chat.messages import Message
from distill.engine import Sample
from distill.errors import DataError
from distill.sampling import EvalSampling, Sampling
from distill.types import StopReason

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]
ClientSampling = Literal["force", "refuse"]

# Sampling fields of a request that have no effect, because tokens are sampled from the policy's
# full distribution at the run's temperature. Each has the values that are accepted, in addition to
# the run's own value. A dot separates an object and its field.
_WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    "temperature": (), "seed": (), "top_p": (), "top_k": (-1,), "min_p": (0,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"), "reasoning_effort": (), "verbosity": (),
    "text.format": ({"type": "text"},), "text.verbosity": (), "reasoning.effort": (),
    "truncation": ("disabled",),
}  # fmt: skip
_MOST_CHOICES, _MOST_STOPS = 128, 16
_logged: set[str] = set()


class RefusedRequest(DataError):
    """Raised for a request that is refused with an API error; `code` is the API's error code."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, field=field)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Chat messages in normal form, and schemas of tools in OpenAI's form."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A checked request.

    Attributes:
        body: the original body.
        prompts: prompts, sampled separately; each is a chat, a text or token ids.
        choices: number of samples for each prompt.
        max_tokens: maximum number of tokens of a sample; None: the run's `max_new_tokens`.
        stops: texts that end a sample.
        with_usage: True if a stream ends with the numbers of tokens.
    """

    body: Body
    model: str
    prompts: Sequence[ChatPrompt | str | list[int]]
    choices: int
    max_tokens: int | None
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    with_usage: bool

    @classmethod
    def of(
        cls,
        body: Body,
        prompts: Sequence[ChatPrompt | str | list[int]],
        *,
        max_tokens: Sequence[str],
        logprobs: bool,
    ) -> AgentRequest:
        """Create a request from a body, with the fields that all APIs have.

        Args:
            max_tokens: names of the field with the maximum number of tokens; the first one that is
                present is used.

        Raises:
            DataError: a field is malformed.
        """
        longest = next((name for name in max_tokens if body.get(name) is not None), max_tokens[0])
        options = body.get("stream_options")
        return cls(
            body=body,
            model=str(body.get("model") or "policy"),
            prompts=prompts,
            choices=_whole(body, "n", _MOST_CHOICES) or 1,
            max_tokens=_whole(body, longest, None),
            stops=_stops(body.get("stop")),
            logprobs=logprobs,
            stream=bool(body.get("stream")),
            with_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChoice:
    """One sample as an agent receives it.

    Attributes:
        message: assistant message; it has only content if the prompt is not a chat.
        pieces_T: text of each sampled token; empty if log-probs were not requested.
    """

    message: Message
    sample: Sample
    pieces_T: Sequence[str] = ()

    @property
    def finish_reason(self) -> str:
        if self.sample.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def logprobs(self) -> list[dict[str, Any]]:
        """Log-probs of the sampled tokens at the run's temperature; empty if not requested."""
        logprobs_T = self.sample.logprobs_T if self.pieces_T else ()
        return [
            {
                "token": piece,
                "logprob": float(logprob),
                "bytes": [*piece.encode("utf-8", "replace")],
                "top_logprobs": [],
            }
            for piece, logprob in zip(self.pieces_T, logprobs_T, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """Answer to a request and to all its retries.

    Attributes:
        choices: choices of all prompts, in the order of the prompts.
        prompt_tokens: number of tokens of all prompts.
    """

    request: AgentRequest
    choices: Sequence[AgentChoice]
    prompt_tokens: int
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def sampled_tokens(self) -> int:
        return sum(len(choice.sample.tokens_T) for choice in self.choices)


class Api(Protocol):
    """One of OpenAI's APIs."""

    path: str

    def read(self, body: Body) -> AgentRequest:
        """Parse a body.

        Raises:
            DataError: a field is malformed, or requests a feature that is not supported.
        """
        ...

    def body(self, answer: AgentAnswer) -> dict[str, Any]:
        """Format an answer as one body."""
        ...

    def events(self, answer: AgentAnswer) -> Iterator[str]:
        """Format an answer as server-sent events, without the blank lines between them."""
        ...


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


def refuse_fields(body: Body, remedies: Mapping[str, str]) -> None:
    """Raise DataError if the body sets a field of `remedies`."""
    for name, remedy in remedies.items():
        if body.get(name) not in (None, False, 0, ""):
            raise DataError(f"`{name}` is not supported; {remedy}", field=name)


def check_sampling(body: Body, sampling: Sampling, client_sampling: ClientSampling) -> None:
    """Check the sampling fields of a request. Sampling always uses the settings of the run.

    Args:
        client_sampling: `force` overrides other values and logs each field once; `refuse` rejects
            the request.

    Raises:
        RefusedRequest: a field differs from the run's settings, with `refuse`.
    """
    decoder = sampling if isinstance(sampling, EvalSampling) else None
    own: dict[str, float] = {
        "temperature": sampling.temperature,
        "top_p": decoder.top_p if decoder else 1,
        "top_k": decoder.top_k if decoder else 0,
    }
    asked = {
        name: value
        for name, accepted in _WITHOUT_EFFECT.items()
        if (value := _found(body, name)) is not None and value not in (*accepted, own.get(name))
    }
    if asked and client_sampling == "refuse":
        name, value = next(iter(asked.items()))
        instead = f", or {own[name]:g} as in the run" if name in own else ""
        raise RefusedRequest(
            f"`{name}`={json.dumps(value)[:80]} differs from the run's sampling; leave it "
            f"out{instead} (or set env.client_sampling=force)",
            field=name,
            code="unsupported_value",
        )
    new = [name for name in asked if name not in _logged]
    if new:
        _logged.update(new)
        logger.warning(
            "an agent's request has %s, which is ignored: the run's sampling applies",
            ", ".join(f"{name}={json.dumps(asked[name])[:80]}" for name in new),
        )


def _found(body: Body, name: str) -> object:
    outer, _, inner = name.partition(".")
    value = body.get(outer)
    if not inner:
        return value
    return value.get(inner) if isinstance(value, dict) else None


def _whole(body: Body, name: str, most: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise DataError(
            f"`{name}` must be a whole number above 0{limit}, got {value!r}", field=name
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
            f"`stop` must be a text or a list of at most {_MOST_STOPS} texts, got {value!r}",
            field="stop",
        )
    return tuple(stops)
