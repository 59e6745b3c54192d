"""Calculator tool: arithmetic by simpleeval, limited to operations that are fast."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

from simpleeval import InvalidExpression, SimpleEval

from distill.errors import first_line
from distill.tools.base import Tool, ToolError

_LONGEST = 1000
# About 3000 digits; Python prints at most 4300.
_MAX_BITS = 10_000
_MAX_FACTORIAL = 1000
_MAX_DIGITS = 100
_WHOLE = 2**53
_SIGNS = str.maketrans({"×": "*", "÷": "/", "\N{MINUS SIGN}": "-", "·": "*"})  # noqa: RUF001

Number = int | float


class Calculator(Tool):
    """Tool that evaluates numbers, + - * / // % **, parentheses, and the functions it describes."""

    @property
    def name(self) -> str:
        return "calculator"

    @property
    def description(self) -> str:
        return (
            "Evaluates an arithmetic expression and returns its value. Knows + - * / // % ** and "
            f"parentheses, the functions {', '.join(_FUNCTIONS)}, and pi and e; angles are in "
            "radians, log is natural."
        )

    @property
    def parameters(self) -> Mapping[str, Any]:
        expression = {"type": "string", "description": "For example: (12 + 3) * 4 / sqrt(2)"}
        return {
            "type": "object",
            "properties": {"expression": expression},
            "required": ["expression"],
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Evaluate an expression: integers are printed in full, other numbers to 12 significant digits.

    Raises:
        ToolError: the text is not arithmetic, or its value is not a finite real number, or too
            large.
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression is longer than {_LONGEST} characters; use several calls")
    try:
        value = _Arithmetic().eval(expression.translate(_SIGNS).strip())
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error
    except (RecursionError, MemoryError) as error:
        raise ToolError("the expression is nested too deeply; use several calls") from error
    except (InvalidExpression, SyntaxError, TypeError, ValueError, KeyError) as error:
        raise ToolError(f"cannot evaluate {expression[:100]!r}: {first_line(error)}") from error
    return _printed(value)


def _printed(value: Number) -> str:
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ToolError("the result is too large, or not a number")
    return str(int(value)) if value.is_integer() and abs(value) < _WHOLE else f"{value:.12g}"


class _Arithmetic(SimpleEval):
    """Evaluator without strings, comparisons, lists, attributes and subscripts."""

    def __init__(self) -> None:
        super().__init__(operators=_OPERATORS, functions=_FUNCTIONS, names=dict(_CONSTANTS))
        kinds: tuple[type, ...] = (ast.Expr, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name)
        nodes: dict[Any, Any] = dict(self.nodes)
        self.nodes = {**{kind: nodes[kind] for kind in kinds}, ast.Constant: _constant}


def _constant(node: ast.Constant) -> Number:
    if type(node.value) not in (int, float):
        raise ValueError(f"{node.value!r} is not a real number")
    return _bounded(cast(Number, node.value))


def _bounded(value: Any) -> Number:
    """Check an intermediate result: it must be real, and not too large."""
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        bits = abs(base).bit_length()
        if bits > 1 and bits * abs(exponent) > _MAX_BITS:
            raise OverflowError
    return base**exponent


def _round(value: Number, digits: Number | None = None) -> Number:
    if digits is None:
        return round(value)
    if not isinstance(digits, int) or abs(digits) > _MAX_DIGITS:
        raise ValueError(f"round to a whole number of digits, at most {_MAX_DIGITS}")
    return round(value, digits)


def _factorial(value: Number) -> Number:
    if not (0 <= value <= _MAX_FACTORIAL and value == int(value)):
        raise ValueError(f"factorial needs a whole number from 0 to {_MAX_FACTORIAL}")
    return math.factorial(int(value))


def _checked(function: Callable[..., Any]) -> Callable[..., Number]:
    return lambda *arguments: _bounded(function(*arguments))


def _no_xor(left: Number, right: Number) -> Number:
    raise ValueError("^ is not a power; write **")


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: _checked(operator.add),
    ast.Sub: _checked(operator.sub),
    ast.Mult: _checked(operator.mul),
    ast.Div: _checked(operator.truediv),
    ast.FloorDiv: _checked(operator.floordiv),
    ast.Mod: _checked(operator.mod),
    ast.Pow: _checked(_power),
    ast.BitXor: _no_xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: _checked(function)
    for name, function in {
        "sqrt": math.sqrt,
        "abs": abs,
        "round": _round,
        "floor": math.floor,
        "ceil": math.ceil,
        "min": min,
        "max": max,
        "exp": math.exp,
        "log": math.log,
        "log2": math.log2,
        "log10": math.log10,
        "sin": math.sin,
        "cos": math.cos,
        "tan": math.tan,
        "asin": math.asin,
        "acos": math.acos,
        "atan": math.atan,
        "gcd": math.gcd,
        "factorial": _factorial,
    }.items()
}
