"""Reward of programs by unit tests. Both run in the sandbox, apart from each other."""

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

    The program is the response's last fenced block, or all of it. The answer is Python that raises
    where a test fails: statements, pytest functions and classes, unittest, `check(candidate)`; or
    JSON (`distill.rewards.program_tests`): asserts, calls and their results, or standard input and
    output of the program as a script. Python tests see the program's names, as their own and in a
    module `solution`, and need not import them.

    A program can neither read the tests nor run among them: it is in another process of the
    sandbox, and what its functions return comes as plain data (numbers, text, lists, tuples, dicts,
    sets). So no exit, no `__eq__` and no patched built-in makes a test pass. Objects of its own
    classes stay there. They may be compared, added, subtracted and multiplied with each other; with
    plain data they equal nothing, and all else is a TypeError, which `Vector(1, 2) * 3` is too: no
    `__sub__` can make 0 of a difference to the right number. Whether one contains a value is found
    by going through its items.

    What remains is its word about objects of its own classes (compared with each other, asked if
    they are true, what their methods answer), and about functions such as `isclose` that tests use
    without importing them. What is true in plain Python is so here: `f(xs) == sorted(xs)` of an `f`
    that empties `xs` and returns it, and `numpy.allclose(f(x), 1.4)` of one that returns []. Give
    such tests a copy, and a length. Functions may be passed to a program; objects of the tests' own
    classes, and exceptions of its own to catch, may not, and a name that Python itself has (`sum`)
    means Python's.

    Raises:
        DataError: the answer has no tests that could fail (`read_tests`).
        ConfigError: the sandbox cannot be made on this machine;
            `distill.sandbox.sandbox.require_sandbox` says so beforehand.
    """
    return tested(response, answer).reward


def tested(response: str, answer: str) -> Verdict:
    """`unit_tests`, and of a program that fails the end of what the tests printed and raised."""
    given = {
        "solution": _program(response),
        "tests": asdict(read_tests(answer)),
        "runner": _RUNNER.read_text(),
    }
    result = asyncio.run(run_python(_CHILD.read_text(), stdin=json.dumps(given), limits=LIMITS))
    passed = result.outcome == "ok"
    return Verdict(reward=float(passed), feedback=_told(result))


def _told(result: SandboxResult) -> str:
    """The end of the output, the error last, or the limit that ended the program."""
    if result.outcome == "ok":
        return "The tests passed."
    said = f"{result.stdout}\n{result.stderr}".strip()[-LONGEST_WORDS:]
    if result.outcome == "error":
        return f"The tests failed:\n{said}"
    return f"The tests were ended, {LIMITS.said_of(result.outcome)}:\n{said}".rstrip(":\n")


def _program(response: str) -> str:
    blocks = _FENCED.findall(response)
    return blocks[-1] if blocks else response
