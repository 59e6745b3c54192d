"""Runner of the tests and cases that `program_tests.py` parsed.

`unit_tests_child.py` executes this file as a module in the process of the tests, so it needs only
the standard library. Functions raise an exception if a test fails.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

# If a number with a decimal part is expected, the printed number may differ in its last digits.
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_TOLERANCE = 1e-6
_TINY = 1e-9


def run(
    given: dict[str, Any],
    names: dict[str, Any],
    entry: Callable[[], Any],
    script: Callable[[str], tuple[str, int, str]],
) -> None:
    """Run the tests that the tests' module has defined, and the cases.

    Args:
        given: fields of `ProgramTests`.
        names: names that the module defines, with their values.
        entry: returns the function under test.
        script: runs the program on a standard input; returns output, exit code and errors.
    """
    for name in given["functions"]:
        _call(names[name])
    for name in given["classes"]:
        _run_class(names[name])
    for name in given["checks"]:
        names[name](entry())
    if given["calls"]:
        function = entry()
        for arguments, accepted in given["calls"]:
            result = function(*copy.deepcopy(arguments))
            if not any(_same(result, each) for each in accepted):
                shown = [repr(each)[:200] for each in (arguments, result, accepted[0])]
                raise AssertionError("the arguments {} give {}, not {}".format(*shown))
    for text, expected in given["scripts"]:
        output, code, errors = script(text)
        if code:
            raise AssertionError(f"for the input {text[:200]!r} it ended with {code}: {errors}")
        if not _same_text(output, expected):
            raise AssertionError(
                f"for the input {text[:200]!r} it prints {output[:200]!r}, not {expected[:200]!r}"
            )


def _run_class(kind: Any) -> None:
    if issubclass(kind, unittest.TestCase):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(kind)
        result = unittest.TextTestRunner(stream=sys.stderr, failfast=True).run(suite)
        if not result.wasSuccessful():
            raise AssertionError(f"{kind.__name__} fails")
        return
    _hook(kind, "setup_class", kind)
    for name in [name for name in dir(kind) if name.startswith("test")]:
        instance = kind()
        method = getattr(instance, name)
        _hook(instance, "setup_method", method)
        _call(method, *getattr(kind, "pytestmark", ()))
        _hook(instance, "teardown_method", method)


def _hook(owner: Any, name: str, argument: Any) -> None:
    """Call a hook of pytest if it is defined; hooks take one argument or none."""
    if (hook := getattr(owner, name, None)) is not None:
        hook(*[argument][: len(inspect.signature(hook).parameters)])


def _call(function: Callable[..., Any], *marks: Any) -> None:
    """Call a test once, or once per set of parameters (`pytest.mark.parametrize`)."""
    rows: list[dict[str, Any]] = [{}]
    for mark in (*marks, *getattr(function, "pytestmark", ())):
        if mark.name == "parametrize":
            more = list(_parameters(*mark.args, **mark.kwargs))
            rows = [{**row, **each} for row in rows for each in more]
    for row in rows:
        function(**row)


def _parameters(argnames: Any, argvalues: Any, **_: Any) -> Iterator[dict[str, Any]]:
    names = argnames if isinstance(argnames, list | tuple) else argnames.split(",")
    names = [name.strip() for name in names]
    for values in argvalues:
        if type(values).__name__ == "ParameterSet":  # of pytest.param
            values = values.values
        elif len(names) == 1:
            values = (values,)
        yield dict(zip(names, values, strict=True))


def _same(result: Any, expected: Any) -> bool:
    """True if values are equal as JSON: tuples equal lists, and keys are compared as text."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(result, list | tuple)
            and len(result) == len(expected)
            and all(map(_same, result, expected))
        )
    if isinstance(expected, dict):
        if not isinstance(result, dict) or len(result) != len(expected):
            return False
        texts = {str(key): value for key, value in result.items()}
        return all(str(key) in texts and _same(texts[str(key)], expected[key]) for key in expected)
    if type(expected) is float and type(result) in (int, float):
        return math.isclose(result, expected, rel_tol=_TOLERANCE, abs_tol=_TINY)
    return type(result) in (str, int, float, bool, type(None)) and result == expected


def _same_text(output: str, expected: str) -> bool:
    """True if all lines have equal words, whatever spaces separate or surround them."""
    texts = (output, expected)
    ours, theirs = ([line.split() for line in text.strip().split("\n")] for text in texts)
    return [len(line) for line in ours] == [len(line) for line in theirs] and all(
        map(_same_word, chain.from_iterable(ours), chain.from_iterable(theirs))
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return _DECIMAL.fullmatch(expected) is not None and math.isclose(
            float(word), float(expected), rel_tol=_TOLERANCE, abs_tol=_TINY
        )
    except ValueError:  # the word is not a number
        return False
