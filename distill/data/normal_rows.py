"""Normal form of a row, in which equal data is equal whatever kind of source it comes from.

A null means that the field is absent. Arrow gives every struct all fields of its column, with null
for those that a row lacks, so in a table of calls of two tools each call has the arguments of both.
`Dataset.to_json` writes these nulls, and a function may return them. They cannot be distinguished
from intended nulls, with one exception: a null argument of a call stays if the schema of the tool,
in the row's `tools`, requires the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distill.chat.messages import parsed_json

# Fields with lists of objects, which tables store as JSON text if their columns cannot be typed.
_JSON_FIELDS = frozenset({"messages", "teacher_messages", "tools", "tool_calls"})
_PLAIN = {bool, int, float, str, type(None)}
_NO_SCHEMA: Mapping[str, Any] = {}

# Parameter schemas of a row's tools, by name of the tool.
Schemas = Mapping[str, Mapping[str, Any]]


def normal_row(row: Mapping[str, Any], *, from_arrow: bool = False) -> dict[str, Any]:
    """Row without nulls, with messages, tools and calls parsed, and tuples and arrays as lists.

    Args:
        from_arrow: True if the source reads absent fields as null. Null arguments that are optional
            are then absent, even if their schema allows null.
    """
    return _normal(row, _schemas(row.get("tools")), from_arrow)


def _normal(value: Any, schemas: Schemas, from_arrow: bool) -> Any:
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        arguments = value.get("arguments")
        is_call = isinstance(arguments, Mapping) and isinstance(value.get("name"), str)
        made = {}
        for name, inner in value.items():
            if is_call and name == "arguments":
                schema = schemas.get(value["name"], _NO_SCHEMA)
                made[name] = _arguments(inner, schema, from_arrow)
            elif inner is not None:
                inner = _parsed_list(inner) if name in _JSON_FIELDS else inner
                made[name] = _normal(inner, schemas, from_arrow)
        return made
    if isinstance(value, list | tuple):
        if set(map(type, value)) <= _PLAIN:
            return list(value)
        return [_normal(inner, schemas, from_arrow) for inner in value]
    return value


def _parsed_list(value: Any) -> Any:
    value = parsed_json(value)
    return [parsed_json(each) for each in value] if isinstance(value, list) else value


def _schemas(tools: Any) -> Schemas:
    tools = _parsed_list(tools)
    found = {}
    for tool in tools if isinstance(tools, list) else []:
        function = _mapping(tool, "function") or tool
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            found[function["name"]] = _mapping(function, "parameters")
    return found


def _arguments(value: Any, schema: Mapping[str, Any], from_arrow: bool) -> Any:
    """Arguments of a call, or a value within them, without nulls that the schema does not allow."""
    if isinstance(value, Mapping):
        properties, required = _mapping(schema, "properties"), schema.get("required") or ()
        return {
            name: _arguments(inner, _mapping(properties, name), from_arrow)
            for name, inner in value.items()
            if inner is not None
            or name in required
            or (not from_arrow and _takes_null(_mapping(properties, name)))
        }
    if isinstance(value, list | tuple):
        return [_arguments(inner, _mapping(schema, "items"), from_arrow) for inner in value]
    return value


def _takes_null(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind) or schema.get("nullable"):
        return True
    if None in (schema.get("enum") or ()):
        return True
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return any(isinstance(each, Mapping) and _takes_null(each) for each in choices)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    inner = value.get(name) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else _NO_SCHEMA
