"""docs/library.md: every block of code runs, in order."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import isotherm
from tests.conftest import TinyPair
from tests.e2e.harness import REPOSITORY


def test_the_page_runs(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("student", "teacher", "prompts"):
        (tmp_path / name).with_suffix(Path(getattr(tiny_pair, name)).suffix).symlink_to(
            getattr(tiny_pair, name)
        )
    page = REPOSITORY / "docs/library.md"
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 5
    main = ModuleType("__main__")  # as in a notebook
    monkeypatch.setitem(sys.modules, "__main__", main)
    names: dict[str, Any] = main.__dict__
    for block in blocks:
        # Blank lines before it: a traceback then has the page's own line numbers.
        above = "\n" * text[: block.start(1)].count("\n")
        exec(compile(above + block[1], page, "exec"), names)
    for made in list(names.values()):
        if isinstance(made, isotherm.Policy | isotherm.Sampler):
            made.close()
