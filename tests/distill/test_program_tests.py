"""Formats of published tests: right programs pass, wrong ones fail, empty tests are refused."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from types import ModuleType

import pytest

from distill.errors import DataError
from distill.rewards import unit_tests_runner
from distill.rewards.program_tests import read_tests
from distill.rewards.registry import check_answer, load_reward
from distill.rewards.unit_tests import unit_tests

pytestmark = pytest.mark.usefixtures("sandbox")

SQUARE = "def f(x):\n    return {}\n"
RIGHT, WRONG = SQUARE.format("x * x"), SQUARE.format("x * x if x < 3 else 1")
METHOD = "class Solution:\n    def f(self, x):\n        return {}\n"
SCRIPT = "n = int(input())\nfor x in map(int, input().split()): print({}, end=' ')\n"


FUNCTIONS = {
    "asserts": "assert f(2) == 4\nassert f(3) == 9",
    "pytest functions": "from solution import f\n\ndef test_two():\n    assert f(2) == 4\n\n"
    "def test_three():\n    assert f(3) == 9\n",
    "parametrized": "import pytest\n\n"
    "@pytest.mark.parametrize('x, y', [(2, 4), pytest.param(3, 9)])\n"
    "def test_f(x, y):\n    assert f(x) == y\n",
    "parametrized twice": "import pytest\n\n@pytest.mark.parametrize('x', [2, 3])\n"
    "@pytest.mark.parametrize(['n'], [(1,), (2,)])\n"
    "def test_f(x, n):\n    assert f(x) * n == x * x * n\n",
    "pytest that is started": "import sys\nimport pytest\n\n"
    "def test_f():\n    assert f(3) == 9\n\n"
    "if __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))\n",
    "a pytest class": "class TestF:\n    def setup_method(self):\n        self.x = 3\n\n"
    "    def test_two(self):\n        assert f(2) == 4\n\n"
    "    def test_three(self):\n        assert f(self.x) == 9\n",
    "unittest without main": "import unittest\n\nclass T(unittest.TestCase):\n"
    "    def setUp(self):\n        self.x = 3\n\n"
    "    def test_a(self):\n        self.assertEqual(f(self.x), 9)\n",
    "unittest that is run": "import unittest\n\nclass T(unittest.TestCase):\n"
    "    def test_a(self):\n        self.assertEqual(f(3), 9)\n\n"
    "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "a subclass of a TestCase": "from unittest import TestCase\n\n"
    "class Base(TestCase):\n    pass\n\n"
    "class T(Base):\n    def test_a(self):\n        self.assertEqual(f(3), 9)\n",
    "tests called in a loop": "def test_a():\n    assert f(3) == 9\n\nfor test in [test_a]:\n"
    "    try:\n        test()\n    except AssertionError:\n        print('failed')\n",
    "a helper with arguments": "def test_one(x, y):\n    assert f(x) == y\n\n"
    "test_one(2, 4)\ntest_one(3, 9)\n",
    "HumanEval": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
    "    assert candidate(3) == 9\n",
    "HumanEval with its call": "def check(candidate):\n    assert candidate(3) == 9\n\ncheck(f)",
    "HumanEval with its entry point": json.dumps(
        {"test": "def check(candidate):\n    assert candidate(3) == 9\n", "entry_point": "f"}
    ),
    "a list of asserts": json.dumps(["assert f(2) == 4", "\nassert f(3) == 9\n"]),
    "a list as Python writes it": str(["assert f(2) == 4", "assert f(3) == 9"]),
    "MBPP": json.dumps({"test_list": ["assert f(3) == 9"], "test_imports": []}),
    "APPS": json.dumps({"fn_name": "f", "inputs": [[2], [3]], "outputs": [[4], [9]]}),
    "TACO": json.dumps({"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}),
    "LiveCodeBench's rows": json.dumps(
        {"fn_name": "f", "inputs": ["2", "3"], "outputs": ["4", "9"]}
    ),
    "LiveCodeBench": json.dumps(
        [{"input": "3", "output": "9", "testtype": "functional", "metadata": {"func_name": "f"}}]
    ),
    "LiveCodeBench without a name": json.dumps(
        [{"input": "3", "output": "9", "testtype": "functional"}]
    ),
    "SYNTHETIC-1": json.dumps(
        {"language": "python", "test_cases": [
            {"type": "function_call", "fn_name": "f", "input": [3], "output": 9}]}
    ),
}  # fmt: skip
SCRIPTS = {
    "APPS": json.dumps({"inputs": ["2\n2 3\n"], "outputs": ["4 9\n"]}),
    "CodeContests": json.dumps({"input": ["1\n2\n", "1\n3\n"], "output": ["4\n", "9\n"]}),
    "LiveCodeBench": json.dumps(
        [{"input": "1\n2", "output": "4", "testtype": "stdin"},
         {"input": "1\n3", "output": "9", "testtype": "stdin"}]
    ),
    "decimals in lists of lines": json.dumps(
        {"inputs": [["2", "2 3"]], "outputs": [["4.0000001 9.0"]]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(RIGHT, FUNCTIONS[kind], monkeypatch)
    assert not passes(WRONG, FUNCTIONS[kind], monkeypatch)


def passes(program: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the program passes in this process; the sandbox costs a tenth of a second."""
    tests, solution, names = read_tests(answer), ModuleType("solution"), {"__name__": "tests"}
    exec(program, vars(solution))
    monkeypatch.setitem(sys.modules, "solution", solution)
    names |= {"f": solution.f}
    try:
        exec(tests.source, names)
        unit_tests_runner.run(asdict(tests), names, lambda: solution.f, lambda text: ("", 1, ""))
    except (AssertionError, ZeroDivisionError):
        return False
    return True


@pytest.mark.parametrize("kind", ["APPS", "LiveCodeBench without a name"])
def test_calls_of_functions_and_of_methods(kind: str) -> None:
    assert unit_tests(RIGHT, FUNCTIONS[kind]) == 1
    assert unit_tests(METHOD.format("x * x"), FUNCTIONS[kind]) == 1
    assert unit_tests(METHOD.format("x + 2"), FUNCTIONS[kind]) == 0


@pytest.mark.parametrize("kind", SCRIPTS)
def test_scripts(kind: str) -> None:
    assert unit_tests(SCRIPT.format("x * x"), SCRIPTS[kind]) == 1
    assert unit_tests(SCRIPT.format("x + 2"), SCRIPTS[kind]) == 0


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def main():\n    input()\n    print(int(input()) ** 2)\n"
         "if __name__ == '__main__': main()", 1),
        ("import sys\n_, x = sys.stdin.read().split()\nprint(int(x) ** 2); sys.exit()", 1),
        ("import atexit, io\nout = io.StringIO()\natexit.register(lambda: print(out.getvalue()))\n"
         "input()\nout.write(str(int(input()) ** 2))", 1),
        ("from threading import Thread\ninput()\n"
         "Thread(target=lambda: print(int(input()) ** 2)).start()", 1),
        ("input()\nprint(int(input()) ** 2)\nraise ValueError", 0),
        ("input()\nprint(int(input()) ** 2, 'or so')", 0),
        ("", 0),
        ("def f(:", 0),
        ("import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[\"4\", 0, \"\"]\\n')\n"
         "  except OSError: pass", 0),
    ],
)  # fmt: skip
def test_a_script_is_run_as_one(program: str, reward: float) -> None:
    assert unit_tests(program, SCRIPTS["CodeContests"]) == reward


def test_the_function_under_test_is_the_one_that_no_other_uses() -> None:
    helper = "def g(x):\n    return x\n"
    for program in (helper + RIGHT.replace("x * x", "g(x) * x"), "import math\n" + RIGHT):
        assert unit_tests(program, FUNCTIONS["HumanEval"]) == 1
    either = SQUARE.format("4") + SQUARE.format("9").replace("f", "g", 1)
    assert unit_tests(either, FUNCTIONS["HumanEval"]) == 0


@pytest.mark.parametrize(
    ("result", "expected", "reward"),
    [
        ("(1, [2, (3,)])", [1, [2, [3]]], 1),
        ("{1: 'a'}", {"1": "a"}, 1),
        ("0.1 + 0.2", 0.3, 1),
        ("0.31", 0.3, 0),
        ("[1, 2]", [2, 1], 0),
        ("[1]", [[1]], 1),
        ("[1, 2]", [[1], 2], 0),
        ("'1'", 1, 0),
        ("None", [], 0),
        ("type('Any', (), {'__eq__': lambda *a: True})()", 3, 0),
    ],
)
def test_results_of_calls(
    result: str, expected: object, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = json.dumps({"fn_name": "f", "inputs": [[0], [1]], "outputs": [expected, expected]})
    assert passes(f"def f(x): return {result}", case, monkeypatch) == reward


@pytest.mark.parametrize(
    "answer",
    [
        "f(1) == 2",
        "f(1)",
        "print(f(1) == 2)",
        "result = f(1)",
        "42",
        "'assert f(1) == 2'",
        "def f(x):\n    return x\nassert f(1) == 1",
        "def main():\n    assert f(1) == 2\n",
        "class Checks:\n    def run(self):\n        assert f(1) == 2\n",
        "import unittest\nclass T(unittest.TestCase):\n    pass\nunittest.main()",
        "assert True",
        "assert 1 + 1 == 2",
        "try:\n    assert f(1) == 2\nexcept AssertionError:\n    print('failed')",
        "try:\n    assert f(1) == 2\nexcept:\n    pass",
        "from a_module_of_nobody import f\nassert f(1) == 2",
        "from .solution import f\nassert f(1) == 2",
        "def test_f(tmp_path):\n    assert f(tmp_path) == 2",
        "async def test_f():\n    assert f(1) == 2",
        "[]",
        "{}",
        "[1, 2]",
        '["f(1) == 2"]',
        '[{"input": "1"}]',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["1"], "outputs": [""]}',
        '{"fn_name": "f", "inputs": [], "outputs": []}',
        '[{"input": "1", "output": "2", "testtype": "stdin"},'
        ' {"input": "1", "output": "2", "testtype": ["functional"], "fn_name": "f"},'
        ' {"input": "1", "output": "2", "testtype": "functional"}]',
        '[{"input": "1", "output": "2", "testtype": "stdin"},'
        ' {"input": "1", "output": "2", "testtype": "functional"}]',
        "[" * 500 + "]" * 500,
        "-" * 100_000 + "1",
    ],
)
def test_tests_that_cannot_fail_are_refused_before_the_run(answer: str) -> None:
    with pytest.raises(DataError):
        check_answer(load_reward("unit_tests"), answer)


@pytest.mark.parametrize(
    "answer",
    [
        "import solution\nif solution.f(1) != 2:\n    raise SystemExit(1)",
        "import numpy as np\nnp.testing.assert_allclose(f(1), 2)",
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n    f(1)",
        "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass",
        "try:\n    assert f(1) == 2\nexcept Exception as e:\n    raise ZeroDivisionError from e",
        "def run():\n    assert f(1) == 2\nif __name__ != '__other__':\n    run()",
        "def same(a, b):\n    assert a == b\ndef test():\n    same(f(1), 2)",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def same(self, x, y): self.assertEqual(x, y)\n"
        "    def test_a(self): self.same(f(1), 2)",
    ],
)
def test_tests_that_can_fail_are_accepted(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(SystemExit):
        assert not passes("def f(x): return 1 / 0 if x == 2 else 1 / 3", answer, monkeypatch)
