"""Execution of a model's tool calls: every call gets an answer, and none ends the episode.

call ── known? ── arguments fit? ── tool, for at most timeout_s ── text
                                                                    │ cut by characters
              message of role "tool" ── cut by tokens ── neutral ── encodable
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distill.chat.template import Message
from distill.chat.tool_readers import ToolCall
from distill.errors import IsothermError
from distill.json_values import loads, require_plain
from distill.lookup import known_names
from distill.text.foreign import encodable, longest_prefix, neutralised
from distill.tools.base import Tool, ToolError
from distill.types import Tokenizer

Failure = Literal["unknown", "arguments", "failed", "timeout"]

# Hardly any token is longer. Text is cut by characters first, because tokenising megabytes is slow.
_CHARACTERS_PER_TOKEN = 32
_LONGEST_NAME = 64
_LONGEST_COMPLAINT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of one call: its duration and the size of its result."""

    timeout_s: float = 30.0
    max_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """Result of a call.

    Attributes:
        message: message for the model.
        error: kind of failure; None if the call succeeded.
        seconds: duration of the call.
        truncated: True if the result was longer than `max_tokens`.
        neutralised: True if the result contained control tokens of the chat template.
    """

    message: Message
    error: Failure | None
    seconds: float
    truncated: bool
    neutralised: bool


class _RefusedCall(Exception):
    """A call without a result; the message is for the model."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure: Failure = failure


async def run_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    limits: ToolLimits,
    tokenizer: Tokenizer,
) -> list[ToolOutcome]:
    """Run all calls concurrently; return the outcomes in the order of the calls.

    The model sees the message of any exception of a tool. A tool that blocks the event loop is not
    interrupted; `function_tool` runs blocking functions in threads.

    Raises:
        IsothermError: a tool is configured wrongly, which the model cannot correct.
    """
    return list(await asyncio.gather(*(_run(call, tools, limits, tokenizer) for call in calls)))


async def _run(
    call: ToolCall,
    tools: Mapping[str, Tool],
    limits: ToolLimits,
    tokenizer: Tokenizer,
) -> ToolOutcome:
    began = time.monotonic()
    failure: Failure | None = None
    try:
        tool = _known(call.name, tools)
        result = await _result(tool, _checked_arguments(call, tool), limits.timeout_s)
    except _RefusedCall as refused:
        failure, result = refused.failure, f"Error: {refused}"
    seconds = time.monotonic() - began
    content, truncated, changed = _content(result, limits.max_tokens, tokenizer)
    # The model wrote the name and the id, and the template renders them.
    message = {
        "role": "tool",
        "name": neutralised(call.name[:_LONGEST_NAME], tokenizer),
        "content": content,
    }
    if call.id is not None:
        message["tool_call_id"] = neutralised(call.id, tokenizer)
    return ToolOutcome(
        message=message,
        error=failure,
        seconds=seconds,
        truncated=truncated,
        neutralised=changed,
    )


def _known(name: str, tools: Mapping[str, Tool]) -> Tool:
    if name in tools:
        return tools[name]
    short = name[:_LONGEST_NAME]
    raise _RefusedCall("unknown", f"there is no tool named {short!r}; {known_names(short, tools)}")


# Keywords by which a schema may accept arguments that its `properties` do not name.
_MORE_NAMES = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")


def _checked_arguments(call: ToolCall, tool: Tool) -> dict[str, Any]:
    """Return the arguments if they fit the tool's schema; else raise _RefusedCall."""
    if isinstance(call.arguments, str):
        raise _RefusedCall("arguments", _not_an_object(call.arguments, tool))
    arguments = dict(call.arguments)
    known = tool.parameters.get("properties", {})
    if isinstance(known, Mapping) and not any(key in tool.parameters for key in _MORE_NAMES):
        for name in arguments:
            if name not in known:
                problem = f"{tool.name} has no argument {str(name)[:_LONGEST_NAME]!r}"
                raise _RefusedCall("arguments", f"{problem}; {known_names(str(name), known)}")
    try:
        require_plain(arguments)
    except ValueError as error:
        raise _RefusedCall(
            "arguments", f"the arguments of {tool.name} are wrong: {error}"
        ) from error
    from distill.json_schemas import mismatch  # its library: only runs with tools need it

    if wrong := mismatch(arguments, tool.parameters):
        raise _RefusedCall("arguments", f"the arguments of {tool.name} are wrong: {wrong}")
    return arguments


def _not_an_object(text: str, tool: Tool) -> str:
    """Error message for a call whose arguments are the text `text`."""
    start = f"the arguments of {tool.name} must be a JSON object"
    try:
        value = loads(text)
    except ValueError as error:
        return f"{start}, and are not JSON: {error}"
    kind = "a JSON object within text" if isinstance(value, dict) else f"a {type(value).__name__}"
    return f"{start}, got {kind}: {text[:_LONGEST_NAME]}"


async def _result(tool: Tool, arguments: dict[str, Any], timeout_s: float) -> str:
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return str(await tool(arguments))
    except ToolError as error:
        raise _RefusedCall("failed", str(error)) from error
    except IsothermError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # This task was not cancelled: the tool awaited something that was cancelled.
        raise _RefusedCall("failed", f"{tool.name} was cancelled") from error
    except (Exception, SystemExit) as error:  # the tool is the user's: it may raise anything
        if isinstance(error, TimeoutError) and clock.expired():
            message = f"{tool.name} took longer than {timeout_s:g} s and was stopped"
            raise _RefusedCall("timeout", message) from error
        line = str(error).strip().split("\n", 1)[0]
        message = f"{type(error).__name__}: {line}"[:_LONGEST_COMPLAINT]
        raise _RefusedCall("failed", f"{tool.name} failed: {message}") from error


def _content(text: str, max_tokens: int, tokenizer: Tokenizer) -> tuple[str, bool, bool]:
    """Return the text for the model, whether it was cut, and whether it had control tokens."""
    start = encodable(text[: max_tokens * _CHARACTERS_PER_TOKEN], tokenizer)
    neutral = neutralised(start, tokenizer)
    kept = longest_prefix(neutral, max_tokens, tokenizer)
    if len(text) == len(start) and kept == neutral:
        return kept, False, neutral != start
    note = f"\n[cut: the first {min(len(kept), len(text) - 1)} of {len(text)} characters]"
    return kept + encodable(note, tokenizer), True, neutral != start
