"""docs/glossary.md: every class, function and file that it names exists."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
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
def test_what_a_row_names_exists(term: str, names: str, file: str) -> None:
    defined = _names(ast.parse((REPOSITORY / file).read_text()))
    assert set(re.findall(r"`([\w.]+)`", names)) <= defined, term
