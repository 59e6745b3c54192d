"""The tutorials run as scripts; their last cells assert what they tell."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY

TUTORIALS = sorted((REPOSITORY / "tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_a_script(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("marimo")
    path_of_this_process = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path_of_this_process, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_asserts_what_it_tells_and_is_listed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
    assert f"tutorials/{path.name}" in (REPOSITORY / "README.md").read_text()
