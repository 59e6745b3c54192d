"""Parsing of tests of programs, in the formats of public data sets. Empty tests are refused.

    Python                 asserts, pytest functions and classes, unittest, `check(candidate)`
    a list of texts        asserts: MBPP, OpenCodeInstruct
    a list of objects      cases with `input` and `output`: LiveCodeBench, DeepCoder, SYNTHETIC-1
    inputs and outputs     lists of equal length, `fn_name` for calls: APPS, TACO, CodeContests
    test and entry_point   Python, and the name that `check` receives: HumanEval, LeetCode

All formats except the first are JSON, or an equivalent Python literal.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from distill.errors import DataError

# Keys under which data sets nest their tests; the value replaces the object.
_WRAPPERS = ("tests", "test", "test_cases", "test_list", "unit_tests", "functional", "test_code")
_CALLED = ("functional", "function_call", "call", "function")
# Names of calls that raise or end the process, and so act as assertions.
_ASSERTING = ("fail", "raises", "warns", "exit", "_exit", "quit", "abort")
# Names by which tests can use a program without naming anything that it defines.
_REFLECTION = ("eval", "exec", "globals", "__import__", "import_module", "candidate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTests:
    """Tests in the form that `unit_tests_runner.py` runs, source first.

    Attributes:
        source: Python, executed as the module of the tests.
        functions: pytest functions of the source, except those that the source calls itself.
        classes: pytest classes and `unittest.TestCase`s of the source.
        checks: functions of the source whose argument is the function under test.
        entry: name or expression of the function under test; None: the program's main function.
        calls: pairs of arguments for the function under test, and the accepted results.
        scripts: pairs of standard input for the program, run as a script, and its expected output.
    """

    source: str = ""
    functions: Sequence[str] = ()
    classes: Sequence[str] = ()
    checks: Sequence[str] = ()
    entry: str | None = None
    calls: Sequence[tuple[list[Any], list[Any]]] = ()
    scripts: Sequence[tuple[str, str]] = ()


@lru_cache(maxsize=256)
def read_tests(answer: str) -> ProgramTests:
    """Parse the tests in an answer.

    Raises:
        DataError: the answer is neither Python nor a known format; or any program would pass,
            because nothing is asserted, or nothing of the program is used; or the tests need a
            module that is not installed, or a fixture.
    """
    try:
        data = _literal(answer)
        return _from_python(answer) if data is None else _from_data(data)
    except DataError as error:
        raise DataError(f"the answer {answer[:80]!r} {error}", field="answer") from error
    except (SyntaxError, ValueError) as error:
        raise DataError(
            f"the answer {answer[:80]!r} is not valid Python: {error}", field="answer"
        ) from error
    except (RecursionError, MemoryError) as error:  # nested brackets, in Python's parser
        raise DataError(
            f"the answer {answer[:80]!r} is nested too deeply", field="answer"
        ) from error


def _literal(text: str) -> list[Any] | dict[str, Any] | None:
    """The list or object that a text encodes, as JSON or Python; None if it encodes neither."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            data = read(text.strip())
        except (ValueError, SyntaxError, TypeError):
            continue
        return data if isinstance(data, list | dict) else None
    return None


def _from_data(data: Any) -> ProgramTests:
    """Tests in decoded JSON. An object may have them under a key, next to the function's name."""
    if isinstance(data, str):
        nested = _literal(data)
        return _from_python(data) if nested is None else _from_data(nested)
    if isinstance(data, dict):
        entry = _entry(data)
        for key in _WRAPPERS:
            if data.get(key):
                tests = _from_data(data[key])
                return replace(tests, entry=tests.entry or entry)
        return _from_columns(data, entry)
    if data and all(isinstance(each, str) for each in data):
        return _from_python("\n".join(data))
    if data and all(isinstance(each, dict) for each in data):
        return _from_cases(data)
    raise DataError("has no tests: a list of asserts or of objects with `input` and `output`")


def _entry(data: dict[str, Any]) -> str | None:
    metadata = data.get("metadata")
    if isinstance(metadata, str):
        metadata = _literal(metadata)
    places = [data, metadata] if isinstance(metadata, dict) else [data]
    names = [place.get(key) for place in places for key in ("fn_name", "entry_point", "func_name")]
    return next((name for name in names if isinstance(name, str) and name), None)


def _from_columns(data: dict[str, Any], entry: str | None) -> ProgramTests:
    inputs = data.get("inputs", data.get("input"))
    outputs = data.get("outputs", data.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise DataError(
            "is an object without tests: give `inputs` and `outputs`, or `test` and `entry_point`"
        )
    if len(inputs) != len(outputs):
        raise DataError(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    return _cases(inputs, outputs, entry, called=entry is not None)


def _from_cases(cases: list[dict[str, Any]]) -> ProgramTests:
    if not all("input" in case and "output" in case for case in cases):
        raise DataError("has cases without `input` and `output`")
    kinds = [case.get("testtype", case.get("type")) for case in cases]
    entry = next(filter(None, map(_entry, cases)), None)
    called = {kind in _CALLED or (kind is None and entry is not None) for kind in kinds}
    if len(called) > 1:
        raise DataError(f"mixes kinds of cases: {sorted({*map(str, kinds)})}")
    inputs, outputs = ([case[key] for case in cases] for key in ("input", "output"))
    return _cases(inputs, outputs, entry, called=called == {True})


def _cases(inputs: list, outputs: list, entry: str | None, *, called: bool) -> ProgramTests:
    if called:
        results = [_expected(given, result) for given, result in zip(inputs, outputs, strict=True)]
        if all(isinstance(result, list) and len(result) == 1 for result in results):
            accepted = [[result, result[0]] for result in results]  # APPS wraps results in a list
        else:
            accepted = [[result] for result in results]
        calls = tuple(zip(map(_arguments, inputs), accepted, strict=True))
        if not calls:
            raise DataError("has no tests: no case")
        return ProgramTests(entry=entry, calls=calls)
    texts = [[_text(each) for each in column] for column in (inputs, outputs)]
    if not any(output.strip() for output in texts[1]):
        raise DataError("has no tests: no case expects any output")
    return ProgramTests(scripts=tuple(zip(*texts, strict=True)))


def _arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or a text with one argument per line (LiveCodeBench)."""
    if isinstance(given, str):
        return [_value(line) for line in given.split("\n") if line.strip()]
    return list(given.values()) if isinstance(given, dict) else _listed(given)


def _expected(given: Any, result: Any) -> Any:
    return _value(result) if isinstance(given, str) and isinstance(result, str) else result


def _value(text: str) -> Any:
    """The value that a text encodes, as JSON or as Python; else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError):
            continue
    return text


def _text(lines: Any) -> str:
    return "\n".join(map(str, _listed(lines)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _from_python(source: str) -> ProgramTests:
    source = _without_pytest_main(source)
    body = ast.parse(source).body
    if not body:
        raise DataError("has no tests; any program would pass them")
    _require_modules(body)
    defined = {
        node.name: node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    running = [node for node in body if node not in defined.values()]
    called = {name for node in running for name in _called(node)}
    functions = {
        name: node
        for name, node in defined.items()
        if not isinstance(node, ast.ClassDef) and name not in called
    }
    used = {n.id for n in ast.walk(ast.Module(body, [])) if isinstance(n, ast.Name)}
    checks = [name for name, node in functions.items() if _is_check(node) and name not in used]
    collected = [
        name
        for name, node in functions.items()
        if name.startswith("test") and name not in checks and _is_collected(node, name in used)
    ]
    classes = [
        name
        for name, node in defined.items()
        if isinstance(node, ast.ClassDef) and (_is_test_case(node, defined) or _is_class(node))
    ]
    reached = _reached(running, [*collected, *classes, *checks], defined)
    if not any(map(_asserts, reached)):
        raise DataError(
            "has no tests; any program would pass them: no code that runs asserts or raises. Write "
            "`assert f(1) == 2`, or functions named test_..."
        )
    if not checks and not _uses_program(source):
        raise DataError(
            "has no tests; any program would pass them: they use only names that they define "
            "themselves"
        )
    return ProgramTests(source=source, functions=collected, classes=classes, checks=checks)


def _without_pytest_main(source: str) -> str:
    """Remove statements that start pytest, because the tests are collected here.

    pytest would search for files and find none, and would run a `conftest.py` that the program has
    written.
    """
    if "pytest.main" not in source:
        return source
    lines = source.split("\n")
    for node in ast.parse(source).body:
        calls = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
        if "pytest.main" in calls and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            lines[node.lineno - 1 : node.end_lineno] = ["pass"] + [""] * (length - 1)
    return "\n".join(lines)


def _require_modules(body: list[ast.stmt]) -> None:
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            if not _is_there(name.split(".")[0]):
                raise DataError(
                    f"imports {name!r}, which is not installed; the program's own module is "
                    "`solution`"
                )


@lru_cache
def _is_there(module: str) -> bool:
    if module in ("solution", "__main__", "__future__") or module in sys.stdlib_module_names:
        return True
    return bool(module) and importlib.util.find_spec(module) is not None


def _called(node: ast.AST) -> Iterator[str]:
    """Names of functions that a statement calls, except in a `try`, which may hide their errors."""
    if isinstance(node, ast.Try):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id
    for child in ast.iter_child_nodes(node):
        yield from _called(child)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters without a default value."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    required = positional[: len(positional) - len(given.defaults)]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return [each.arg for each in (*required, *(arg for arg, value in pairs if value is None))]


def _is_check(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return len(given := _parameters(node)) == 1 and (node.name == "check" or given == ["candidate"])


def _is_collected(node: ast.FunctionDef | ast.AsyncFunctionDef, used: bool) -> bool:
    """True if pytest would run the function. A used function with parameters is a helper.

    Raises:
        DataError: the function needs a fixture, or is asynchronous.
    """
    if isinstance(node, ast.AsyncFunctionDef):
        raise DataError(f"has the asynchronous test {node.name}, which is not supported")
    required = _parameters(node)
    if required and not node.decorator_list:
        if used:
            return False
        raise DataError(
            f"has the test {node.name}, which needs {', '.join(required)}: fixtures are not "
            "supported"
        )
    return True


def _is_class(node: ast.ClassDef) -> bool:
    """True if pytest would run the class although it is not a TestCase."""
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    named = any(name.startswith("test") for name in methods)
    return node.name.startswith("Test") and named and "__init__" not in methods


def _is_test_case(node: ast.ClassDef, defined: dict[str, Any]) -> bool:
    names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    parents = [defined[name] for name in names if name in defined and name != node.name]
    return any(name.endswith("TestCase") for name in names) or any(
        isinstance(parent, ast.ClassDef) and _is_test_case(parent, defined) for parent in parents
    )


def _reached(
    running: list[ast.stmt], collected: list[str], defined: dict[str, Any]
) -> list[ast.AST]:
    """Statements that run, collected definitions, and all definitions that these refer to."""
    seen = set(collected)
    reached: list[ast.AST] = [*running, *(defined[name] for name in collected)]
    for node in reached:  # the list grows
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        new = (names & defined.keys()) - seen
        seen |= new
        reached += [defined[name] for name in sorted(new)]
    return reached


def _asserts(node: ast.AST) -> bool:
    """True if the node contains an assertion that no `try` around it hides."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and node.test.value)
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name.startswith("assert") or name in _ASSERTING:
            return True
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Try) and any(map(_hides, node.handlers)):
        children = [each for each in children if each not in node.body]
    return any(map(_asserts, children))


def _hides(handler: ast.ExceptHandler) -> bool:
    """True if a handler catches a failed assertion and does not raise."""
    names = {n.id for n in ast.walk(handler.type or handler) if isinstance(n, ast.Name)}
    catches = handler.type is None or names & {"AssertionError", "Exception", "BaseException"}
    return bool(catches) and not any(map(_asserts, handler.body))


def _uses_program(source: str) -> bool:
    """True if tests use a name that they do not define, or import the program."""
    table = symtable.symtable(source, "tests", "exec")
    ours = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    free = {
        symbol.get_name()
        for each in _tables(table)
        for symbol in each.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or each is table)
    }
    outside = free - ours - set(dir(builtins)) - {"__name__", "__file__"}
    return bool(outside) or not free.isdisjoint(_REFLECTION) or "solution" in source


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
