"""The formats in which model families write tool calls, and how one is read.

A reader never fails: what cannot be read is told to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from distill.json_values import loads, read_json, value_of_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, as the model wrote it.

    `arguments` are an object by name; or the text that is none, as it stands. `id` ties the answer
    to the call, where the model's format has such.
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


ToolFormat: TypeAlias = Literal["hermes", "xml", "llama", "mistral", "deepseek"]
Schemas: TypeAlias = Sequence[Mapping[str, Any]]

# What the strictest templates take for the id of a call (Mistral's).
_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a turn from a format's opening mark to `stop`: calls, or why there is none."""

    start: int = 0
    stop: int
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A format: where its calls open (a regular expression), and how one is read from there on.

    `read(text, start, tools)` returns None where the opening turns out to open no call. `markers`
    are the format's tokens, which tokenizers may count among the special ones. `own_line`: the
    line break before a call is the template's, not the content's.
    """

    opener: str
    read: Callable[[str, int, Schemas], Piece | None]
    example: str
    markers: tuple[str, ...]
    own_line: bool = False


def _read_json(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value at `start` and where it ends; None where none can be read and written."""
    try:
        return read_json(text, start)
    except ValueError:
        return None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _json_call(value: object) -> ToolCall | None:
    """The call that an object with a name is; None for anything else."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, (dict, str)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=name, arguments=arguments, id=_usable_id(value.get("id")))


def _usable_id(value: object) -> str | None:
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


_LEADING_NAME = re.compile(r'[\s\[{]*"name"\s*:\s*"([^"\\]+)"')


def _broken_json(body: str, stop: int) -> Piece:
    """A call of the name that the text begins with, its arguments the text itself."""
    name = _LEADING_NAME.match(body)
    if name is None:
        return Piece(stop=stop, error="it is no JSON object with a name and arguments")
    return Piece(stop=stop, calls=(ToolCall(name=name[1], arguments=body.strip()),))


def _body(text: str, start: int, end: str) -> tuple[str, int]:
    """The text up to `end` or the turn's end, and where it is over."""
    found = text.find(end, start)
    return (text[start:], len(text)) if found < 0 else (text[start:found], found + len(end))


def _read_hermes(text: str, start: int, tools: Schemas) -> Piece:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the last may be left open."""
    if found := _read_json(text, start):
        value, stop = found
        stop, call = _skip_space(text, stop), _json_call(value)
        if call and text.startswith("</tool_call>", stop):
            return Piece(stop=stop + len("</tool_call>"), calls=(call,))
        if call and stop == len(text):
            return Piece(stop=stop, calls=(call,))
    return _broken_json(*_body(text, start, "</tool_call>"))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
# A value may speak of </parameter> itself; the one that ends it is followed by one of these.
_AFTER_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"</function>\s*(?:</tool_call>|\Z)")


def _read_xml(text: str, start: int, tools: Schemas) -> Piece:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    function = _FUNCTION.match(text, start)
    if function is None:
        return Piece(stop=_body(text, start, "</tool_call>")[1], error="no <function=NAME> follows")
    name, position = function[1].strip(), function.end()
    if closing := _FUNCTION_END.search(text, position):
        arguments = {}
        schema = _parameters(name, tools)
        while parameter := _PARAMETER.match(text, position, closing.end()):
            end = _AFTER_VALUE.search(text, parameter.end(), closing.end())
            if end is None:
                break
            key, value = parameter[1].strip(), text[parameter.end() : end.start()]
            arguments[key] = _typed(key, value.removesuffix("\n"), schema)
            position = end.end()
        if _skip_space(text, position) == closing.start():
            call = ToolCall(name=name, arguments=arguments)
            return Piece(stop=closing.end(), calls=(call,))
    body, stop = _body(text, function.end(), "</tool_call>")
    return Piece(stop=stop, calls=(ToolCall(name=name, arguments=body.strip()),))


def _parameters(name: str, tools: Schemas) -> Mapping[str, Any]:
    """JSON schema of a tool's arguments; an empty one where there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


# Templates print these as Python does.
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def _typed(name: str, value: str, schema: Mapping[str, Any]) -> object:
    """The value of an argument written without quotes, of the type that its schema tells."""
    try:
        return value_of_text(value, loads(_AS_JSON.get(value, value)), name, schema)
    except ValueError:
        return value


# A turn that begins so is meant as a call; an answer may be a JSON object too.
_LLAMA_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]+"\s*,\s*"(?:parameters|arguments)"\s*:')


def _read_llama(text: str, start: int, tools: Schemas) -> Piece | None:
    """The whole turn is `{"name": ..., "parameters": {...}}`, or several with `;` between."""
    calls, position = [], start
    while found := _read_json(text, position):
        call = _json_call(found[0])
        if call is None or not found[0].keys() & {"parameters", "arguments"}:
            break
        calls.append(call)
        position = _skip_space(text, found[1])
        if not text.startswith(";", position):
            break
        position += 1
    if calls and _skip_space(text, position) == len(text):
        return Piece(stop=len(text), calls=tuple(calls))
    if text.endswith("<|python_tag|>", 0, start) or _LLAMA_CALL.match(text, start):
        return _broken_json(text[start:], len(text))
    return None


_MISTRAL_CALL = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]{}]*))?(?:\[ARGS\])?(?=\s*\{)")


def _read_mistral(text: str, start: int, tools: Schemas) -> Piece:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]NAME[ARGS]{...}`."""
    other = text.find("[TOOL_CALLS]", start)
    stop = len(text) if other < 0 else other
    if named := _MISTRAL_CALL.match(text, start):
        found = _read_json(text, named.end())
        if found is None:
            call = ToolCall(name=named[1], arguments=text[named.end() : stop].strip())
            return Piece(stop=stop, calls=(call,))
        call = ToolCall(name=named[1], arguments=found[0], id=_usable_id(named[2]))
        return Piece(stop=found[1], calls=(call,))
    if found := _read_json(text, start):
        listed = found[0] if isinstance(found[0], list) else [found[0]]
        calls = [call for item in listed if (call := _json_call(item))]
        if calls and len(calls) == len(listed):
            return Piece(stop=found[1], calls=tuple(calls))
    return _broken_json(text[start:stop], stop)


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL, _CALL_END = _deepseek("tool call begin"), _deepseek("tool call end")
_SEPARATOR = _deepseek("tool sep")
_FENCED_NAME = re.compile(r"([^\n`]+)\n```json\n")
_DEEPSEEK_END = re.compile(rf"\s*(?:```)?\s*(?:{_CALL_END}|\Z)\s*(?:{_CALLS_END})?")


def _read_deepseek(text: str, start: int, tools: Schemas) -> Piece:
    """V3 and R1 name the call after the separator, above fenced arguments; V3.1 before it."""
    body, stop = _body(text, start, _CALL_END)
    head, separator, _ = body.partition(_SEPARATOR)
    position = start + len(head) + len(separator)
    name = head.strip()
    if fenced := _FENCED_NAME.match(text, position):
        name, position = fenced[1].strip(), fenced.end()
    if not separator or not name:
        return Piece(stop=stop, error="it has no name")
    found = _read_json(text, position)
    if found and isinstance(found[0], dict) and (end := _DEEPSEEK_END.match(text, found[1])):
        return Piece(stop=end.end(), calls=(ToolCall(name=name, arguments=found[0]),))
    return Piece(stop=stop, calls=(ToolCall(name=name, arguments=text[position:stop].strip()),))


GRAMMARS: dict[ToolFormat, Grammar] = {
    "hermes": Grammar(
        opener="<tool_call>",
        read=_read_hermes,
        example='<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>',
        markers=("<tool_call>", "</tool_call>"),
        own_line=True,
    ),
    "xml": Grammar(
        opener="<tool_call>",
        read=_read_xml,
        example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>",
        markers=("<tool_call>", "</tool_call>"),
        own_line=True,
    ),
    "llama": Grammar(
        opener=r"<\|python_tag\|>|(?:\A|(?<=</think>))\s*(?=\{)",
        read=_read_llama,
        example='{"name": NAME, "parameters": {...}}',
        markers=("<|python_tag|>",),
    ),
    "mistral": Grammar(
        opener=r"\[TOOL_CALLS\]",
        read=_read_mistral,
        example='[TOOL_CALLS][{"name": NAME, "arguments": {...}}]',
        markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "deepseek": Grammar(
        opener=rf"(?:{_CALLS}\s*)?{_CALL}",
        read=_read_deepseek,
        example=f"{_CALLS}{_CALL}function{_SEPARATOR}NAME\n```json\n{{...}}\n```{_CALL_END}"
        f"{_CALLS_END}",
        markers=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    ),
}
