"""Chat templates: from a prompt or a conversation to the text and the tokens a model sees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.errors import DataError
from distill.types import TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenArray:
    """A plain string as it stands, with whatever special tokens the tokenizer itself adds.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    return np.asarray(encode(tokenizer, text, add_special_tokens=True), dtype=np.int32)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`.

    Raises:
        DataError: a character that the tokenizer does not know, or that is no character.
    """
    try:
        return tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # tokenizers raises bare Exceptions; a lone surrogate, TypeError
        raise DataError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> TokenArray:
    """Chat messages through the model's own template, up to where the assistant speaks.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    text = chat_text(tokenizer, messages, tools=tools, add_generation_prompt=True)
    return encode_chat(tokenizer, text)


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenArray:
    """Tokens of what a chat template wrote, which has its special tokens in it already.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    return np.asarray(encode(tokenizer, text, add_special_tokens=False), dtype=np.int32)


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
) -> str:
    """The messages as text, by the tokenizer's chat template.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the messages, or the
            arguments of a tool call are not JSON.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "there are chat messages but the tokenizer has no chat template; give plain strings "
            "in `prompt`, or a tokenizer with a template"
        )
    given = [_for_template(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            given,
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
    except Exception as error:  # jinja2 raises whatever the template's author chose
        raise DataError(f"the chat template refuses these messages: {error}") from error
    return str(text)


def _for_template(message: Message) -> dict[str, Any]:
    """The arguments of tool calls as objects, where OpenAI's format has them as JSON text.

    Templates print them as JSON; servers parse them for the same reason.
    """
    if not message.get("tool_calls"):
        return dict(message)
    return {**message, "tool_calls": [_with_parsed_arguments(c) for c in message["tool_calls"]]}


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError as error:
        raise DataError(
            f"the `arguments` of a tool call are not JSON: {function['arguments'][:40]!r}: {error}"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


# Roles of other formats, by which a template would write another turn than is meant, or none.
_OPENAI_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}


def check_messages(value: object, field: str) -> list[Message]:
    """`value` as chat messages in OpenAI's format: role, and content or tool calls.

    Content that is a list of parts, {"type": "text", "text": ...}, is their text, joined.

    Raises:
        DataError: names the field and the message that is not one.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"`{field}` must be a non-empty list, got {value!r}")
    messages: list[Message] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"`{field}[{i}]` must be an object with a `role`, got {message!r}")
        if (role := _OPENAI_ROLES.get(message["role"])) is not None:
            raise DataError(
                f'`{field}[{i}].role` is "{message["role"]}", as other formats have it; write '
                f'"{role}"'
            )
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            content = _joined(content, f"{field}[{i}].content")
            message = {**message, "content": content}
        if not isinstance(content, str) and not (content is None and calls):
            raise DataError(
                f"`{field}[{i}].content` must be a string or a list of text parts, and may be left "
                f"out beside `tool_calls` only; got {content!r}"
            )
        if calls is not None and not (
            isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
        ):
            raise DataError(f"`{field}[{i}].tool_calls` must be a list of objects, got {calls!r}")
        messages.append(message)
    return messages


def _joined(parts: Sequence[object], field: str) -> str:
    for i, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f'`{field}[{i}]` must be {{"type": "text", "text": ...}}, got a part of type '
                f"{kind!r}: models of text see text only; leave the row out"
            )
    return "".join(part["text"] for part in parts if isinstance(part, dict))


def check_tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The row's `tools`, JSON schemas that go to the chat template; None where it has none.

    Raises:
        DataError: it is not a list of objects.
    """
    tools = row.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise DataError(f"`tools` must be a list of objects (JSON schemas), got {tools!r}")
    return tools


def check_text(row: Mapping[str, Any], field: str) -> str:
    """The row's `field`, a non-empty string.

    Raises:
        DataError: it is not.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"`{field}` must be a non-empty string, got {value!r}")
    return value


def check_vocabulary(tokens_T: TokenArray, vocab_size: int) -> None:
    """Every id is one of the model's.

    Raises:
        DataError: the tokenizer knows an id that the model does not.
    """
    if tokens_T.max() >= vocab_size:
        raise DataError(
            f"the tokenizer gives id {tokens_T.max()}, outside the model's vocabulary of "
            f"{vocab_size}; tokenizer and model do not belong together"
        )
