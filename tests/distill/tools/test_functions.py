"""Tools: arithmetic, programs, retrieval, and functions of users."""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from distill.errors import ConfigError, DataError
from distill.sandbox.sandbox import SandboxLimits
from distill.tools.base import ToolError
from distill.tools.calculator import Calculator, calculate
from distill.tools.functions import function_tool
from distill.tools.load import load_tools
from distill.tools.python import PythonTool
from distill.tools.retrieval import Retrieval
from tests.refusals import refuses
from tests.rows import write_rows

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


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("2 ** -100000000", "0"),
        ("10 / 4", "2.5"),
        ("1e3", "1000"),
        ("1 / 3", "0.333333333333"),
        ("2.0 ** 53", "9.00719925474e+15"),
        ("2.0 ** 53 - 1", "9007199254740991"),
        ("2 ** 64", "18446744073709551616"),
        ("sqrt(16)", "4"),
        ("round(2.567, 2)", "2.57"),
        ("max(1, 2.5, -3)", "2.5"),
        ("factorial(5)", "120"),
        ("cos(pi)", "-1"),
        (" 6 \N{MULTIPLICATION SIGN} 7 ", "42"),
        ("+3", "3"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "1 +",
        "",
        "2 ^ 3",
        "x + 1",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "1e308 * 10",
        "round(5, -1000000000)",
        "factorial(100000)",
        "min()",
        "sqrt(value=2)",
        "'a' * 1000",
        "True + 1",
        "1j * 1j",
        "1 < 2",
        "x = 3",
        "__import__('os').getpid()",
        "sqrt.__globals__",
        "(lambda: 1)()",
        "1" * 1001,
        "(" * 450 + "1" + ")" * 450,
        "-" * 999 + "1",
        "\0",
    ],
)
def test_other_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9 ** 9",
        "10 ** 1000000",
        "(10 ** 2000) ** 1000",
        "*".join(["factorial(1000)"] * 50),
        "(-3) ** 10000000",
    ],
)
def test_huge_results_are_refused_at_once(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)  # computed, it would be hours


def test_the_tool() -> None:
    tool = pickle.loads(pickle.dumps(Calculator()))
    assert asyncio.run(tool({"expression": "6 * 7"})) == "42"
    assert tool.schema["function"]["parameters"]["required"] == ["expression"]


def run(code: str, **limits) -> str:
    tool = pickle.loads(pickle.dumps(PythonTool(SandboxLimits(**limits))))
    return asyncio.run(tool({"code": code}))


@pytest.mark.usefixtures("sandbox")
def test_the_output_of_programs() -> None:
    assert run("print(sum(range(10)))") == "45\n"
    assert "printed nothing" in run("1 + 1")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("print('so far'); 1 / 0", ["line 1", "ZeroDivisionError", "so far"]),
        ("def f(:", ["SyntaxError"]),
        ("import time; time.sleep(600)", ["0.5 s"]),
        ("x = 'a' * (1 << 30)", ["256 MB", "MemoryError"]),
        ("while True: print('x' * 100)", ["5000 bytes", "xxx"]),
    ],
)
def test_failing_programs(code: str, parts: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        run(code, wall_s=0.5 if "sleep" in code else 60, memory_mb=256, output_bytes=5000)
    assert all(each in str(caught.value) for each in parts)
    assert len(str(caught.value)) < 10_000


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "birds.txt").write_text("The heron stands still.\n\nA swift never lands.\n")
    (tmp_path / "deep" / "cities.md").write_text(
        "# 城市\n\n北京是中国的首都。\n\n東京は日本の首都です。"
    )
    rows = [{"text": "Isotherms join places of one temperature."}, {"text": "Isobars: pressure."}]
    write_rows(tmp_path / "maps.jsonl", *rows)
    (tmp_path / "ignored.bin").write_text("heron heron heron")
    return tmp_path


def search(directory: Path, query: str, **arguments) -> str:
    return asyncio.run(Retrieval(directory)({"query": query, **arguments}))


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("HERON", "[1] birds.txt\nThe heron stands still."),
        ("which swift lands?", "[1] birds.txt\nA swift never lands."),
        ("temperature", "[1] maps.jsonl:1\nIsotherms join places of one temperature."),
        ("中国首都", "[1] deep/cities.md\n北京是中国的首都。"),
        ("日本", "[1] deep/cities.md\n東京は日本の首都です。"),
        ("quetzal", "No passage has any of these words."),
        ("?!", "No passage has any of these words."),
    ],
)
def test_found_passages(texts: Path, query: str, first: str) -> None:
    assert search(texts, query).split("\n\n")[0] == first


def test_as_many_as_asked_for(texts: Path) -> None:
    assert search(texts, "首都", top_k=1).count("首都") == 1
    assert search(texts, "首都").count("首都") == 2


def test_it_pickles_by_its_directory_and_finds_the_same_elsewhere(texts: Path) -> None:
    tool = Retrieval(texts)
    here = asyncio.run(tool({"query": "the heron swift 首都"}))
    packed = pickle.dumps(tool)
    assert str(texts).encode() in packed and b"stands still" not in packed
    code = f"""
import asyncio, pickle, sys
print(asyncio.run(pickle.loads({packed!r})({{"query": "the heron swift 首都"}})))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True)
    assert done.stdout.decode().strip() == here, done.stderr.decode()


def test_directories_without_text(tmp_path: Path) -> None:
    with refuses(ConfigError, "env.tools"):
        Retrieval(tmp_path / "none")
    (tmp_path / "a.txt").touch()
    with refuses(ConfigError, "env.tools"):
        Retrieval(tmp_path)


@pytest.mark.parametrize("line", ["{", '{"texts": "a"}', '{"text": 1}', "[]"])
def test_invalid_rows_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with refuses(DataError, None, names="a.jsonl:2:"):
        search(tmp_path, "a")
