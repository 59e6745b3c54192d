"""Tools by name, also custom ones."""

import pickle
from pathlib import Path

import pytest

from distill.errors import ConfigError
from distill.tools.load import load_tools
from tests.refusals import refuses

MODULE = '''
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
    (tmp_path / "tools_of_mine.py").write_text(MODULE)
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
