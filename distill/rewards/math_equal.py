"""Mathematical equivalence by math-verify, in a child process with a time limit.

Simplifying an expression of a model may take forever, or all memory (9^{9^{9^9}}). Expressions are
therefore parsed and compared in a child process (`distill.sandbox.bounded_calls`); each calling
process has one, which ends with it.

math-verify finds expressions and compares relations, sets and matrices part by part. Numbers and
terms are compared here, because math-verify rounds numbers to six decimals, so that 2^-98 would
equal 2^-99.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from distill.errors import DataError
from distill.rewards.math_text import answer_text, response_text, without_unclosed
from distill.sandbox.bounded_calls import OverLimit, in_child

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
# Largest relative difference at which a decimal equals a number: nine digits.
_DECIMAL = 1e-9
# Numbers of digits to which exact numbers are compared; those that agree are compared again.
_DIGITS = (50, 250)


def math_equal(response: str, answer: str) -> float:
    r"""1 if the last expression of the response equals the answer as mathematics, else 0.

    The response's expression is the last `\boxed{}` or `\fbox{}` after its thinking (an empty box
    is no expression), else the last LaTeX or plain expression. The answer is LaTeX, with or without
    dollar signs, or a plain number, which may be an amount of money (\$18).

    Equality is exact: 1/2, \frac12 and 0.5 are equal; so are (x+1)^2 and x^2+2x+1, and x > 3 and
    (3, \infty); 2^{-98} and 2^{-99} are not. The only exception: a decimal equals a number if their
    relative difference is below 1e-9, so 0.3333333333 equals 1/3, but 0.333 does not. 1 1/2 is
    three halves. 50\% equals 0.5 and also 50. A number in another base (1001_2) equals only itself,
    and a word only the same word; of a choice with its text, (A) 5, the letter is compared. A
    comparison of more than 10 s counts as not equal.

    Raises:
        DataError: there is no expression in the answer.
    """
    return _ask(_compare, response_text(response), answer) or 0.0


def math_answer(response: str) -> str | None:
    """Standard form of the response's expression; None if there is none, or it takes too long."""
    return _ask(_standard_form, response_text(response))


def _ask(function: Callable[..., Any], *arguments: str) -> Any:
    """Result of the call; None if it took too long, or too much memory."""
    try:
        return in_child(_prepare, function, *arguments, timeout_s=TIMEOUT_S)
    except OverLimit as error:
        logger.warning("%r could not be read as mathematics: %s", arguments[0][-80:], error)
        return None


def _prepare() -> None:
    import math_verify
    from math_verify import grader

    # math-verify would warn that its time limit is off.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    # Numbers of any length may be printed, because the time of the child is limited.
    sys.set_int_max_str_digits(0)
    assert callable(grader.sympy_numeric_eq) and callable(grader.sympy_symbolic_eq)
    grader.sympy_numeric_eq = _same_number
    grader.sympy_symbolic_eq = _same_term


def _compare(response: str, answer: str) -> float:
    from math_verify import verify

    given = _parse(response)
    for text in answer_text(answer):
        if expected := _parse(text):
            same = verify(expected, given, allow_set_relation_comp=True, timeout_seconds=None)
            return float(same)
    raise DataError(f"the answer {answer[:80]!r} is not a mathematical expression", field="answer")


def _standard_form(response: str) -> str | None:
    from sympy import Basic, simplify

    parsed = _parse(response)
    if not parsed:
        return None
    try:
        return str(simplify(parsed[0]) if isinstance(parsed[0], Basic) else parsed[0])
    except Exception:  # of any kind, because a model wrote the expression
        return None


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    found = parse(without_unclosed(text), parsing_timeout=None)  # pyright: ignore[reportArgumentType] - None: no limit
    return [_solutions(each) for each in found]


def _solutions(parsed: Any) -> Any:
    """Convert "x < 2 or x > 3", which math-verify parses as two relations, to a set.

    Unions and intersections are evaluated.
    """
    from sympy import FiniteSet, Intersection, Or, Union
    from sympy.core.relational import Relational

    if isinstance(parsed, FiniteSet) and parsed.args:
        relations: Any = parsed.args
        inequalities = [isinstance(each, Relational) and not each.is_Equality for each in relations]
        if all(inequalities) and len(parsed.free_symbols) == 1:
            return Or(*relations).as_set()
    if isinstance(parsed, Intersection | Union):
        return parsed.doit()
    return parsed


def _same_number(a: Any, b: Any, *_: int) -> bool:
    """True for equal numbers, and for matrices whose entries are equal."""
    from math_verify.grader import get_pct_val
    from sympy import MatrixBase

    if isinstance(a, MatrixBase) and isinstance(b, MatrixBase):
        pairs = zip(a.flat(), b.flat(), strict=False)
        return a.shape == b.shape and all(_same_number(*p) or _same_term(*p) for p in pairs)
    a, b = _imaginary(a), _imaginary(b)
    if a.free_symbols or b.free_symbols:
        return False
    if _equal(a.doit(), b.doit()):
        return True
    percents = get_pct_val(a), get_pct_val(b)
    if percents.count(None) != 1:
        return False
    return _equal(percents[0] or a, percents[1] or b)


def _imaginary(term: Any) -> Any:
    """Replace the symbol i, as math-verify reads the imaginary unit."""
    from sympy import I

    units = {each: I for each in term.free_symbols if each.name == "i"}
    return term.subs(units) if units else term


def _equal(a: Any, b: Any) -> bool:
    from sympy import Float

    if a == b:
        return True
    if a.is_Rational and b.is_Rational:
        return False
    if a.has(Float) or b.has(Float):
        return _agree(a, b, digits=30, tolerance=_DECIMAL)
    return all(_agree(a, b, digits=digits, tolerance=10.0**-digits * 1e10) for digits in _DIGITS)


def _agree(a: Any, b: Any, digits: int, tolerance: float) -> bool:
    """True if two numbers agree to a relative tolerance, or are both 0."""
    from sympy import simplify

    a_value, b_value = a.evalf(digits), b.evalf(digits)
    if not (a_value.is_finite and b_value.is_finite):
        return False
    size = max(abs(a_value), abs(b_value))
    if min(abs(a_value), abs(b_value)) < size * tolerance and (a.is_Add or b.is_Add):
        return simplify(a - b) == 0  # a sum that cancels has no exact digits
    return bool(abs(a_value - b_value) <= size * tolerance)


def _same_term(a: Any, b: Any) -> bool:
    """True if the difference of two terms is 0, whatever their symbols are; decimals are exact."""
    from sympy import MatrixBase, expand, nsimplify, simplify

    a, b = _imaginary(a), _imaginary(b)
    if isinstance(a, MatrixBase) or not (a.free_symbols or b.free_symbols):
        return False  # `_same_number` has decided these
    difference = nsimplify(a.doit() - b.doit(), rational=True)
    return expand(difference) == 0 or simplify(difference) == 0
