"""Reward of programs by unit tests. Both run in the sandbox, in separate processes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path

from distill.rewards.program_tests import read_tests
from distill.rewards.verdict import LONGEST_WORDS, Verdict
from distill.sandbox.sandbox import SandboxLimits, SandboxResult, run_python

_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
LIMITS = SandboxLimits()
_CHILD = Path(__file__).with_name("unit_tests_child.py")
_RUNNER = Path(__file__).with_name("unit_tests_runner.py")


def unit_tests(response: str, answer: str) -> float:
    """1 if the program in the response passes the tests in the answer, else 0.

    The program is the response's last fenced block, or the whole response. The answer is Python
    that raises if a test fails: statements, pytest functions and classes, unittest,
    `check(candidate)`; or JSON (`distill.rewards.program_tests`): asserts, calls and their results,
    or standard input and output of the program as a script. Python tests can use the program's
    names as globals and from a module `solution`, without importing them.

    A program can neither read the tests nor run code in their process: it runs in another process
    of the sandbox, and its functions return plain data (numbers, text, lists, tuples, dicts, sets).
    Therefore no exit, no `__eq__` and no patched built-in makes a test pass. Objects of its own
    classes stay in its process. Tests may compare, add, subtract and multiply them with each other.
    Such an object never equals plain data, and any other operation with plain data, such as
    `Vector(1, 2) * 3`, is a TypeError: otherwise a `__sub__` could return 0 as the difference to
    the right number. Python tests whether an object contains a value by iterating over its items.

    Tests do rely on the program for its own objects (comparisons with each other, their truth
    values, results of their methods), and for functions such as `isclose` that they use without
    importing them. They also accept whatever plain Python accepts: `f(xs) == sorted(xs)` if `f`
    empties `xs` and returns it, and `numpy.allclose(f(x), 1.4)` if `f` returns []. Such tests
    should pass a copy, and check the length. Tests may pass functions to a program, and objects of
    their own classes, whose public attributes and items the program can use. An exception of the
    program's own class arrives as the nearest built-in exception. A name of a Python built-in
    (`sum`) means the built-in.

    Raises:
        DataError: the answer has no tests that could fail (`read_tests`).
        ConfigError: the sandbox cannot be created on this machine;
            `distill.sandbox.sandbox.require_sandbox` checks this before a run.
    """
    return tested(response, answer).reward


def tested(response: str, answer: str) -> Verdict:
    """`unit_tests` with feedback: if the program fails, the end of the tests' output and errors."""
    given = {
        "solution": _program(response),
        "tests": asdict(read_tests(answer)),
        "runner": _RUNNER.read_text(),
    }
    result = asyncio.run(run_python(_CHILD.read_text(), stdin=json.dumps(given), limits=LIMITS))
    passed = result.outcome == "ok"
    return Verdict(reward=float(passed), feedback=_feedback(result))


def _feedback(result: SandboxResult) -> str:
    """Feedback: the end of the output and of the errors, or the limit that ended the program."""
    if result.outcome == "ok":
        return "The tests passed."
    output = f"{result.stdout}\n{result.stderr}".strip()[-LONGEST_WORDS:]
    if result.outcome == "error":
        return f"The tests failed:\n{output}"
    return f"The tests were ended, {LIMITS.message_for(result.outcome)}:\n{output}".rstrip(":\n")


def _program(response: str) -> str:
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response
