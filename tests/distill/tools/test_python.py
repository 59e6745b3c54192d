"""Programs as a model writes them: their output, and their errors."""

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


def test_the_output_of_programs() -> None:
    assert run("print(sum(range(10)))") == "45\n"
    assert "printed nothing" in run("1 + 1")


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("print('so far'); 1 / 0", ["line 1", "ZeroDivisionError", "so far"]),
        ("def f(:", ["SyntaxError"]),
        ("import time; time.sleep(600)", ["2 s"]),
        ("x = 'a' * (1 << 30)", ["256 MB", "MemoryError"]),
        ("while True: print('x' * 100)", ["5000 bytes", "xxx"]),
    ],
)
def test_failing_programs(code: str, parts: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        run(code, wall_s=2 if "sleep" in code else 60, memory_mb=256, output_bytes=5000)
    assert all(each in str(caught.value) for each in parts)
    assert len(str(caught.value)) < 10_000
