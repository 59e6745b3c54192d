"""JSON that models write: strict reading, and checks against the schemas of tools.

Values that JSON does not have (NaN, numbers beyond floats, lone surrogates) and those too deep to
be written again are refused. A schema may be anything that a tool's author wrote: nothing is
fetched, no check raises, and a schema that cannot be checked is a reason like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY

# A pattern may take exponential time, and all episodes of a process wait for it.
_PATTERN_TIMEOUT_S = 1.0
_LONGEST_COMPLAINT = 300
# One value of each JSON type.
_SAMPLES = (None, True, 0.5, "", [], {})
# Deeper values would exhaust the stack of whatever prints them again.
_MOST_LEVELS = 64


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start`, leading space aside, and the position of its end.

    Raises:
        ValueError: there is none, or one that `require_plain` refuses.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    require_plain(value)
    return value, stop


def loads(text: str) -> Any:
    """The JSON value that is the whole of `text`.

    Raises:
        ValueError: as `read_json`, or more text follows.
    """
    value, stop = read_json(text)
    if text[stop:].strip():
        raise json.JSONDecodeError("Extra data", text, stop)
    return value


def require_plain(value: object) -> None:
    """Checks that `value` can be written as JSON, encoded in UTF-8.

    Raises:
        ValueError: a number that is not finite, a lone surrogate, or too many levels.
    """
    if _is_nested(value, _MOST_LEVELS):
        raise ValueError(_TOO_DEEP)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _is_nested(value: object, levels: int) -> bool:
    """True if arrays and objects are nested deeper than `levels`."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(item, levels - 1) for item in inner)


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    raise ValueError(f"the number {number[:40]} is too large")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no value of JSON")


_TOO_DEEP = f"arrays and objects are nested deeper than {_MOST_LEVELS} levels"
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def mismatch(value: object, schema: Mapping[str, Any]) -> str | None:
    """The reason why `value` does not fit `schema`; None if it does."""
    try:
        wrong = best_match(_errors(value, schema))
    except Exception as error:  # jsonschema raises whatever a wrong schema leads it into
        reason = str(error).split("\n", 1)[0]
        told = f"the schema cannot be checked: {type(error).__name__}: {reason}"
        return told[:_LONGEST_COMPLAINT]
    if wrong is None:
        return None
    where = ".".join(str(part) for part in wrong.absolute_path)
    return f"{f'{where}: ' if where else ''}{wrong.message[:_LONGEST_COMPLAINT]}"


def value_of_text(text: str, parsed: object, name: str, schema: Mapping[str, Any]) -> object:
    """The value of the argument `name`, written as `text`, which is JSON of `parsed`.

    The schema decides. Where it takes both, the JSON value is meant if the schema tells types at
    all. Where it takes neither, the one whose error says more: an object or array is no text.
    """
    if _accepts(name, text, schema):
        tells_types = not all(_accepts(name, sample, schema) for sample in _SAMPLES)
        return parsed if tells_types and _accepts(name, parsed, schema) else text
    return parsed if isinstance(parsed, dict | list) or _accepts(name, parsed, schema) else text


def _accepts(name: str, value: object, schema: Mapping[str, Any]) -> bool:
    """True if the schema of an object takes `value` as its property `name`."""
    try:
        errors = list(_errors({name: value}, schema))
    except Exception:  # as in `mismatch`, which reports it when the call is checked
        return False
    return not any(error.absolute_path and error.absolute_path[0] == name for error in errors)


def _errors(value: object, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    draft = validator_for(schema, default=Draft202012Validator)
    # The registry of the drafts alone: nothing is fetched.
    return _with_unicode_patterns(draft)(dict(schema), registry=REGISTRY).iter_errors(value)


@lru_cache
def _with_unicode_patterns(draft: Any) -> Any:
    """The draft's validator with the regular expressions of ECMAScript, such as `\\p{L}`."""
    return extend(draft, {"pattern": _pattern})


def _pattern(
    validator: Any, pattern: str, instance: object, schema: object
) -> Iterator[ValidationError]:
    del validator, schema
    if isinstance(instance, str):
        found = regex.search(pattern, instance, timeout=_PATTERN_TIMEOUT_S)
        if found is None:
            yield ValidationError(f"{instance!r} does not match {pattern!r}")
