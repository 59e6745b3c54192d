"""Chat templates: rendering of prompts and conversations to the text and tokens of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np

from distill.chat.messages import REASONING, Message, is_sharegpt, normal_message, parsed_json
from distill.errors import DataError
from distill.types import TokenArray, Tokenizer

# Attribute of a tokenizer, and variable of templates, with the time that templates use as now.
_CHAT_TIME = "chat_time"
# `strftime_now` as a macro, since transformers 5.22 and later passes templates plain data but no
# functions. The macro replaces the codes of a format by their texts. It ends with a line break, so
# the template after it still begins at the start of a line.
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{% for part in format.split('%%') %}"
    "{% set shown = namespace(text=part) %}{% for code, text in chat_time.items() %}"
    "{% set shown.text = shown.text.replace(code, text) %}{% endfor %}"
    "{{ shown.text }}{{ '' if loop.last else '%' }}{% endfor %}{% endmacro %}\n"
)


def render_text(tokenizer: Tokenizer, text: str) -> TokenArray:
    """Tokens of a plain string, with the special tokens that the tokenizer puts before any text.

    These special tokens are not repeated if the text itself begins with them, like the output of a
    chat template. Special tokens that the tokenizer appends (EOS) are left out, because a prompt is
    to be continued.

    Raises:
        DataError: the tokenizer cannot encode the text.
    """
    encoded = _encoded(tokenizer, text, return_special_tokens_mask=True)
    ids_T = np.asarray(encoded["input_ids"], np.int32)
    added_T = np.asarray(encoded["special_tokens_mask"], np.bool_)
    if added_T.all():
        return ids_T[:0]
    plain_T, before_T = ids_T[~added_T], ids_T[: np.argmin(added_T)]
    has_them = np.array_equal(plain_T[: len(before_T)], before_T)
    return plain_T if has_them else np.concatenate([before_T, plain_T])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text`, without special tokens that the tokenizer would add.

    Raises:
        DataError: the tokenizer does not support a character, or one is invalid (a surrogate).
    """
    return _encoded(tokenizer, text, add_special_tokens=False)["input_ids"]


def _encoded(tokenizer: Tokenizer, text: str, **options: Any) -> Mapping[str, Any]:
    try:
        return tokenizer(text, **options)
    except Exception as error:  # tokenizers raises bare Exceptions, or TypeError for surrogates
        broken = re.search("[\ud800-\udfff]", text)
        if broken:
            at = broken.start()
            raise DataError(
                f"the text has {broken[0]!r} in {text[max(0, at - 20) : at + 20]!r}, which is half "
                "of a character (a surrogate without its partner), so it cannot be encoded; "
                "remove it, or leave the row out",
                value=broken[0],
            ) from error
        raise DataError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from error


def render_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> TokenArray:
    """Tokens of chat messages, rendered with the model's template and its generation prompt.

    If the last message is the assistant's, the tokens end within it, so that it is continued.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the messages, or the
            last message is a tool call of the assistant, which cannot be continued.
    """
    begun = is_begun(messages)
    text = chat_text(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=not begun,
        continue_final_message=begun,
    )
    return encode_chat(tokenizer, text)


def is_begun(messages: Sequence[Message]) -> bool:
    """True if the last message is the assistant's, which means that it is to be continued.

    Raises:
        DataError: the last message has tool calls, but no message has their results.
    """
    last = messages[-1]
    if last.get("role") != "assistant":
        return False
    if last.get("tool_calls"):
        raise DataError(
            "the last message is a tool call of the assistant, without a `tool` message that has "
            "the result; add the result, or drop the call"
        )
    return True


def answered(messages: Sequence[Message], answer: str | Message) -> list[Message]:
    """Messages with the assistant's answer, as a new message or as the end of the begun one."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    if not is_begun(messages):
        return [*messages, message]
    *before, begun = messages
    return [*before, {**begun, **message, "content": begun["content"] + message["content"]}]


def encode_chat(tokenizer: Tokenizer, text: str) -> TokenArray:
    """Tokens of a rendered chat; no special tokens are added, because the text includes them.

    Raises:
        DataError: the tokenizer cannot encode the text.
    """
    return np.asarray(encode(tokenizer, text), dtype=np.int32)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
) -> str:
    """Render messages, in normal form, with the tokenizer's chat template.

    The role `developer` becomes `system` if the template does not support it.

    Args:
        continue_final_message: True: the text ends after the content of the last message, without
            the end of its turn.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the messages, or the
            arguments of a tool call are not JSON.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "there are chat messages but the tokenizer has no chat template; give plain strings "
            "in `prompt`, or chat_template=FILE",
            field="model.chat_template",
        )
    template = str(tokenizer.chat_template)
    given = [_as_known(normal_message(message), template) for message in messages]
    settings = {
        "tools": [dict(tool) for tool in tools] if tools else None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    calls = [call["function"] for m in given for call in m.get("tool_calls", ())]
    if not calls:
        return _written(tokenizer, given, settings)
    return _with_calls(tokenizer, given, [call["arguments"] for call in calls], settings)


def _with_calls(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    arguments: Sequence[Mapping[str, Any] | str],
    settings: Mapping[str, Any],
) -> str:
    """Render with `arguments` of calls as objects, or as JSON text if the template requires text.

    Most templates print an object as JSON. DeepSeek's templates concatenate a text and refuse an
    object. A template that interpolates a text prints an object as Python does, which is detected
    here.
    """
    try:
        written = _written(tokenizer, _with_arguments(messages, _as_object), settings)
    except DataError as error:
        try:
            return _written(tokenizer, _with_arguments(messages, _as_text), settings)
        except DataError:
            raise error from error.__cause__
    objects = [str(_as_object(each)) for each in arguments if _as_object(each)]
    if not any(each in written for each in objects):
        return written
    texts = _written(tokenizer, _with_arguments(messages, _as_text), settings)
    return written if any(each in texts for each in objects) else texts


def set_chat_time(tokenizer: Tokenizer, time: datetime) -> None:
    """Set the date that chat templates print. The setting is kept when the tokenizer is pickled."""
    vars(tokenizer)[_CHAT_TIME] = time


def _written(tokenizer: Tokenizer, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
    conversation: Any = [*messages]
    template = tokenizer.get_chat_template(None, settings["tools"])
    dated = {}
    if "strftime_now" in template:
        # Without `set_chat_time`, the time of the tokenizer's first chat is kept, so that the date
        # does not change at midnight.
        time: datetime = vars(tokenizer).setdefault(_CHAT_TIME, datetime.now())
        codes = set(re.findall("%[-_0^#]?[A-Za-z]", template))
        dated[_CHAT_TIME] = {code: time.strftime(code) for code in codes}
        template = _STRFTIME_NOW + template
    try:
        text = tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, **dated, **settings
        )
    except Exception as error:  # templates may raise any error
        raise DataError(
            f"the chat template refuses these messages: {error}", field="model.chat_template"
        ) from error
    return str(text)


def _with_arguments(
    messages: Sequence[Message], form: Callable[[Mapping[str, Any] | str], Any]
) -> list[Message]:
    made = []
    for message in messages:
        if "tool_calls" in message:
            calls = [
                {**call, "function": {**function, "arguments": form(function["arguments"])}}
                for call in message["tool_calls"]
                for function in (call["function"],)
            ]
            message = {**message, "tool_calls": calls}
        made.append(message)
    return made


def request_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages for a chat endpoint: normal form with arguments as JSON text, no training marks."""
    given = [normal_message(message) for message in messages]
    asked = [{name: m[name] for name in m if name not in ("weight", "train")} for m in given]
    return _with_arguments(asked, _as_text)


def _as_object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@cache
def _known(template: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether the template has the role `developer`, and the reasoning fields it reads."""
    developer = re.search(r"['\"]developer['\"]", template) is not None
    named = [name for name in REASONING if re.search(rf"[.'\"]{name}\b", template)]
    return developer, tuple(named)


def _as_known(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Message with the role and the reasoning field renamed to those that the template supports.

    `developer` is OpenAI's later name of `system`.
    """
    developer, named = _known(template)
    if message.get("role") == "developer" and not developer:
        message = {**message, "role": "system"}
    given = [name for name in REASONING if name in message]
    if given and named and not any(name in named for name in given):
        message = {**message, named[0]: message[given[0]]}
    return message


# Roles of other formats, and in capitals, for which a template would render a wrong turn or none.
_OPENAI_ROLES = {name: name for name in ("system", "user", "assistant", "tool")} | {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model", "ai"), "assistant"),
}


def check_messages(value: object, field: str) -> list[Message]:
    """Check that `value` is a list of messages in OpenAI's format, and return it in normal form.

    Content that is a list of parts, {"type": "text", "text": ...}, becomes their concatenated text.
    JSON text in place of the list, a message or `tool_calls` is parsed.

    Raises:
        DataError: a message is invalid; `field` and the message's index are named.
    """
    value = parsed_json(value)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"`{field}` must be a non-empty list of messages, got {value!r}", field=field
        )
    return [_checked(parsed_json(each), f"{field}[{i}]") for i, each in enumerate(value)]


def _checked(message: Any, field: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        sharegpt = isinstance(message, dict) and is_sharegpt(message)
        remedy = ' (write "role" and "content" for "from" and "value")' if sharegpt else ""
        raise DataError(
            f"`{field}` must be an object with a `role`{remedy}, got {message!r}", field=field
        )
    if (role := _OPENAI_ROLES.get(message["role"].lower(), message["role"])) != message["role"]:
        raise DataError(
            f'`{field}.role` is "{message["role"]}", a role of another format; write "{role}"',
            field=f"{field}.role",
        )
    content, calls = message.get("content"), parsed_json(message.get("tool_calls"))
    if calls is not None and not isinstance(calls, list):
        raise DataError(
            f"`{field}.tool_calls` must be a list of objects, got {calls!r}",
            field=f"{field}.tool_calls",
        )
    if isinstance(content, list):
        message = {**message, "content": _joined(content, f"{field}.content")}
    elif not isinstance(content, str) and not (content is None and calls):
        raise DataError(
            f"`{field}.content` must be a string or a list of text parts, and may be left "
            f"out only if there are `tool_calls`; got {content!r}",
            field=f"{field}.content",
        )
    return normal_message(message, field)


def _joined(parts: Sequence[object], field: str) -> str:
    for i, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f'`{field}[{i}]` must be {{"type": "text", "text": ...}}, got a part of type '
                f"{kind!r}: only text is supported; leave the row out",
                field=f"{field}[{i}]",
            )
    return "".join(part["text"] for part in parts if isinstance(part, dict))


def check_tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the row's `tools`, JSON schemas for the chat template; None if the row has none.

    JSON text in place of the list or of a schema is parsed.

    Raises:
        DataError: `tools` is not a list of objects.
    """
    tools = parsed_json(row.get("tools"))
    if isinstance(tools, list):
        tools = [parsed_json(tool) for tool in tools]
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise DataError(
            f"`tools` must be a list of objects (JSON schemas), got {tools!r}", field="tools"
        )
    return tools or None


def check_text(row: Mapping[str, Any], field: str) -> str:
    """Return the row's `field`.

    Raises:
        DataError: the field is not a non-empty string.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"`{field}` must be a non-empty string, got {value!r}", field=field)
    return value


def check_vocabulary(tokens_T: TokenArray, vocab_size: int) -> None:
    """Raise DataError if an id is outside the model's vocabulary."""
    if tokens_T.max() >= vocab_size:
        raise DataError(
            f"the tokenizer produced id {tokens_T.max()}, outside the model's vocabulary of "
            f"{vocab_size}; the tokenizer does not match the model"
        )
