"""Programs that pass, fail, or try to evade their tests."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from distill.errors import DataError
from distill.rewards import unit_tests_child, unit_tests_runner
from distill.rewards.program_tests import ProgramTests
from distill.rewards.unit_tests import unit_tests
from distill.sandbox.sandbox import SandboxLimits, run_python
from tests.refusals import refuses

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
    limits = SandboxLimits(wall_s=0.5 if "sleep" in response else 60)
    monkeypatch.setattr("distill.rewards.unit_tests.LIMITS", limits)
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


LIAR = """
class Liar{n}({base}):
    def answer(self, *others): return {answer}
for name in (
    "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "floordiv", "mod", "rmod", "pow", "rpow", "matmul", "and", "rand", "or", "ror",
    "xor", "neg", "abs", "round", "float", "int", "index", "complex", "trunc", "floor", "ceil",
    "contains", "bool", "len", "hash", "format", "array", "instancecheck", "subclasscheck",
):
    setattr(Liar{n}, f"__{{name}}__", Liar{n}.answer)
Liar{n}.__iter__ = lambda self: iter([])
Liar{n}.__getattr__ = lambda self, name: {answer}
Liar{n}.__array_interface__ = {{"shape": (), "typestr": "<f8", "data": bytes(8), "version": 3}}
def f{n}(x): return {wrong}
"""
LIARS = [
    LIAR.format(n=n, base=base, answer=answer, wrong=wrong.replace("Liar", f"Liar{n}"))
    for n, (base, answer, wrong) in enumerate(
        [
            *(("object", answer, "Liar()") for answer in ("0.0", "True", "self", "others[0]")),
            *((base, "0.0", "Liar()") for base in ("float", "list", "str", "dict")),
            ("object", "0.0", "Liar"),
            ("object", "0.0", "[Liar()]"),
            ("object", "0.0", "{Liar(): 1}.keys()"),
            ("object", "0.0", "(Liar() for _ in range(3))"),
        ]
    )
]

UNITTEST = """import unittest
class T(unittest.TestCase):
  def test(self): self.{}
result = unittest.TestResult()
T("test").run(result)
assert result.wasSuccessful()"""

# What tests of plain data look like, by a solution that passes them.
PLAIN_TESTS = {
    "3.25": [
        "assert abs(f(2) - 3.25) < 1e-6", "assert abs(3.25 - f(2)) < 1e-6",
        "assert not f(2) - 3.25", "assert not any(a - b for a, b in zip([f(2)], [3.25]))",
        "assert ((f(2) - 3.) ** 2) ** .5 == .25", "assert f(2) * 1 == 3.25",
        "assert f(2) / 1 == 3.25", "assert f(2) + 1 == 4.25", "assert 10 < f(2) ** 2 < 11",
        "assert -f(2) == -3.25", "assert f(2) == 3.25", "assert not f(2) != 3.25",
        "assert 3.25 == f(2)", "assert f(2) <= 3.25 <= f(2)", "assert f(2) >= 3.25",
        "assert f(2) in [3.25]", "assert f(2) in {3.25}", "assert {3.25: True}[f(2)]",
        "assert round(f(2), 2) == 3.25", "assert float(f(2)) == 3.25",
        "assert f'{f(2):.2f}' == '3.25'", "assert '%.2f' % f(2) == '3.25'",
        "assert sum([f(2), 1]) == 4.25", "assert max(f(2), 3) == 3.25",
        "assert isinstance(f(2), float) and f(2)", "import math; assert math.isclose(f(2), 3.25)",
        "import math; assert math.floor(f(2)) == 3",
        "import numpy; assert numpy.allclose(a := numpy.array(f(2)), 3.25) and a.size",
        "import numpy; assert numpy.allclose([f(2), f(2)], [3.25, 3.25])",
        "import numpy; assert abs(numpy.float64(3.25) - f(2)) < 1e-6",
        "import numpy; assert numpy.array_equal(numpy.array([3.25]), [f(2)])",
        "from decimal import Decimal; assert Decimal(f(2)) == Decimal('3.25')",
        "import copy; assert copy.deepcopy(f(2)) == 3.25",
        UNITTEST.format("assertEqual(f(2), 3.25)"),
        UNITTEST.format("assertAlmostEqual(f(2), 3.25)"),
        UNITTEST.format("assertAlmostEqual(3.25, f(2), delta=.01)"),
        UNITTEST.format("assertLess(3.2, f(2))"),
    ],
    "3": [
        "assert [10, 11, 12, 13][f(2)] == 13",
        "assert len(range(f(2))) == 3",
        "from decimal import Decimal; assert Decimal('3') - f(2) == 0",
        "from fractions import Fraction; assert not Fraction(3) - f(2)",
    ],
    "{3.25}": [
        "assert 3.25 in f(2)", "assert f(2) & {3.25} == {3.25}", "assert {3.25} <= f(2)",
        "assert not {3.25} - f(2)", "assert all(each in f(2) for each in [3.25])",
        UNITTEST.format("assertIn(3.25, f(2))"), UNITTEST.format("assertCountEqual(f(2), [3.25])"),
    ],
    "[3.25]": [
        "assert f(2) + [1] == [3.25, 1]", "assert [3.25] * 2 == f(2) * 2",
        UNITTEST.format("assertSequenceEqual(f(2), [3.25])"),
    ],
    "'abc'": ["assert f(2) + 'd' == 'abcd'", "assert 'b' in f(2)", "assert 'abc' == f(2)"],
}  # fmt: skip


def test_objects_that_equal_everything_pass_no_test() -> None:
    tests = [each for group in PLAIN_TESTS.values() for each in group]
    names = [f"f{n}" for n in range(len(LIARS))]
    assert passed("".join(LIARS), names, tests) == []


def test_plain_data_passes() -> None:
    for right, tests in PLAIN_TESTS.items():
        assert passed(f"def f(x): return {right}", ["f"], tests) == [["f", each] for each in tests]


def passed(program: str, names: Sequence[str], tests: Sequence[str]) -> list[list[str]]:
    """Tests that succeed with each of the program's functions as `f`."""
    code = f"""
import json, solution
well = []
for name in {list(names)!r}:
    for test in {list(tests)!r}:
        try:
            exec(test, {{"f": getattr(solution, name)}})
            well.append([name, test])
        except Exception:
            pass
print(json.dumps(well))
"""
    runner = Path(unit_tests_runner.__file__).read_text()
    given = json.dumps(
        {"solution": program, "tests": asdict(ProgramTests(source=code)), "runner": runner}
    )
    child = Path(unit_tests_child.__file__).read_text()
    result = asyncio.run(run_python(child, stdin=given))
    assert result.outcome == "ok", result.stderr
    return json.loads(result.stdout)


def test_unittest_obeys_no_hook_of_the_program_s() -> None:
    tests = (
        "import unittest\nclass T(unittest.TestCase):\n"
        "  def test(self): self.assertEqual(f(), 1)\nunittest.main()"
    )
    hook = "def load_tests(*given): return lambda result: None\ndef f(): return {}"
    assert unit_tests(hook.format(2), tests) == 0
    assert unit_tests(hook.format(1), tests) == 1


def test_names_that_python_has_stay_python_s() -> None:
    liar = "def all(x): return True\ndef f(x): return x\n"
    assert unit_tests(liar, "assert all(f(x) > 1 for x in (0, 1))") == 0
    assert unit_tests(liar, "assert all(f(x) > 1 for x in (2, 3))") == 1


STANDARD_VALUES = """
import numpy as np
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
assert np.allclose(f(np.array([1, 2]), 2), [3, 4]) and f(np.array([1]), 2).tolist() == [3]
assert isinstance(f(np.array([[1.5]]), 0), np.ndarray)
assert f(Counter("a"), Counter("b")) == Counter("ab") and type(f(deque([1]), deque())) is deque
assert f(Decimal("0.1"), 1) == Decimal("1.1") and f(Fraction(1, 2), 1) == Fraction(3, 2)
assert f(date(2020, 1, 31), timedelta(1)) == date(2020, 2, 1)
assert f(datetime(2020, 1, 1), timedelta(hours=1)).hour == 1
assert f([range(3)], [OrderedDict(a=1), time(1, 2)]) == [range(3), OrderedDict(a=1), time(1, 2)]
array, queue = np.array([1, 2]), deque([1])
g(array), g(queue)
assert array.tolist() == [2, 4] and queue == deque([1, 1])
"""
OBJECTS_OF_THE_TESTS = """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
class Items:
    def __getitem__(self, place): return [5, 6][place]
    def __len__(self): return 2
    def __iter__(self): yield from [5, 6]
ring = Node(1, Node(2))
ring.next.next = ring
assert f(ring) == 2 and (ring.value, ring.next.value) == (2, 3) and f(Node(1)) == 1
assert g(x for x in [1, 2]) == g(map(int, "12")) == g(iter([1, 2])) == 3
assert g(Items()) == 11 and h(Items()) == 7
"""


def test_objects_of_the_tests_lead_to_nothing_else_of_them() -> None:
    program = """
def f(generator, function, instance):
    ways = (
        lambda: generator.gi_frame.f_globals["SECRET"],
        lambda: function.__globals__["SECRET"],
        lambda: instance.method.__func__.__globals__["SECRET"],
        lambda: instance.__class__.method.__globals__["SECRET"],
        lambda: instance._hidden,
    )
    for way in ways:
        try:
            return way()
        except Exception:
            pass
"""
    tests = """
SECRET = 5
class Kind:
    _hidden = 5
    def method(self): return 0
assert f((x for x in [1]), lambda: 0, Kind()) {} 5
"""
    assert unit_tests(program, tests.format("==")) == 0
    assert unit_tests(program, tests.format("!=")) == 1


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
        ("def f(a, b): return a + b\ndef g(a): a += a", STANDARD_VALUES),
        ("def f(node):\n  seen = set()\n  while node and node not in seen:\n    seen.add(node)\n"
         "    node.value += 1\n    node = node.next\n  return len(seen)\n"
         "def g(items): return sum(items)\ndef h(items): return items[0] + len(items)",
         OBJECTS_OF_THE_TESTS),
        ("print('noise')\ndef f(): print('x' * 100); return 1\n"
         "if __name__ == '__main__': input()", "assert f() == 1"),
    ],
)  # fmt: skip
def test_allowed_tests(program: str, tests: str) -> None:
    assert unit_tests(program, tests) == 1


@pytest.mark.parametrize("answer", ["def f(:", "42 is 4 2", "\0", "", "# none\n"])
def test_an_answer_without_tests_is_a_data_error(answer: str) -> None:
    with refuses(DataError, "answer"):
        unit_tests(ADD, answer)
