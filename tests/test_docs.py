"""Documentation checks: generated pages are current, and what tests/features.md names exists."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate

import chz
import pytest

import isotherm
from actors.envs.agent import Agent
from actors.envs.verifiers_env import Verifiers
from cluster.config.recipes import CONFIGS
from distill.envs.reading import Reading
from distill.envs.tool_use import ToolUse
from distill.settings import meant_by
from isotherm.shadowing import PACKAGES
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


def test_the_reference_has_all_documented_imports() -> None:
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    imported = {
        f"{module}.{name}"
        for page in pages
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for module, names in re.findall(r"^from (\S+) import (.+)$", block, re.MULTILINE)
        if module.partition(".")[0] in PACKAGES
        for name in names.split(", ")
    }
    reference = (REPOSITORY / "docs/api.md").read_text()
    listed = re.findall(r"^::: (\S+)$", reference, re.MULTILINE)
    assert imported and {f"isotherm.{name}" for name in dir(isotherm)} | imported == {*listed}
    for name in listed:
        assert locate(name) is not None, name


def test_settings_beside_a_recipe_are_its_own() -> None:
    seen = 0
    for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for code in re.findall(r"`([^`\n]*\brecipe=\w+[^`\n]*)`", page.read_text()):
            kinds = [CONFIGS[name] for name in re.findall(r"recipe=(\w+)", code) if name in CONFIGS]
            for name in re.findall(r"(?<![\w.\"'])([a-z_]+(?:\.[a-z_]+)*)=", code):
                if name not in {"recipe", "config"} and not name.startswith("env."):
                    seen += 1
                    assert any(meant_by(kind, name) for kind in kinds), f"{page.name}: {code}"
    assert seen > 20


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


ROWS = re.findall(
    r"^\| (.+?) \| .+ \| ((?:`[\w.]+`, )+)`([\w/]+\.py)` \|$",
    (REPOSITORY / "docs" / "glossary.md").read_text(),
    re.MULTILINE,
)


def _names(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Names that a module or a class defines; those in a class as `Class.name`."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {node.name} | {f"{node.name}.{name}" for name in _names(node)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_every_row_is_read() -> None:
    lines = (REPOSITORY / "docs" / "glossary.md").read_text().splitlines()
    terms = [line for line in lines if line.startswith("| ") and "| in the code |" not in line]
    assert len(terms) == len(ROWS) > 50


@pytest.mark.parametrize(("term", "names", "file"), ROWS)
def test_the_names_of_a_row_exist(term: str, names: str, file: str) -> None:
    defined = _names(ast.parse((REPOSITORY / file).read_text()))
    assert set(re.findall(r"`([\w.]+)`", names)) <= defined, term
