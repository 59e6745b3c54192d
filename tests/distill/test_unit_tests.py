"""Programs that pass, programs that fail, and programs that would rather not be tested."""

from __future__ import annotations

import asyncio

import pytest

from distill.errors import DataError
from distill.rewards import judge, load_reward
from distill.sandbox import SandboxLimits
from distill.unit_tests import unit_tests, unit_tests_unisolated

pytestmark = pytest.mark.usefixtures("sandbox")

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]\n"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (ADD, 1),
        (f"So:\n```python\n{ADD}```\nDone.", 1),
        (f"```\n1 / 0\n```\nno:\n```py\n{ADD}```", 1),
        (f"```python\n{ADD}", 1),
        (f"```python\n{ADD}```\n```python\ndef add(a, b): return 3\n```", 0),
        ("def add(a, b): return a - b", 0),
        ("def sub(a, b): return a - b", 0),
        ("I cannot.", 0),
        ("", 0),
        ("import time\ntime.sleep(600)", 0),
    ],
)
def test_programs(response: str, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.unit_tests._LIMITS", SandboxLimits(wall_s=5))
    assert unit_tests(response, TESTS) == reward


# Each would pass if it ran in one process with the tests, or could read them.
CHEATS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "polite exit when called": "def add(a, b): raise SystemExit(0)",
    "exit of the others": """
import os, signal
def add(a, b):
    for pid in range(1, 50):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if pid != os.getpid():
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
""",
    "equal to all": """
class All:
    def __eq__(self, other): return True
    def __bool__(self): return True
def add(a, b): return All()
""",
    "a number equal to all": """
class All(int):
    def __eq__(self, other): return True
def add(a, b): return All(5)
""",
    "a list equal to all": """
class All(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([7])
def add(a, b): return All()
""",
    "another assertion": """
import builtins
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
def add(a, b): return 0
""",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "a trace": "import sys\nsys.settrace(lambda *a: None)\ndef add(a, b): return 0",
    "reads the tests": """
import gc, glob, os, sys
def add(a, b):
    texts = [o for o in gc.get_objects() if isinstance(o, str)]
    texts += [repr(frame.f_globals) for frame in sys._current_frames().values()]
    for place in ("/program.py", "/proc/1/cmdline", "/dev/stdin", *glob.glob("/tmp/*")):
        try:
            texts.append(open(place).read())
        except OSError:
            pass
    return (3 if a == 1 else [1, 2]) if any("assert add(1, 2)" in text for text in texts) else 0
""",
    "writes to every file": """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'["value", ["dict", []], ["list", []]]\\n{"exit_code": 0}\\n')
    except OSError:
        pass
def add(a, b): return 0
""",
    "a trick for the reader": """
import os
def add(a, b):
    for fd in range(3, 64):
        try:
            os.write(fd, b'["getattr", ["list", [["yours", 0], "__globals__"]], ["dict", []]]\\n')
        except OSError:
            pass
    return 0
""",
    "other built-ins": """
__builtins__ = {"AssertionError": BaseException, "__build_class__": print}
def add(a, b): return 0
""",
    "its own encoder": """
import os, sys
def lie(message):
    for fd in range(3, 64):
        try:
            os.write(fd, message + b"\\n")
        except OSError:
            pass
# The answer to `names`, in place of ours.
lie(b'["value", ["dict", [["add", ["module", "unittest.__main__"]]]], ["list", [1]]]')
os._exit(0)
""",
    "its own names": """
import os, sys
def lie(message):
    for fd in range(3, 64):
        try:
            os.write(fd, message + b"\\n")
        except OSError:
            pass
name = b'["dict", [["__builtins__", ["dict", []]], ["AssertionError", 1], ["add", 3]]]'
lie(b'["value", ' + name + b', ["list", [1]]]')
os._exit(0)
""",
    "traces the tests": """
import ctypes, os
def add(a, b):
    libc = ctypes.CDLL(None, use_errno=True)
    return (3 if a == 1 else [1, 2]) if libc.ptrace(16, os.getppid(), None, None) == 0 else 0
""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(cheat: str) -> None:
    assert unit_tests(CHEATS[cheat], TESTS) == 0


def test_names_that_python_has_stay_python_s() -> None:
    liar = "def all(x): return True\ndef f(x): return x\n"
    assert unit_tests(liar, "assert all(f(x) > 1 for x in (0, 1))") == 0
    assert unit_tests(liar, "assert all(f(x) > 1 for x in (2, 3))") == 1


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(): return {'a': (1, {2}), b'x': 1j, None: {frozenset({1})}}",
         "assert f() == {'a': (1, {2}), b'x': 1j, None: {frozenset({1})}}"),
        ("def f(): return float('inf'), 10 ** 5000", "assert f() == (float('inf'), 10 ** 5000)"),
        ("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None and x == [1, 2]"),
        ("def f(m): m[0][0] = 5; m.append([6])", "m = [[1]]\nf(m)\nassert m == [[5], [6]]"),
        ("def f(g, x): return [g(i) for i in x]", "assert f(lambda i: i + 1, [1, 2]) == [2, 3]"),
        ("def f(n):\n  for i in range(n): yield i",
         "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0"),
        ("def f(n): raise ValueError('bad', n)",
         "try:\n  f(1)\nexcept ValueError as e:\n  assert 'bad' in str(e)\nelse:\n  assert False"),
        ("class Solution:\n  def two(self, n): return n * 2", "assert Solution().two(2) == 4"),
        ("class V:\n  def __init__(s, x): s.x = x\n  def __add__(s, o): return V(s.x + o.x)\n"
         "  def __eq__(s, o): return s.x == o.x\n  def __len__(s): return s.x",
         "v = V(1) + V(2)\nassert v == V(3) and v != V(4) and v.x == 3 and len(v) == 3\n"
         "assert isinstance(v, V) and not isinstance(3, V)\nv.x = 9\nassert v.x == 9"),
        ("import math\nN = 3", "assert math.floor(2.5) + N == 5"),
        ("import numpy as n\ndef f(): return n.float32(.5), n.int64(2)", "assert f() == (0.5, 2)"),
        ("def f(): return 1", "from solution import f as g\nassert g() == 1"),
        ("def f(): return 1", "def check(candidate):\n  assert candidate() == 1\ncheck(f)"),
        ("def f(): return 1", "import unittest\nclass T(unittest.TestCase):\n"
         "  def test(self): self.assertEqual(f(), 1)\nif __name__ == '__main__': unittest.main()"),
        ("print('noise')\ndef f(): print('x' * 100); return 1\n"
         "if __name__ == '__main__': input()", "assert f() == 1"),
    ],
)  # fmt: skip
def test_what_tests_may_do(program: str, tests: str) -> None:
    assert unit_tests(program, tests) == 1
    assert unit_tests(program, tests + "\nassert False") == (1 if "unittest.main" in tests else 0)


def test_unittest_fails_too() -> None:
    tests = (
        "import unittest\nclass T(unittest.TestCase):\n"
        "  def test(self): self.assertEqual(f(), 1)\nunittest.main()"
    )
    assert unit_tests("def f(): return 2", tests) == 0


@pytest.mark.parametrize("answer", ["def f(:", "42 is 4 2", "\0"])
def test_an_answer_that_is_no_python_is_the_data_s_fault(answer: str) -> None:
    with pytest.raises(DataError, match="is no Python"):
        unit_tests(ADD, answer)


@pytest.mark.parametrize("answer", ["", "# none\n"])
def test_an_answer_without_tests_is_the_data_s_fault(answer: str) -> None:
    with pytest.raises(DataError, match="has no tests"):
        unit_tests(ADD, answer)


def test_it_is_a_reward_that_waits_in_a_thread() -> None:
    reward = load_reward("distill.unit_tests:unit_tests")
    assert asyncio.run(judge(reward, ADD, TESTS)) == 1.0


def test_without_isolation() -> None:
    assert unit_tests_unisolated(ADD, TESTS) == 1
    assert unit_tests_unisolated(CHEATS["hard exit"], TESTS) == 0
