"""Parsing of tool calls: from the text of an assistant's turn to content and calls.

Model families write tool calls in different formats. The format is detected from the chat template,
which writes calls as the model was trained to write them. Parsing never fails: for a call that
cannot be read, the model receives an error message, and the call stays in the history as written.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from distill.chat.responses import THINK, ThinkingMarks
from distill.chat.template import chat_text
from distill.chat.token_text import agreement
from distill.chat.tool_formats import GRAMMARS, Grammar, ToolFormat
from distill.chat.tool_readers import Piece, Schemas, ToolCall
from distill.errors import ConfigError, DataError
from distill.types import Tokenizer

logger = logging.getLogger(__name__)

_MOST_MARKS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """Assistant's turn, parsed into content and tool calls.

    Attributes:
        text: the turn as written, without its stop token.
        content: the text outside calls, including thinking.
        calls: the calls, in the order written. If the `arguments` of a call are not a JSON object,
            they are the text as written.
        malformed: error message for the model, for each call that has not even a readable name.
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
    """Parse a turn into content and calls. No text raises an error.

    Calls within the thinking are ignored, and those after the first 512 marks of calls.

    Args:
        marks: marks of the model's thinking.
        opened: True if the prompt has opened the thinking.
        first: number of the first id that is given to calls without a usable id.
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
            f"a tool call could not be parsed: {piece.error}: "
            f"{text[piece.start : piece.stop][:120]!r}; write it as {grammar.example}"
            for piece in pieces
            if piece.error
        ),
    )


def assistant_message(parsed: ParsedTurn) -> dict[str, Any]:
    """Turn as a chat message of OpenAI's format.

    A turn with an unreadable call stays text, because templates print arguments as JSON.
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
    for _ in range(_MOST_MARKS):  # each may have all of the text read
        if (mark := marks.search(text, position)) is None:
            break
        position = mark.end()
        if mark["think"]:
            position = _after(thinking.closes, text, position)
        elif mark["spoken"]:
            if not thinking.answer:  # with such a mark, `closes` may end other parts too
                pieces.clear()  # everything before was thinking, opened in the prompt or not at all
        else:
            piece = grammar.read(text, position, tools)
            if piece.calls or piece.error:
                pieces.append(replace(piece, start=mark.start()))
            position = piece.stop
    return pieces


def _after(mark: str, text: str, start: int) -> int:
    end = text.find(mark, start)
    return len(text) if end < 0 else end + len(mark)


def _content(text: str, pieces: list[Piece], grammar: Grammar) -> str:
    if not pieces:
        return text
    before = text[: pieces[0].start].removesuffix(grammar.gap).removeprefix(grammar.before_words)
    after = [text[one.stop : other.start].strip() for one, other in pairwise(pieces)]
    after.append(text[pieces[-1].stop :].strip())
    return "\n".join(part for part in (before, *after) if part.strip())


_NAME = "isotherm_probe"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Answers a probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
_QUESTION, _WORDS = "a question to probe with", "words to probe with"
_VALUES = ("a value", "another value")
# Ids as strict templates require them, and for templates that write the name only in the id (Kimi
# K2).
_IDS = (("probe0000", "probe0001"), (f"functions.{_NAME}:0", f"functions.{_NAME}:1"))
_REMEDY = "use a model or a template that supports tools, or train without tools"
_logged: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Assistant turn with calls, and its text as rendered by the chat template.

    Attributes:
        what: description of the turn.
        values: arguments of those calls that the text contains.
        texts: two cuts of the rendered turn: after the generation prompt, and after the question.
            The beginning of a rendered turn may differ from the generation prompt.
        refusal: the template's reason for refusing the turn; empty if it accepts the turn.
        left_out: description of parts of the turn that the text lacks; empty if there are none.
    """

    what: str
    values: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    refusal: str = ""
    left_out: str = ""

    def reads(self, tool_format: ToolFormat) -> bool:
        """True if parsing the text in this format returns the calls that the text contains."""
        expected = [(_NAME, {"key": value}) for value in self.values]
        read = (parse_turn(text, tool_format, [_TOOL]).calls for text in self.texts)
        return any([(call.name, call.arguments) for call in calls] == expected for calls in read)


def detect_format(tokenizer: Tokenizer) -> ToolFormat:
    """Detect the tool format of the tokenizer's chat template.

    The template renders a turn with one call, one with words and a call, and one with two calls.
    The first format that reads back the calls of all these turns is returned. If the template
    refuses the second or third turn, or leaves a part out, a warning is logged, because the model
    will then see a turn that differs from the turn that it wrote.

    Raises:
        ConfigError: the template does not show tools to the model, refuses a call, or writes calls
            in an unsupported format.
    """
    _require_tools(tokenizer)
    unread: list[_Probe] = []
    for ids in _IDS:
        probes = [
            _probed(tokenizer, "a tool call", ids[:1]),
            _probed(tokenizer, "a tool call after words", ids[:1], _WORDS),
            _probed(tokenizer, "two tool calls in one turn", ids),
        ]
        if not probes[0].values:
            reason = probes[0].refusal or probes[0].left_out
            raise ConfigError(
                f"the chat template does not render an assistant's tool call: {reason}; {_REMEDY}",
                field="model.chat_template",
            )
        written = [probe for probe in probes if not probe.refusal]
        for tool_format in GRAMMARS:
            if all(probe.reads(tool_format) for probe in written):
                _log_what_is_not_shown(tokenizer, probes)
                return tool_format
        unread += [probe for probe in written if not any(map(probe.reads, GRAMMARS))]
    rendered = f"{unread[0].what} as {unread[0].texts[0][:200]!r}" if unread else "its tool calls"
    raise ConfigError(
        f"the chat template renders {rendered}, in none of the formats {', '.join(GRAMMARS)}; "
        f"{_REMEDY}",
        field="model.chat_template",
    )


def _require_tools(tokenizer: Tokenizer) -> None:
    shown, reason = _rendered(tokenizer, [_TOOL])
    without, _ = _rendered(tokenizer, None)
    if _NAME not in shown or _NAME in without:
        because = f": {reason}" if reason else ""
        raise ConfigError(
            f"the chat template does not show `tools` to the model{because}; {_REMEDY}",
            field="model.chat_template",
        )


def _probed(tokenizer: Tokenizer, what: str, ids: Sequence[str], words: str = "") -> _Probe:
    calls = [
        _openai_call(call_id, _NAME, {"key": value})
        for call_id, value in zip(ids, _VALUES, strict=False)
    ]
    turn = {"role": "assistant", "content": words, "tool_calls": calls}
    prompt, _ = _rendered(tokenizer, [_TOOL])
    text, refusal = _rendered(tokenizer, [_TOOL], turn)
    special = tuple(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special)
    while (text := text.rstrip()).endswith(special):  # the stop token is not part of a turn
        text = text.removesuffix(next(token for token in special if text.endswith(token)))
    texts = text[agreement(prompt, text) :], text.rpartition(_QUESTION)[2]
    values = tuple(value for value in _VALUES[: len(ids)] if value in text)
    left_out = "" if words in text and len(values) == len(ids) else "it leaves parts out"
    return _Probe(what=what, values=values, texts=texts, refusal=refusal, left_out=left_out)


def _log_what_is_not_shown(tokenizer: Tokenizer, probes: Sequence[_Probe]) -> None:
    for probe in probes:
        problem = f"the chat template does not render {probe.what} as it was sampled"
        reason = probe.refusal or probe.left_out
        if reason and (key := f"{tokenizer.chat_template}{problem}") not in _logged:
            _logged.add(key)
            logger.warning("%s: %s", problem, reason)


def _rendered(
    tokenizer: Tokenizer, tools: Schemas | None, *turn: Mapping[str, Any]
) -> tuple[str, str]:
    """Rendered probe conversation and "", or "" and the template's reason for refusing it."""
    messages = [{"role": "user", "content": _QUESTION}, *turn]
    try:
        return chat_text(tokenizer, messages, tools=tools, add_generation_prompt=not turn), ""
    except DataError as error:
        return "", str(error.__cause__ or error)
