"""Run the tutorials as scripts; their last cells assert their results."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import REPOSITORY

FOLDER = REPOSITORY / "tutorials"
TUTORIALS = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "as_script.py"})


# One process for all of them: each would import torch and Ray for ten seconds.
A_FEW_STEPS_OF_EACH = """
import runpy, sys

for path in sys.argv[1:]:
    print(path, flush=True)
    sys.argv = [path, "--", "--steps", "2"]
    runpy.run_path(path, run_name="__main__")
"""


def run_python(directory: Path, *arguments: str) -> str:
    """Run Python in the directory to its end; return its output."""
    pytest.importorskip("marimo")
    path_of_this_process = os.pathsep.join(filter(None, [str(FOLDER), *sys.path]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path_of_this_process, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_as_a_script(path: Path, tmp_path: Path) -> None:
    printed = run_python(tmp_path, str(path))
    plots = re.findall(r"\[plot: (.+)\]", printed)
    assert plots and all((tmp_path / plot).stat().st_size > 0 for plot in plots)
    assert re.search(r"^# ", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_few_steps_of_each_tutorial_run(tmp_path: Path) -> None:
    paths = [str(path) for path in TUTORIALS]
    printed = run_python(tmp_path, "-c", A_FEW_STEPS_OF_EACH, *paths)
    assert [line for line in printed.splitlines() if line in paths] == paths


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_is_listed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree)), path
    assert f"tutorials/{path.name}" in (REPOSITORY / "docs/README.md").read_text()
