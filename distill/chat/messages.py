"""Normal form of chat messages, the input of every chat template.

Published rows have different forms: next to tool calls, `content` is null or absent; `tool_calls`
is null or empty; a call is nested or flat; arguments are an object or JSON text; and a column that
Arrow cannot type is JSON text as a whole. Servers convert messages to one form before they render
them, and so does `normal_message`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distill.errors import DataError

Message = Mapping[str, Any]
# Names of the field with an assistant's reasoning in different templates and servers.
REASONING = ("reasoning_content", "thinking", "reasoning")


def parsed_json(value: Any) -> Any:
    """Parse a string that is a JSON array or object; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def is_sharegpt(message: Message) -> bool:
    """True if a message is in ShareGPT's format, which is not read."""
    return {"from", "value"} <= message.keys()


def normal_message(message: Message, field: str = "a message") -> dict[str, Any]:
    """Convert a message to the normal form.

    Fields that are None and empty `tool_calls` are removed; absent `content` becomes an empty
    string; each tool call is {"type": "function", "function": {"name": ..., "arguments": ...}},
    with arguments that are an object or the JSON text of an object.

    Raises:
        DataError: a tool call has no name, or arguments that are not an object.
    """
    made = {name: value for name, value in message.items() if value is not None}
    made.setdefault("content", "")
    calls = parsed_json(made.pop("tool_calls", None))
    if calls:
        made["tool_calls"] = [
            _normal_call(parsed_json(call), f"{field}.tool_calls[{i}]")
            for i, call in enumerate(calls)
        ]
    return made


def _normal_call(call: Any, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"`{field}` must be an object, got {call!r}", field=field)
    made = {name: value for name, value in call.items() if value is not None}
    function = made.pop("function", None)
    if function is None:  # the flat shape
        function = {name: made.pop(name) for name in ("name", "arguments") if name in made}
    if not isinstance(function, Mapping):
        raise DataError(
            f"`{field}.function` must be an object, got {function!r}", field=f"{field}.function"
        )
    arguments = _normal_arguments(function.get("arguments"), field)
    if not isinstance(function.get("name"), str):
        raise DataError(
            f"`{field}` must have a `function` with a `name`, got {call!r}", field=field
        )
    return {"type": "function", **made, "function": {**function, "arguments": arguments}}


def _normal_arguments(arguments: Any, field: str) -> Mapping[str, Any] | str:
    """Arguments as an object or as its JSON text; text that was encoded twice is unwrapped."""
    text, value = None, {} if arguments is None or arguments == "" else arguments
    while isinstance(value, str):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"`{field}`: the `arguments` of a tool call are not JSON: {text[:40]!r}: {error}",
                field=field,
            ) from error
    if not isinstance(value, Mapping):
        raise DataError(
            f"`{field}`: the `arguments` of a tool call must be a JSON object, got {arguments!r}",
            field=field,
        )
    return value if text is None else text


def is_trained(message: Message) -> bool:
    """True if a loss on the conversation trains the message.

    All assistant messages are trained, except those with `weight: 0` (OpenAI's fine-tuning format)
    or `train: false`.

    Raises:
        DataError: `weight` or `train` has an invalid value.
    """
    if message["role"] != "assistant":
        return False
    weight, train = message.get("weight", 1), message.get("train", True)
    if weight not in (0, 1):
        raise DataError(f"`weight` of a message must be 0 or 1, got {weight!r}", field="weight")
    if not isinstance(train, bool):
        raise DataError(f"`train` of a message must be true or false, got {train!r}", field="train")
    return bool(weight) and train
