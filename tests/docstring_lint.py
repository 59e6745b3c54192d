"""`python -m tests.docstring_lint`, a part of `make lint`: docstrings name their subject.

A docstring begins with a noun phrase or an imperative verb (CONTRIBUTING.md), so that a reader who
sees it alone, in a listing or an editor's tooltip, knows what it is about.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    *("distill", "actors", "learner", "cluster", "isotherm"),
    *("examples", "benchmarks", "tutorials", "tests"),
)
WRONG = re.compile(
    r"(What|Whatever|Of|Where|Those|Whoever|Which|Whose|It|Its|Their|They|He|She|How|All that)\b"
)
# Verbs of functions in the third person, without those that are also plural nouns.
THIRD_PERSON = re.compile(
    r"(Adds|Begins|Creates|Deletes|Ensures|Finds|Gets|Gives|Has|Holds|Keeps|Lets|Makes|Prints|Puts|"
    r"Measures|Raises(?!:)|Removes|Returns|Saves|Says|Sends|Takes|Tells|Trains|Tries|Writes)\b"
)


def wrong_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and first line of each docstring with a wrong first word.

    Wrong are pronouns and dangling words, and for functions verbs in the third person.
    """
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            continue
        text = ast.get_docstring(node) or ""
        if WRONG.match(text) or (isinstance(node, functions) and THIRD_PERSON.match(text)):
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
