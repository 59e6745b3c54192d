"""Check before a run that a chat template renders all parts of the messages.

Templates leave out unsupported parts without an error: tool calls, a role, the reasoning. So the
first messages of each shape are rendered once with a mark in place of each part. If a mark is not
in the text, the model would never see that part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from distill.chat.messages import REASONING, Message, is_trained, normal_message
from distill.chat.responses import ThinkingMarks, thinking_marks
from distill.chat.template import chat_text
from distill.errors import DataError
from distill.types import Tokenizer

logger = logging.getLogger(__name__)

_REMEDY = "give chat_template=FILE, a template that renders it, or leave it out of the rows"
# Shapes (including the template) that were checked, by tokenizer.
_checked: WeakKeyDictionary[Tokenizer, set[tuple]] = WeakKeyDictionary()


def check_written(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    context: int | None = None,
) -> None:
    """Check that the chat template renders all parts of the messages, once for each shape.

    Missing reasoning of an assistant message is an error if the message is trained, else a warning;
    so is reasoning within `content` if the template reads it from another field.
    Many templates leave out the reasoning of earlier turns, so it is enough that an assistant
    message is rendered completely when it is the last message.

    Args:
        context: number of leading messages that are not trained; None: no message is trained.

    Raises:
        DataError: a part is not rendered; `field` is the first such part.
    """
    given = [normal_message(message) for message in messages]
    trained = [
        context is not None and i >= context and is_trained(message)
        for i, message in enumerate(given)
    ]
    shape = (str(tokenizer.chat_template), bool(tools), *map(_shape, given), *trained)
    shapes = _checked.setdefault(tokenizer, set())
    if shape in shapes:
        return
    marked = _Marked.of(given, tools)
    whole = marked.text(tokenizer, len(given))
    if whole is None:
        return  # if the template also refuses the original messages, rendering them raises
    if any(name not in whole for name in marked.tools):
        raise DataError(f"the chat template does not render `tools`; {_REMEDY}", field="tools")
    for i, message in enumerate(given):
        lost = marked.lost(i, whole)
        if lost and message["role"] == "assistant":
            lost = marked.lost(i, marked.text(tokenizer, i + 1) or "")
        for part in lost:
            what = f"the chat template does not render `{part}` of messages[{i}], role "
            what += repr(message["role"])
            if part in REASONING and not trained[i]:
                logger.warning("%s, so the model does not see it", what)
            else:
                raise DataError(f"{what}; {_REMEDY}", field=part)
        if _begins_with_thinking(message) and (name := _other_field(tokenizer)):
            what = f"the chat template renders the thinking in `content` of messages[{i}], role "
            what += f"'assistant', as a part of the answer; give it in `{name}`"
            if trained[i]:
                raise DataError(what, field="content")
            logger.warning("%s", what)
    shapes.add(shape)


def _shape(message: Message) -> tuple[object, ...]:
    content, calls = message.get("content"), message.get("tool_calls", ())
    filled = bool(content.strip()) if isinstance(content, str) else bool(content)
    thinks = _begins_with_thinking(message)
    return (message["role"], filled, thinks, len(calls), frozenset(message))


def _begins_with_thinking(message: Message) -> bool:
    """True for an assistant message whose content begins with <think>...</think>."""
    marks, content = ThinkingMarks(), message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return False
    return content.lstrip().startswith(marks.opens) and marks.closes in content


def _other_field(tokenizer: Tokenizer) -> str | None:
    """Field from which the template renders thinking; None if it does so from `content`."""
    marks = thinking_marks(tokenizer)
    if marks.field is None:
        return None
    turn: Message = {"role": "assistant", "content": "<think>\nthought\n</think>\n\nanswer"}
    text = chat_text(
        tokenizer,
        [{"role": "user", "content": "question"}, turn],
        tools=None,
        add_generation_prompt=False,
    )
    between = text.partition("thought")[2].partition("answer")[0]
    return None if between.count(marks.closes) == text.count(marks.closes) == 1 else marks.field


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    """Messages and tools with marks in place of their parts.

    Attributes:
        messages: messages with marks.
        parts: marks of each message by part.
        tools: tools with a mark as their name, by mark.
    """

    messages: list[Message] = field(default_factory=list)
    parts: list[dict[str, list[str]]] = field(default_factory=list)
    tools: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> _Marked:
        made = cls()
        for i, tool in enumerate(tools or ()):
            name = f"toolmark{i:04d}q"
            made.tools[name] = _renamed(tool, name)
        for i, message in enumerate(messages):
            marked, parts = dict(message), {}
            for part in ("content", *REASONING):
                if isinstance(message.get(part), str) and message[part].strip():
                    marked[part] = f"{part.replace('_', '')}mark{i:04d}q"
                    parts[part] = [marked[part]]
            if calls := message.get("tool_calls"):
                names = [f"callmark{i:04d}c{j:04d}q" for j in range(len(calls))]
                marked["tool_calls"] = [
                    {**call, "function": {"name": name, "arguments": {"key": f"value{name}"}}}
                    for call, name in zip(calls, names, strict=True)
                ]
                parts["tool_calls"] = [*names, *(f"value{name}" for name in names)]
            made.messages.append(marked)
            made.parts.append(parts)
        return made

    def text(self, tokenizer: Tokenizer, count: int) -> str | None:
        """Rendered first `count` messages in lower case; None if the template refuses them."""
        try:
            text = chat_text(
                tokenizer,
                self.messages[:count],
                tools=[*self.tools.values()] or None,
                add_generation_prompt=self.messages[count - 1]["role"] != "assistant",
            )
        except DataError:
            return None
        return text.lower()

    def lost(self, i: int, text: str) -> list[str]:
        """Parts of message `i` that the text lacks; one of several reasoning fields is enough."""
        parts = self.parts[i]
        lost = [part for part, marks in parts.items() if any(mark not in text for mark in marks)]
        reasoning = [part for part in parts if part in REASONING]
        if any(part not in lost for part in reasoning):
            return [part for part in lost if part not in REASONING]
        return lost


def _renamed(tool: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": {**function, "name": name}}
    return {**tool, "name": name}
