"""Tool calls as models write them: from the text of an assistant's turn to content and calls.

Each family has a format of its own, and the chat template tells which: what it writes for a call
is what the model was taught to write. The reading never fails. What cannot be read is told to the
model, and stays in the history as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from distill.chat.template import chat_text
from distill.chat.thinking import THINK, ThinkingMarks
from distill.chat.token_text import agreement
from distill.chat.tool_formats import GRAMMARS, Grammar, Piece, Schemas, ToolCall, ToolFormat
from distill.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """An assistant's turn, parsed into content and tool calls.

    Attributes:
        text: the turn as it was written, without its stop token.
        content: what is no call, thinking included.
        calls: in the order written. `arguments` that are text are no JSON object.
        malformed: for each call without so much as a name, what to tell the model.
    """

    text: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


def parse_turn(
    text: str,
    tool_format: ToolFormat,
    tools: Schemas,
    *,
    marks: ThinkingMarks = THINK,
    opened: bool = False,
    first: int = 0,
) -> ParsedTurn:
    """The content and the calls of a turn; whatever the text, nothing is raised.

    Calls within the thinking are thoughts. `opened`: the prompt has opened the thinking already.
    A call without a usable id gets one, numbered from `first` on.
    """
    grammar = GRAMMARS[tool_format]
    pieces = _pieces(text, grammar, tools, marks, opened)
    calls = [call for piece in pieces for call in piece.calls]
    return ParsedTurn(
        text=text,
        content=_content(text, pieces, grammar),
        calls=tuple(
            call if call.id else replace(call, id=f"call{first + i:05d}")
            for i, call in enumerate(calls)
        ),
        malformed=tuple(
            f"a tool call could not be read: {piece.error}: "
            f"{text[piece.start : piece.stop][:120]!r}; write it as {grammar.example}"
            for piece in pieces
            if piece.error
        ),
    )


def assistant_message(parsed: ParsedTurn) -> dict[str, Any]:
    """The turn as a chat message of OpenAI's format.

    A turn with a call that cannot be read stays text: templates print arguments as JSON.
    """
    well_formed = not any(isinstance(call.arguments, str) for call in parsed.calls)
    if not parsed.calls or parsed.malformed or not well_formed:
        return {"role": "assistant", "content": parsed.text}
    calls = [_openai_call(call.id or "", call.name, call.arguments) for call in parsed.calls]
    return {"role": "assistant", "content": parsed.content, "tool_calls": calls}


def _openai_call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    written = json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}


def _pieces(
    text: str, grammar: Grammar, tools: Schemas, thinking: ThinkingMarks, opened: bool
) -> list[Piece]:
    opens, closes = re.escape(thinking.opens), re.escape(thinking.closes)
    marks = re.compile(f"(?P<think>{opens})|(?P<spoken>{closes})|(?:{grammar.opener})")
    pieces: list[Piece] = []
    position = _after(thinking.closes, text, 0) if opened else 0
    while mark := marks.search(text, position):
        position = mark.end()
        if mark["think"]:
            position = _after(thinking.closes, text, position)
        elif mark["spoken"]:
            if not thinking.answer:  # else it closes other things as well
                pieces.clear()  # all before it was thinking that the prompt opened, or nobody
        elif piece := grammar.read(text, position, tools):
            pieces.append(replace(piece, start=mark.start()))
            position = piece.stop
        else:
            position += 1
    return pieces


def _after(mark: str, text: str, start: int) -> int:
    end = text.find(mark, start)
    return len(text) if end < 0 else end + len(mark)


def _content(text: str, pieces: list[Piece], grammar: Grammar) -> str:
    if not pieces:
        return text
    before = text[: pieces[0].start]
    if grammar.own_line:
        before = before.removesuffix("\n")
    after = [text[one.stop : other.start].strip() for one, other in pairwise(pieces)]
    after.append(text[pieces[-1].stop :].strip())
    return "\n".join(part for part in (before, *after) if part.strip())


_PROBE = "isotherm_probe"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Answers a probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_PROBE_QUESTION = {"role": "user", "content": "a question to probe with"}
_REMEDY = "take a model or a template that is made for tools, or train without tools"


def detect_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """The format of the tokenizer's own chat template: the one that reads what it writes.

    Raises:
        ConfigError: the template does not show tools to the model, or writes calls in no format
            that is known here.
    """
    prompt, bare = _probe_template(tokenizer, [_PROBE_TOOL]), _probe_template(tokenizer, None)
    if prompt is None or _PROBE not in prompt or (bare is not None and _PROBE in bare):
        raise ConfigError(f"the chat template does not show `tools` to the model; {_REMEDY}")
    arguments = {"key": "value"}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [_openai_call("probe0000", _PROBE, arguments)],
    }
    written = _probe_template(tokenizer, [_PROBE_TOOL], said)
    if written is None:
        raise ConfigError(f"the chat template refuses an assistant's tool call; {_REMEDY}")
    spoken = written[agreement(prompt, written) :]
    answered = written.rpartition(str(_PROBE_QUESTION["content"]))[2]
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for tool_format, grammar in GRAMMARS.items():
        for text in (spoken, answered):
            for token in special:
                if token not in grammar.markers:
                    text = text.replace(token, "")
            calls = parse_turn(text, tool_format, [_PROBE_TOOL]).calls
            if [(call.name, call.arguments) for call in calls] == [(_PROBE, arguments)]:
                return tool_format
    raise ConfigError(
        f"the chat template writes a tool call as {spoken[:200]!r}, none of the formats "
        f"{', '.join(GRAMMARS)}; {_REMEDY}"
    )


def _probe_template(
    tokenizer: PreTrainedTokenizerBase, tools: Schemas | None, *said: Mapping[str, Any]
) -> str | None:
    """The probe conversation as the chat template writes it; None where it refuses."""
    messages = [_PROBE_QUESTION, *said]
    try:
        return chat_text(tokenizer, messages, tools=tools, add_generation_prompt=not said)
    except DataError:
        return None
