"""The docs are true: generated pages are current, and what tests/features.md names exists."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import chz
import pytest

from actors.envs.agent import Agent
from actors.envs.verifiers_env import Verifiers
from cluster.config.recipes import CONFIGS
from distill.envs.reading import Reading
from distill.envs.tool_use import ToolUse
from distill.settings import meant_by
from tests.generated_docs import PAGES

REPOSITORY = Path(__file__).parents[1]
FEATURES = (REPOSITORY / "tests" / "features.md").read_text()
OWN = {
    f"env.{name}" for env in (ToolUse, Reading, Agent, Verifiers) for name in chz.chz_fields(env)
}


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    written = (REPOSITORY / "docs" / name).read_text()
    assert written == PAGES[name](), f"docs/{name} is old: make docs-generated"


def test_every_row_of_the_table_has_a_test() -> None:
    rows = [line for line in FEATURES.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if not row.startswith("| feature")]
    assert len(rows) > 40
    for row in rows:
        test = row.rstrip("| ").rpartition("| ")[2]
        assert (REPOSITORY / test).is_file(), row


def test_every_setting_and_command_of_it_exists() -> None:
    code = " ".join(re.findall(r"`([^`]+)`", FEATURES))
    named = set(re.findall(r"(?<![\w.\"'])([a-z_]+(?:\.[a-z_]+)?)=", code))
    known = {name for name in named if any(meant_by(kind, name) for kind in CONFIGS.values())}
    known |= OWN | {"recipe", "config", "serve", "against"}
    assert len(named) > 40 and named <= known, sorted(named - known)
    for module in re.findall(r"python -m ([\w.]+)", code):
        assert find_spec(module), module
    for recipe in re.findall(r"recipe=(\w+)", code):
        assert recipe in CONFIGS
