"""Strict reading of the JSON that models write.

Values that JSON cannot express (NaN, numbers beyond floats, lone surrogates) are refused, as are
values that are nested too deeply to be serialised again.
"""

from __future__ import annotations

import json
import math
import sys
from numbers import Real
from typing import Any

# Deeper values would exhaust the stack of code that serialises them again.
_MOST_LEVELS = 64


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start`, after leading space, and the position of its end.

    Raises:
        ValueError: there is no JSON value, or `require_plain` refuses it.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    require_plain(value)
    return value, stop


def read_object(text: str) -> dict[str, Any]:
    """The JSON object that is the whole of `text`.

    Raises:
        ValueError: as `loads`, or the value is not an object.
    """
    value = loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}; write names and values in braces")
    return value


def loads(text: str) -> Any:
    """The JSON value that is the whole of `text`.

    Raises:
        ValueError: as `read_json`, or more text follows.
    """
    value, stop = read_json(text)
    if text[stop:].strip():
        raise json.JSONDecodeError("Extra data", text, stop)
    return value


def is_number(value: object) -> bool:
    """True for a finite number that a float can hold; False for a boolean."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(abs(value) <= sys.float_info.max)  # pyright: ignore[reportOperatorIssue]


def require_plain(value: object) -> None:
    """Check that `value` can be written as JSON, encoded in UTF-8.

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
    raise ValueError(f"{constant} is not a JSON value")


_TOO_DEEP = f"arrays and objects are nested deeper than {_MOST_LEVELS} levels"
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
