"""Tools by name, the user's own among them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from distill.errors import ConfigError
from distill.tools.load import load_tools

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
    ("names", "message"),
    [
        ("calculater", "tools='calculater' .* did you mean 'calculator'"),
        ("calculator,", "tools='' is neither"),
        ("calculator,tools_of_mine:Mine,calculator", "2 tools named 'calculator'; keep one"),
        ("retrieval", "neither|needs a directory"),
        ("retrieval:/nowhere", "no such directory"),
        ("nowhere.at.all:f", "cannot be imported: ModuleNotFoundError"),
        ("tools_of_mine:nothing", "cannot be imported: AttributeError"),
        ("tools_of_mine:Needy", "cannot be made: TypeError"),
        ("tools_of_mine:NUMBER", "is 3: neither a function nor a Tool"),
    ],
)
def test_names_that_cannot_be_loaded(names: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tools(names)
