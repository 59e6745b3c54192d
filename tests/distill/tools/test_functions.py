"""Functions as tools: schema, results and pickling."""

import asyncio
import pickle
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from distill.errors import ConfigError
from distill.tools.base import ToolError
from distill.tools.functions import function_tool
from distill.tools.load import load_tools
from tests.refusals import refuses

MODULE = '''
import asyncio, sys, threading
from typing import Literal
from distill.tools.functions import function_tool

def add(a: int, b: int | None = None) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + (b or 0)

async def greet(name: str) -> str:
    """Greets.

    Args:
        name: whom
    """
    await asyncio.sleep(0)
    return f"hello {name}"

@function_tool
def decorated() -> str:
    """Says where it runs."""
    return threading.current_thread().name

RELEASE = threading.Event()

def hang() -> str:
    """Waits until it is released."""
    RELEASE.wait()

def leave() -> str:
    """Ends the process."""
    sys.exit(3)

def stop() -> str:
    """Raises what a future refuses."""
    raise StopIteration("x")

def silent(a: int) -> int:
    return a

def untyped(a) -> int:
    """Has no type.

    Args:
        a: what
    """

def many(*numbers: int) -> int:
    """Takes many.

    Args:
        numbers: them
    """
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "functions_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "functions_of_mine", raising=False)
    import functions_of_mine  # pyright: ignore[reportMissingImports]

    return functions_of_mine


def test_the_schema_of_a_function(mine) -> None:
    schema = function_tool(mine.add).schema["function"]
    assert (schema["name"], schema["description"]) == ("add", "Adds two numbers.")
    parameters = schema["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert parameters["required"] == ["a"]
    check = Draft202012Validator(parameters)
    assert check.is_valid({"a": 1, "b": None}) and not check.is_valid({"a": "1"})


def test_results_are_text(mine) -> None:
    assert asyncio.run(function_tool(mine.add)({"a": 1, "b": 2})) == "3"
    assert asyncio.run(function_tool(mine.greet)({"name": "you"})) == "hello you"


@pytest.mark.parametrize("name", ["add", "greet", "decorated"])
def test_it_pickles_by_name(mine, name: str) -> None:
    tool = mine.decorated if name == "decorated" else function_tool(getattr(mine, name))
    packed = pickle.dumps(tool)
    assert f"functions_of_mine:{name}".encode() in packed
    assert pickle.loads(packed).name == name


async def test_a_function_that_blocks_does_not_block_the_loop(mine) -> None:
    """Nor the end of the loop, which waits for its own threads."""
    hanging = asyncio.create_task(function_tool(mine.hang)({}))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0)
    result = await mine.decorated({})
    hanging.cancel()
    assert result == "tool decorated"
    mine.RELEASE.set()


@pytest.mark.parametrize("name", ["leave", "stop"])
def test_a_function_that_leaves_does_not_take_us_with_it(mine, name: str) -> None:
    with pytest.raises(ToolError):
        asyncio.run(function_tool(getattr(mine, name))({}))


@pytest.mark.parametrize("name", ["silent", "untyped", "many"])
def test_functions_without_types_or_docs_are_refused(mine, name: str) -> None:
    with refuses(ConfigError, "env.tools"):
        function_tool(getattr(mine, name))


def test_a_function_without_a_place() -> None:
    with refuses(ConfigError, "env.tools"):
        function_tool(lambda: 1)


LOADABLE = '''
from distill.tools.base import Tool
from distill.tools.calculator import Calculator

def double(n: int) -> int:
    """Doubles.

    Args:
        n: what
    """
    return 2 * n

class Mine(Calculator):
    name = "mine"

mine = Mine()

class Needy(Calculator):
    def __init__(self, what):
        pass

NUMBER = 3
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_of_mine.py").write_text(LOADABLE)
    monkeypatch.syspath_prepend(tmp_path)


def test_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    names = f"calculator, python,retrieval:{tmp_path} ,tools_of_mine:double,tools_of_mine:Mine"
    tools = load_tools(names)
    assert [tool.name for tool in tools] == ["calculator", "python", "search", "double", "mine"]
    assert [tool.name for tool in pickle.loads(pickle.dumps(tools))] == [t.name for t in tools]
    assert load_tools("") == () == load_tools("  ")
    assert load_tools("tools_of_mine:mine")[0].name == "mine"
    assert load_tools("python:process")[0].limits.isolation == "process"  # pyright: ignore


@pytest.mark.parametrize(
    "names",
    [
        "calculater",
        "calculator,",
        "calculator,tools_of_mine:Mine,calculator",
        "retrieval",
        "retrieval:/nowhere",
        "nowhere.at.all:f",
        "tools_of_mine:nothing",
        "tools_of_mine:Needy",
        "tools_of_mine:NUMBER",
    ],
)
def test_names_that_cannot_be_loaded(names: str) -> None:
    with refuses(ConfigError, "env.tools"):
        load_tools(names)
