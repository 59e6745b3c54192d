"""Environments of `verifiers` for tests, and the virtual environment that they need."""

import subprocess
import sys
from pathlib import Path
from typing import Any

PRODUCTS = """
import tempfile
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Product(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        tempfile.mkdtemp(prefix="product-")
        return float(len(trace.last_reply))

class Config(vf.TasksetConfig):
    num_tasks: int = 5

class Products(vf.Taskset[Product, Config]):
    def load(self):
        for i in range(self.config.num_tasks):
            data = Data(prompt=f"What is {i}*7?", answer=str(i * 7))
            yield Product(data, self.config.task)

__all__ = ["Products"]
"""
CALCULATOR = '''
import verifiers.v1 as vf

class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        """Multiplies."""
        return str(a * b)

if __name__ == "__main__":
    Tools.run()
'''
WITH_TOOLS = """
import itertools
import verifiers.v1 as vf
from with_tools.calculator import Tools

class Data(vf.TaskData):
    answer: str

class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class TasksetConfig(vf.TasksetConfig):
    task: Config = Config()

class Product(vf.Task[Data, vf.State, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

class Products(vf.Taskset[Product, TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            data = Data(prompt=f"What is {i}*7?", answer=str(i * 7))
            yield Product(data, self.config.task)

__all__ = ["Products"]
"""

# The tool of `with-tools` as the model sees it.
MULTIPLY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tools_multiply",
        "description": "Multiplies.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"title": "A", "type": "integer"},
                "b": {"title": "B", "type": "integer"},
            },
            "required": ["a", "b"],
            "title": "multiplyArguments",
        },
    },
}


def verifiers_python(folder: Path) -> str:
    """Interpreter with `verifiers`, its games, and three environments.

    `products` has a single turn, `with-tools` has a tool, and `outdated` imports something that
    `verifiers` no longer has.
    """
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    made = str(folder / "venv/bin/python")
    subprocess.run(
        [made, "-m", "pip", "install", "-q", "--no-compile", "verifiers[ta]>=0.4,<0.5", "uv"],
        check=True,
    )
    [site] = (folder / "venv/lib").glob("*/site-packages")
    (site / "products.py").write_text(PRODUCTS)
    (site / "outdated.py").write_text("from verifiers.utils import message_utils\n")
    (site / "with_tools").mkdir()
    (site / "with_tools/__init__.py").write_text(WITH_TOOLS)
    (site / "with_tools/calculator.py").write_text(CALCULATOR)
    return made
