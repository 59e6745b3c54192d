"""Fields of errors: every ConfigError that names one names a setting that exists.

The field is an argument, or the name in a message that begins with `NAME=`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.config import EngineConfig
from cluster.calibrate import CalibrateConfig
from cluster.config.teachers import TeacherConfig
from distill.envs.base import EnvConfig
from distill.envs.games.textarena_game import TextArena
from distill.errors import ConfigError, DataError
from distill.settings import fields_of
from tests.cluster.test_rules import KINDS

ROOT = Path(__file__).parents[2]
PRODUCT = ("distill", "actors", "learner", "cluster", "isotherm")
OTHERS = (CalibrateConfig, EngineConfig, TextArena)
# Arguments of commands that are no settings.
WORDS = {"recipe", "config", "step", "blame"}
SETTINGS = (
    WORDS
    | {
        f"env.{path}" if issubclass(kind, EnvConfig) else path
        for kind in (*KINDS.values(), *OTHERS)
        for path in fields_of(kind)
    }
    | {f"teachers.NAME.{path}" for path in fields_of(TeacherConfig)}
    | {"columns.NAME"}
)
VARIABLE = re.compile("[A-Z_]+")


def raised() -> Iterator[tuple[str, ast.expr, set[str]]]:
    """Place and field of each ConfigError with a field, and the arguments of its function."""
    for file in sorted(file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        yield from _raised_in(str(file.relative_to(ROOT)), ast.parse(file.read_text()), set())


def _raised_in(
    file: str, node: ast.AST, arguments: set[str]
) -> Iterator[tuple[str, ast.expr, set[str]]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        own = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        arguments = arguments | {each.arg for each in own}
    if isinstance(node, ast.ClassDef):
        own = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
        arguments = arguments | {each.id for each in own if isinstance(each, ast.Name)}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError":
        given = [keyword.value for keyword in node.keywords if keyword.arg == "field"]
        for field in given or _named(node.args[0]):
            for value in _branches(field):
                yield f"{file}:{node.lineno}", value, arguments
    for child in ast.iter_child_nodes(node):
        yield from _raised_in(file, child, arguments)


def _named(message: ast.expr) -> list[ast.expr]:
    """The name in a message that begins with `NAME=`, which is the field by default."""
    name: list[ast.expr] = []
    for part in message.values if isinstance(message, ast.JoinedStr) else [message]:
        if not isinstance(part, ast.Constant):
            name.append(part)
            continue
        text, equals, _ = str(part.value).partition("=")
        name.append(ast.Constant(text))
        if equals or not re.fullmatch(r"[\w.-]*", text):
            known = all(
                re.fullmatch(r"[\w.-]*", str(e.value)) for e in name if isinstance(e, ast.Constant)
            )
            return [ast.JoinedStr(name)] if equals and known else []
    return []


def _branches(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def pattern(value: ast.expr) -> re.Pattern[str] | None:
    """The pattern of a text or an f-string; None for other expressions."""
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    texts = [str(each.value) if isinstance(each, ast.Constant) else None for each in parts]
    if not any(texts):
        return None
    return re.compile("".join(".+" if each is None else re.escape(each) for each in texts))


FIELDS = [
    pytest.param(found, arguments, id=f"{place} {found.pattern}")
    for place, value, arguments in raised()
    if (found := pattern(value)) is not None
]


@pytest.mark.parametrize(("field", "arguments"), FIELDS)
def test_the_field_of_an_error_is_a_setting(field: re.Pattern[str], arguments: set[str]) -> None:
    """Or it is an environment variable, or an argument of the function that raises it."""
    named = field.pattern.replace("\\", "")
    assert VARIABLE.fullmatch(named) or any(map(field.fullmatch, SETTINGS | arguments)), named


def test_errors_have_fields() -> None:
    assert len(FIELDS) > 200


def test_a_message_names_its_field() -> None:
    assert ConfigError("learner.lr=-1 must be above 0").field == "learner.lr"
    assert ConfigError("learner.lr=1 with seed=2", field="seed").field == "seed"
    assert DataError("line 3 has seed=2; remove it").field is None
