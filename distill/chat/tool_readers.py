"""Readers of tool calls: from the text after a format's opening mark to the calls.

A reader never raises: for text that it cannot read, it returns an error message for the model. Its
time is proportional to the length of the text, whatever the text is. Each reader handles one
notation of calls; `distill.chat.tool_formats` has the marks of the formats.

json_calls     an object with a name and arguments          {"name": "add", "arguments": {"a": 1}}
listed_calls   a list of such objects, or named calls       [{"name": "add", "arguments": {"a": 1}}]
whole_turn     only such objects in the whole turn          {"name": "add", "parameters": {"a": 1}}
named_call     a name, then the arguments as an object      add ... {"a": 1}
tagged_call    a name, then each argument between tags      add <parameter=a>1</parameter>
gemma_call     a name, then Gemma's notation                call:add{a:1,s:<|"|>text<|"|>}
python_calls   calls in Python syntax                       [add(a=1)]
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from distill.json_values import loads, read_json, require_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: name of the tool.
        arguments: values by name, or the text as written if it is not an object.
        id: id that links the tool's result to the call; None if the format has no ids.
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


Schemas: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a turn from a format's opening mark to `stop`, with its calls or an error.

    With neither, no call begins before `stop`.
    """

    start: int = 0
    stop: int
    calls: tuple[ToolCall, ...] = ()
    error: str = ""


# (text, position after the opening mark, tools) -> piece
Reader: TypeAlias = Callable[[str, int, Schemas], Piece]

# Ids of calls that the strictest templates (Mistral's) accept.
_ID = re.compile(r"[A-Za-z0-9]{9}")
_LEADING_NAME = re.compile(r'[\s\[{]*"name"\s*:\s*"([^"\\]+)"')
_NO_OBJECT = "it is not a JSON object with a name and arguments"
_NO_NAME = "it has no name"


def _json_at(text: str, start: int) -> tuple[Any, int] | None:
    """JSON value at `start` and the position of its end; None if none can be read."""
    try:
        return read_json(text, start)
    except ValueError:
        return None


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _body(text: str, start: int, end: str) -> tuple[str, int]:
    """Text up to the mark `end` or the turn's end, and the position after the mark."""
    found = text.find(end, start) if end else -1
    return (text[start:], len(text)) if found < 0 else (text[start:found], found + len(end))


def _call_of(value: object) -> ToolCall | None:
    """Call of a JSON object with a name; None for any other value."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, (dict, str)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    id_ = value.get("id")
    usable = isinstance(id_, str) and _ID.fullmatch(id_)
    return ToolCall(name=name, arguments=arguments, id=id_ if usable else None)


def _unread(name: str | None, arguments: str, stop: int, error: str = _NO_NAME) -> Piece:
    """Piece of a call whose arguments cannot be read, or with an error if it has no name."""
    if not name:
        return Piece(stop=stop, error=error)
    return Piece(stop=stop, calls=(ToolCall(name=name, arguments=arguments.strip()),))


def _unread_object(body: str, stop: int) -> Piece:
    """Piece of an unreadable object: a call with the name at its beginning and the text itself."""
    name = _LEADING_NAME.match(body)
    return _unread(name and name[1], body, stop, _NO_OBJECT)


def json_calls(end: str) -> Reader:
    """Reader of one object up to the mark `end`, which may be absent at the end of the turn."""

    def read(text: str, start: int, tools: Schemas) -> Piece:
        if found := _json_at(text, start):
            value, stop = found
            stop, call = _skip_space(text, stop), _call_of(value)
            if call and (stop == len(text) or text.startswith(end, stop)):
                return Piece(stop=min(stop + len(end), len(text)), calls=(call,))
        return _unread_object(*_body(text, start, end))

    return read


def listed_calls(opener: str, named: Reader, is_named: str) -> Reader:
    """Reader of a list of objects, or of a named call if `is_named` matches."""
    begins_named = re.compile(is_named)

    def read(text: str, start: int, tools: Schemas) -> Piece:
        other = text.find(opener, start)
        stop = len(text) if other < 0 else other
        if begins_named.match(text, start):
            return named(text[:stop], start, tools)
        if found := _json_at(text, start):
            listed = found[0] if isinstance(found[0], list) else [found[0]]
            calls = [call for item in listed if (call := _call_of(item))]
            if calls and len(calls) == len(listed):
                return Piece(stop=found[1], calls=tuple(calls))
        return _unread_object(text[start:stop], stop)

    return read


# A turn that begins like this is meant as a call. Other answers may be JSON objects or quote calls.
_MEANT = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]+"\s*,\s*"(?:parameters|arguments)"\s*:')


def _alone(text: str, start: int) -> bool:
    """True if there is no text before `start`, or text that ends with a mark."""
    while start and text[start - 1].isspace():
        start -= 1
    return not start or text[start - 1] in ">]"


def whole_turn(*marks: str) -> Reader:
    """Reader of a turn, or the rest of a turn, that is a sequence of objects (`;` optional).

    Unreadable text counts as a call if it follows one of the `marks`, or if it looks like a call
    and has no words before it.
    """

    def read(text: str, start: int, tools: Schemas) -> Piece:
        calls, position = [], start
        while found := _json_at(text, position):
            call = _call_of(found[0])
            if call is None or not found[0].keys() & {"parameters", "arguments"}:
                break
            calls.append(call)
            position = _skip_space(text, found[1])
            position += text.startswith(";", position)
        if calls and _skip_space(text, position) == len(text):
            return Piece(stop=len(text), calls=tuple(calls))
        if text.endswith(marks, 0, start) or (_alone(text, start) and _MEANT.match(text, start)):
            return _unread_object(text[start:], len(text))
        return Piece(stop=max(position, start + 1))

    return read


def named_call(head: str, end: str) -> Reader:
    """Reader of a name, an object of arguments, and `end`; if `end` is empty, the object ends it.

    `head` is a regular expression with a group `name`, and a group `id` if the format has ids.
    """
    begins, ends = re.compile(head), re.compile(end)

    def read(text: str, start: int, tools: Schemas) -> Piece:
        named = begins.match(text, start)
        found = _json_at(text, named.end()) if named else None
        over = ends.match(text, _skip_space(text, found[1])) if found else None
        if named and found and isinstance(found[0], dict) and over:
            call = ToolCall(
                name=named["name"].strip(), arguments=found[0], id=named.groupdict().get("id")
            )
            return Piece(stop=over.end(), calls=(call,))
        over = ends.search(text, start) if end else None
        body_stop, stop = over.span() if over else (len(text), len(text))
        if named is None or named.end() > body_stop:
            return _unread(None, "", stop)
        return _unread(named["name"].strip(), text[named.end() : body_stop], stop)

    return read


def tagged_call(
    *,
    head: str,
    opens: str,
    key: str,
    closes: str,
    end: str,
    section_end: str,
    own_line: bool = False,
) -> Reader:
    """Reader of a name, arguments between tags, with types from the tool's schema, and `end`.

    Args:
        head: regular expression of a call's beginning, with a group `name`.
        opens: text that begins an argument.
        key: regular expression of the text between `opens` and the value, with a group `name`. An
            optional group `text` is "true" if the value is text and "false" if it is JSON.
        closes: text that ends a value. It may also occur within a value; the one that ends the
            value is followed by another argument or the end of the call.
        end: regular expression of the call's end.
        section_end: mark that ends a call that cannot be read.
        own_line: True if a value has a line break on each side.
    """
    begins, ends = re.compile(head), re.compile(end)
    argument = re.compile(rf"\s*{re.escape(opens)}{key}", re.DOTALL)
    closing = re.compile(rf"{re.escape(closes)}(?=\s*(?:{re.escape(opens)}|{end}))")
    end_pattern = re.compile(rf"{end}|{re.escape(section_end)}|\Z")

    def read(text: str, start: int, tools: Schemas) -> Piece:
        named, over = begins.match(text, start), ends.search(text, start)
        if named and over and named.end() <= over.start():
            name = named["name"].strip()
            schema, arguments, position = _parameters(name, tools), {}, named.end()
            while opened := argument.match(text, position, over.start()):
                closed = closing.search(text, opened.end(), over.end())
                if closed is None:
                    break
                value, position = text[opened.end() : closed.start()], closed.end()
                if own_line:
                    value = value.removeprefix("\n").removesuffix("\n")
                arguments |= _argument(opened, value, schema)
            if _skip_space(text, position) >= over.start():
                return Piece(stop=over.end(), calls=(ToolCall(name=name, arguments=arguments),))
        ending = end_pattern.search(text, named.end() if named else start)
        body_stop, stop = ending.span() if ending else (len(text), len(text))
        if named is None:
            return _unread(None, "", stop)
        return _unread(named["name"].strip(), text[named.end() : body_stop], stop)

    return read


def _argument(opened: re.Match[str], value: str, schema: Mapping[str, Any]) -> dict[str, object]:
    name = opened["name"].strip()
    return {name: _value(name, value, schema, opened.groupdict().get("text"))}


def _parameters(name: str, tools: Schemas) -> Mapping[str, Any]:
    """JSON schema of a tool's arguments; empty if the tool is unknown or has no schema."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


# Some templates print these values in Python syntax.
_AS_JSON = {"True": "true", "False": "false", "None": "null"}


def _value(name: str, written: str, schema: Mapping[str, Any], is_text: str | None) -> object:
    """Value of an argument that is written without quotes.

    `is_text` is "true" or "false" if the model has written whether the value is text, else None.
    """
    if is_text == "true":
        return written
    try:
        parsed = loads(_AS_JSON.get(written, written))
    except ValueError:
        return written
    if is_text:
        return parsed
    # Imported here: only runs with tools need its library.
    from distill.json_schemas import value_of_text

    return value_of_text(written, parsed, name, schema)


_GEMMA_HEAD = re.compile(r"\s*call:(?P<name>[^\s{]+)\s*(?=\{)")
_GEMMA_KEY = re.compile(r'([{,]\s*+)([^"{}\[\],:]*[^"{}\[\],:\s])(?=\s*:)')
_PYTHON_WORD = re.compile(r'(?<!")\b(?:True|False|None)\b(?!")')


def gemma_call(quote: str, end: str) -> Reader:
    """Reader of Gemma 4's notation: JSON with unquoted keys, and `quote` around unescaped texts."""

    def as_json(body: str) -> str:
        between, quoted = body.split(quote)[::2], body.split(quote)[1::2]
        keyed = (_GEMMA_KEY.sub(r'\1"\2"', part) for part in between)
        structure = [_PYTHON_WORD.sub(lambda word: _AS_JSON[word[0]], part) for part in keyed]
        texts = [*(json.dumps(part) for part in quoted), ""]
        return "".join(part for pair in zip(structure, texts, strict=False) for part in pair)

    def read(text: str, start: int, tools: Schemas) -> Piece:
        body, stop = _body(text, start, end)
        named = _GEMMA_HEAD.match(body)
        if named is None:
            return _unread(None, "", stop)
        written = body[named.end() :]
        try:
            arguments = loads(as_json(written))
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return _unread(named["name"], written, stop)
        return Piece(stop=stop, calls=(ToolCall(name=named["name"], arguments=arguments),))

    return read


_PYTHON_NAME = re.compile(r"\s*\[?\s*([\w.]+)\s*\(")
_CONSTANTS = {"true": True, "false": False, "null": None}


# A token of calls with literal arguments: no operator, and no f-string.
_PYTHON_TOKEN = re.compile(
    r"""\s+|[rRuU]?(?:(?P<quotes>\'{3}|"{3})(?:[^\\]|\\.)*?(?P=quotes)|'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")"""
    r"""|(?P<opens>[(\[{])|(?P<closes>[)\]}])|[\w.]++(?!['"])|[-+,:=]""",
    re.DOTALL,
)


_CLOSERS = {"(": ")", "[": "]", "{": "}"}
# Levels of arguments that JSON values may have, and two of the call and its list.
_MOST_BRACKETS = 66


def _python_end(text: str, start: int) -> int | None:
    """Position after the bracket that closes the first one after `start`; None without one."""
    closers: list[str] = []
    while token := _PYTHON_TOKEN.match(text, start):
        start = token.end()
        if token["opens"] and len(closers) < _MOST_BRACKETS:
            closers.append(_CLOSERS[token["opens"]])
        elif token["opens"] or (token["closes"] and [token["closes"]] != closers[-1:]):
            return None
        elif token["closes"] and closers.pop() and not closers:
            return start
    return None


def python_calls(*ends: str) -> Reader:
    """Reader of a list of Python calls with keywords, up to an end mark or the turn's end."""

    def read(text: str, start: int, tools: Schemas) -> Piece:
        if over := _python_end(text, start):
            stop = _skip_space(text, over)
            end = next((end for end in ends if text.startswith(end, stop)), "")
            if (end or stop == len(text)) and (calls := _python_list(text[start:over].strip())):
                return Piece(stop=stop + len(end), calls=calls)
        if not _alone(text, start):
            return Piece(stop=start + 1)
        found = [(at, end) for end in ends if (at := text.find(end, start)) >= 0]
        body_stop, end = min(found, default=(len(text), ""))
        body = text[start:body_stop]
        name = _PYTHON_NAME.match(body)
        return _unread(name and name[1], body, body_stop + len(end))

    return read


def _python_list(text: str) -> tuple[ToolCall, ...]:
    """Calls of a list, or a single call; empty if the text is neither."""
    try:
        listed = ast.parse(text, mode="eval").body
        parts = listed.elts if isinstance(listed, ast.List) else [listed]
        return tuple(_python_call(part) for part in parts)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ()


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    require_plain(arguments)
    return ToolCall(name=ast.unparse(node.func), arguments=arguments)


def _python_value(node: ast.expr) -> object:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:  # JSON's names
            return _CONSTANTS[name]
        case ast.List():
            return [_python_value(part) for part in node.elts]
        case ast.Dict() if None not in node.keys:
            keys = [_python_value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(_python_value, node.values), strict=True))
    return ast.literal_eval(node)
