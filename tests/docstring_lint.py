"""`python -m tests.docstring_lint`, a part of `make lint`: docstrings name their subject.

A docstring begins with a noun phrase or an imperative verb (CONTRIBUTING.md), so that a reader who
sees it alone, in a listing or an editor's tooltip, knows what it is about.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("distill", "actors", "learner", "cluster", "isotherm", "examples")
WRONG = re.compile(
    r"(What|Whatever|Of|Where|Those|Whoever|Which|Whose|It|Its|Their|They|He|She|How|All that)\b"
)


def wrong_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring that begins with a pronoun or a dangling word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and WRONG.match(text):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def main() -> int:
    """Print the wrong ones; return the exit code."""
    root = Path(__file__).parents[1]
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    found = [
        f"{file.relative_to(root)}:{line}: {text}"
        for file in files
        for line, text in wrong_docstrings(file.read_text())
    ]
    for each in found:
        print(f"{each}\n    begin with a noun phrase or an imperative verb")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
