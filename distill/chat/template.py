"""Chat templates: from a prompt or a conversation to the text and the tokens a model sees."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distill.chat.messages import REASONING, Message, normal_message, parsed_json
from distill.errors import DataError
from distill.types import TokenArray

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


# Attribute of a tokenizer, and variable of templates: the time that templates take to be now.
_CHAT_TIME = "chat_time"
# `strftime_now` for templates, which are given plain data and no functions (transformers 5.22 on):
# replaces the codes of a format by their texts. What follows begins a line, as it did without this.
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{% for part in format.split('%%') %}"
    "{% set shown = namespace(text=part) %}{% for code, text in chat_time.items() %}"
    "{% set shown.text = shown.text.replace(code, text) %}{% endfor %}"
    "{{ shown.text }}{{ '' if loop.last else '%' }}{% endfor %}{% endmacro %}\n"
)


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> TokenArray:
    """Tokens of a plain string, with the special tokens that the tokenizer puts before any text.

    They are left out where the text begins with them, as one that a chat template wrote does. What
    the tokenizer puts behind a text (its EOS) is left out: a prompt is no text that has ended.

    Raises:
        DataError: the tokenizer cannot encode it.
    """
    plain = encode(tokenizer, text, add_special_tokens=False)
    whole = encode(tokenizer, text, add_special_tokens=True)
    count = len(plain)
    starts = range(len(whole) - count + 1)
    start = next((i for i in starts if whole[i : i + count] == plain), None)
    if start is None:
        raise DataError(
            f"the tokenizer encodes {text[:40]!r} otherwise where it adds special tokens; give a "
            "tokenizer whose post-processor adds tokens before and after a text alone"
        )
    added = whole[:start]
    has_them = plain[: len(added)] == added
    return np.asarray(plain if has_them else [*added, *plain], dtype=np.int32)


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

    An answer that the assistant has begun, as the last message, is continued.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages; the
            last message is a tool call of the assistant, which has nothing to continue.
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
    """True if the last message is the assistant's: an answer that is to be continued.

    Raises:
        DataError: it calls tools, and no message has the results.
    """
    last = messages[-1]
    if last.get("role") != "assistant":
        return False
    if last.get("tool_calls"):
        raise DataError(
            "the last message is a tool call of the assistant, and no `tool` message answers it; "
            "add the result, or drop the call"
        )
    return True


def answered(messages: Sequence[Message], said: str | Message) -> list[Message]:
    """The messages with the assistant's answer: a message of its own, or the end of one begun."""
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    if not is_begun(messages):
        return [*messages, message]
    *before, begun = messages
    return [*before, {**begun, **message, "content": begun["content"] + message["content"]}]


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
    continue_final_message: bool = False,
) -> str:
    """The messages, in normal form, as text by the tokenizer's chat template.

    The role `developer` is `system` under a template that does not know it.

    Args:
        continue_final_message: the text ends where the last message does, without its end.

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
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    arguments: Sequence[Mapping[str, Any] | str],
    settings: Mapping[str, Any],
) -> str:
    """The text with the calls' `arguments` as objects, or as JSON text if the template needs it.

    Most templates print an object as JSON. DeepSeek's concatenate a text, and refuse an object;
    a template that interpolates a text prints an object as Python does.
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


def set_chat_time(tokenizer: PreTrainedTokenizerBase, time: datetime) -> None:
    """Have chat templates that print the date print this one. The tokenizer pickles with it."""
    vars(tokenizer)[_CHAT_TIME] = time


def _written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], settings: Mapping[str, Any]
) -> str:
    conversation: Any = [*messages]
    template = tokenizer.get_chat_template(None, settings["tools"])
    dated = {}
    if "strftime_now" in template:
        # Without a time of the run's own, that of the tokenizer's first chat: also after midnight.
        time: datetime = vars(tokenizer).setdefault(_CHAT_TIME, datetime.now())
        codes = set(re.findall("%[-_0^#]?[A-Za-z]", template))
        dated[_CHAT_TIME] = {code: time.strftime(code) for code in codes}
        template = _STRFTIME_NOW + template
    try:
        text = tokenizer.apply_chat_template(
            conversation, chat_template=template, tokenize=False, **dated, **settings
        )
    except Exception as error:  # jinja2 raises whatever the template's author chose
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
    """The messages as a chat endpoint takes them: normal form, with arguments as JSON text."""
    given = [normal_message(message) for message in messages]
    asked = [{name: m[name] for name in m if name not in ("weight", "train")} for m in given]
    return _with_arguments(asked, _as_text)


def _as_object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@cache
def _known(template: str) -> tuple[bool, tuple[str, ...]]:
    """(True if the template names the role `developer`, fields of reasoning that it reads)."""
    developer = re.search(r"['\"]developer['\"]", template) is not None
    named = [name for name in REASONING if re.search(rf"[.'\"]{name}\b", template)]
    return developer, tuple(named)


def _as_known(message: dict[str, Any], template: str) -> dict[str, Any]:
    """The message with the role and the field of reasoning by the names that the template knows.

    `developer` is OpenAI's later name of `system`.
    """
    developer, named = _known(template)
    if message.get("role") == "developer" and not developer:
        message = {**message, "role": "system"}
    given = [name for name in REASONING if name in message]
    if given and named and not any(name in named for name in given):
        message = {**message, named[0]: message[given[0]]}
    return message


# Roles of other formats, by which a template would write another turn than is meant, or none.
_OPENAI_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant"}


def check_messages(value: object, field: str) -> list[Message]:
    """`value` as chat messages of OpenAI's format, in normal form.

    Content that is a list of parts, {"type": "text", "text": ...}, is their text, joined. JSON
    text in place of the list, a message or `tool_calls` is parsed.

    Raises:
        DataError: names the field and the message that is not one.
    """
    value = parsed_json(value)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"`{field}` must be a non-empty list of messages, got {value!r}", field=field
        )
    return [_checked(parsed_json(each), f"{field}[{i}]") for i, each in enumerate(value)]


def _checked(message: Any, field: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        sharegpt = isinstance(message, dict) and {"from", "value"} <= message.keys()
        remedy = ' (write "role" and "content" for "from" and "value")' if sharegpt else ""
        raise DataError(
            f"`{field}` must be an object with a `role`{remedy}, got {message!r}", field=field
        )
    if (role := _OPENAI_ROLES.get(message["role"])) is not None:
        raise DataError(
            f'`{field}.role` is "{message["role"]}", as other formats have it; write "{role}"',
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
            f"out beside `tool_calls` only; got {content!r}",
            field=f"{field}.content",
        )
    return normal_message(message, field)


def _joined(parts: Sequence[object], field: str) -> str:
    for i, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(
                f'`{field}[{i}]` must be {{"type": "text", "text": ...}}, got a part of type '
                f"{kind!r}: models of text see text only; leave the row out",
                field=f"{field}[{i}]",
            )
    return "".join(part["text"] for part in parts if isinstance(part, dict))


def check_tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The row's `tools`, JSON schemas that go to the chat template; None where it has none.

    JSON text in place of the list or of a schema is parsed.

    Raises:
        DataError: it is not a list of objects.
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
    """The row's `field`, a non-empty string.

    Raises:
        DataError: it is not.
    """
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"`{field}` must be a non-empty string, got {value!r}", field=field)
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
