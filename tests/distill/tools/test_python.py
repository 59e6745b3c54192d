"""Programs as a model writes them: what they print, and what it is told when they fail."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from distill.sandbox.sandbox import SandboxLimits
from distill.tools.base import ToolError
from distill.tools.python import PythonTool

pytestmark = pytest.mark.usefixtures("sandbox")


def run(code: str, **limits) -> str:
    tool = pickle.loads(pickle.dumps(PythonTool(SandboxLimits(**limits))))
    return asyncio.run(tool({"code": code}))


def test_what_it_prints() -> None:
    assert run("print(sum(range(10)))") == "45\n"
    assert "printed nothing" in run("1 + 1")


def test_each_starts_afresh() -> None:
    run("x = 1; open('file', 'w').write('x')")
    with pytest.raises(ToolError, match="NameError: name 'x' is not defined"):
        run("print(x)")
    with pytest.raises(ToolError, match="FileNotFoundError"):
        run("open('file')")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('so far'); 1 / 0", "(?s)exit code 1\n.*line 1.*ZeroDivisionError.*so far"),
        ("def f(:", "(?s)exit code 1\n.*SyntaxError"),
        ("import time; time.sleep(600)", "took too long: 2 s"),
        ("x = 'a' * (1 << 30)", "(?s)more than 256 MB of memory.*MemoryError"),
        ("while True: print('x' * 100)", "(?s)printed more than 5000 bytes.*xxx"),
        ("def f(n): f(n + 1)\nf(0)", "RecursionError"),
    ],
)
def test_what_fails(code: str, message: str) -> None:
    with pytest.raises(ToolError, match=message) as caught:
        run(code, wall_s=2, memory_mb=256, output_bytes=5000)
    assert len(str(caught.value)) < 10_000
