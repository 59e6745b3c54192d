"""Mathematical equivalence, by math-verify, in a process that is ended when it takes too long.

What a model wrote may take forever to simplify, or all memory (9^{9^{9^9}}); so the reading and the
comparing are done in a child (`distill.sandbox.bounded_calls`), one to a process that asks, which
ends with it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from distill.errors import DataError
from distill.sandbox.bounded_calls import OverLimit, in_child

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
# The answer is at the end. Longer text would only make the search for it slower.
_LONGEST = 20_000


def math_equal(response: str, answer: str) -> float:
    r"""1 if the last expression of the response equals the answer as mathematics, else 0.

    The response's is the last `\boxed{}`, else the last LaTeX or plain expression; the answer is
    LaTeX, with or without dollars. 1/2, 0.5 and \frac12 are equal, and so are (x+1)^2 and
    x^2+2x+1. What takes longer than 10 s to compare is not equal.

    Raises:
        DataError: there is no expression in the answer.
    """
    return _ask(_compare, _end_of(response), answer) or 0.0


def math_answer(response: str) -> str | None:
    """The response's expression in a standard form; None if there is none, or it takes too long."""
    return _ask(_standard_form, _end_of(response))


def _end_of(response: str) -> str:
    """The response from the last box on; math-verify would take several as parts of one answer."""
    end = response[-_LONGEST:]
    return end[max(0, end.rfind(r"\boxed")) :]


def _ask(function: Callable[..., Any], *arguments: str) -> Any:
    """The call's result; None if it took too long, or too much memory."""
    try:
        return in_child(_prepare, function, *arguments, timeout_s=_TIMEOUT_S)
    except OverLimit as error:
        logger.warning("%r could not be read as mathematics: %s", arguments[0][-80:], error)
        return None


def _prepare() -> None:
    import math_verify

    # It warns that nobody limits its time.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    # A number of more digits is written out too; the time is limited.
    sys.set_int_max_str_digits(0)


def _compare(response: str, answer: str) -> float:
    from math_verify import verify

    expected = _parse(answer if _is_marked(answer) else rf"\boxed{{{answer}}}")
    if not expected:
        raise DataError(f"the answer {answer[:80]!r} is no mathematical expression")
    return float(verify(expected, _parse(response), timeout_seconds=None))


def _standard_form(response: str) -> str | None:
    from sympy import Basic, simplify

    parsed = _parse(response)
    if not parsed:
        return None
    try:
        return str(simplify(parsed[0]) if isinstance(parsed[0], Basic) else parsed[0])
    except Exception:  # of whatever kind: a model wrote what is simplified
        return None


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType] - None: no limit


def _is_marked(text: str) -> bool:
    return any(mark in text for mark in ("$", r"\boxed", r"\(", r"\["))
