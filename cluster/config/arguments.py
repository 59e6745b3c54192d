"""Parsing of `key=value` and `config=FILE`; errors are one line with the likely intended form."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import chz
from chz.blueprint._entrypoint import EntrypointException
from chz.field import Field
from chz.tiepin import CastError
from chz.util import MISSING

from cluster.config.files import CONFIG, as_texts, read_settings
from cluster.config.help import settings_within
from distill.errors import ConfigError
from distill.lookup import known_names

Config = TypeVar("Config")
HELP, VERSION = "--help", "--version"
# A whole number in decimal or scientific notation: 1e3, 1_000.0.
_DECIMAL = re.compile(r"[+-]?\d[\d_]*(\.\d*)?(e\+?\d)?", re.IGNORECASE)
_NAMES = {
    int: "a whole number",
    float: "a number",
    tuple[float, float]: "two numbers",
    bool: "True or False",
    str: "a text",
}
# Names of settings of other systems, and what they are here.
_ELSEWHERE = {
    "prompt_key": "columns.prompt",
    "answer_key": "columns.answer",
    "clip_ratio_low": "clip",
    "clip_ratio_high": "clip",
    "epsilon_high": "clip",
}


class HelpAsked(Exception):
    """Raised for --help or --version; the message is the text to print."""


def key_values(argv: Sequence[str]) -> dict[str, str]:
    """Values by key; the last one for a key that is given twice.

    Raises:
        ConfigError: an argument is not key=value, or is not UTF-8.
        HelpAsked: --version is among the arguments.
    """
    given = {}
    for i, argument in enumerate(argv):
        _check_encoding(argument)
        if argument == VERSION:
            raise HelpAsked(f"isotherm {importlib.metadata.version('isotherm')}")
        if argument == HELP:
            continue
        following = next(iter(argv[i + 1 :]), HELP)
        key, equals, value = argument.partition("=")
        name = key.strip().lstrip("-") or "key"
        loose = following != HELP and "=" not in following.removeprefix("=")
        meant = value.strip() or (following.removeprefix("=") if loose else "VALUE")
        if argument == "-h":
            raise ConfigError(f"-h is not key=value; {HELP} lists all settings")
        if not equals or key != name:
            raise ConfigError(f"{argument!r} is not key=value; write {name}={meant}")
        if not value and loose and "=" not in following:
            raise ConfigError(f"{argument} has no value; write {key}={meant}, without a space")
        given[key] = value
    return given


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a command: from the command line, and from a settings file.

    Attributes:
        texts: values from the command line, by name; they override the file.
        file: path of the settings file; empty without one.
        tree: contents of the file.
    """

    texts: Mapping[str, str]
    file: str
    tree: Mapping[str, Any]

    @staticmethod
    def of(argv: Sequence[str]) -> Arguments:
        """Parse `argv`. Raises as `key_values` and `read_settings`."""
        texts = key_values(argv)
        file = texts.pop(CONFIG, "")
        return Arguments(texts, file, read_settings(file) if file else {})

    def take(self, name: str) -> tuple[str | None, Arguments]:
        """The value of `name`, which is not a setting, and the remaining arguments."""
        value = self.texts.get(name, self.tree.get(name))
        texts, tree = (
            {key: each for key, each in given.items() if key != name}
            for given in (self.texts, self.tree)
        )
        return None if value is None else str(value), Arguments(texts, self.file, tree)

    def settings(self, kind: type) -> dict[str, str]:
        """All settings of the class `kind`, as texts.

        Raises:
            ConfigError: the file has an unknown name, or an invalid value.
        """
        in_file = as_texts(kind, self.tree)
        try:
            for key, value in in_file.items():
                _checked(kind, key, value, in_file)
        except ConfigError as error:
            raise ConfigError(f"config={self.file}: {error}") from error
        return in_file | dict(self.texts)


def from_texts(kind: type[Config], given: Mapping[str, str]) -> Config:
    """Build settings of the class `kind` from texts.

    Raises:
        ConfigError: a name is unknown, a value is invalid, or a required setting is missing.
    """
    given = {key: _checked(kind, key, value, given) for key, value in given.items()}
    _check_complete(kind, given)
    try:
        return chz.Blueprint(kind).make_from_argv([f"{k}={v}" for k, v in given.items()])
    except EntrypointException as error:  # values that are valid alone but conflict
        raise ConfigError(" ".join(str(error).split())) from error


def _check_encoding(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{argument!a} is not UTF-8, as settings, file names among them, must be"
        ) from error


def _refers(key: str) -> bool:
    """True for keys that chz interprets: `...lr=` (wildcard) and `a@=b` (reference)."""
    return "..." in key or key.endswith("@")


def _checked(kind: type, key: str, value: str, given: Mapping[str, str]) -> str:
    """Check the name and the value of a setting; returns the value in a form that chz accepts."""
    if _refers(key):
        return value
    fields, parts = chz.chz_fields(kind), key.split(".")
    for i, name in enumerate(parts):
        path, rest = ".".join(parts[: i + 1]), parts[i + 1 :]
        if name not in fields:
            raise ConfigError(f"{key}={value}: no such setting; {_nearest(key, kind, given)}")
        field = fields[name]
        fields = settings_within(field, given.get(path))
        if not fields and rest:
            return _checked_element(field, key, value, rest)
        if not fields:
            return _checked_value(field, key, value)
    return value


def _nearest(key: str, kind: type, given: Mapping[str, str]) -> str:
    fields, ours = chz.chz_fields(kind), _ELSEWHERE.get(key, "")
    near = [ours] if ours.partition(".")[0] in fields else []
    near = near or get_close_matches(key, list(_names(kind, given)), n=1)
    if not near:  # search the docs for a name that other libraries use: learning_rate
        words = key.replace("_", " ")
        near = [name for name, field in fields.items() if words in field._doc.split(";")[0]][:1]
    return f"{f'did you mean {near[0]!r}? ' if near else ''}{HELP} lists all"


def _names(kind: type, given: Mapping[str, str]) -> Iterator[str]:
    for name, field in chz.chz_fields(kind).items():
        yield name
        yield from (f"{name}.{inner}" for inner in settings_within(field, given.get(name)))


def _checked_element(field: Field, key: str, value: str, rest: Sequence[str]) -> str:
    """Check `NAME.setting=value` in a mapping of settings. Other objects are left to chz."""
    if _choices(field.x_type):
        raise ConfigError(f"{key}={value}: {field.logical_name} has no settings of its own")
    if get_origin(field.x_type) is not Mapping or not chz.is_chz(get_args(field.x_type)[1]):
        return value
    within = chz.chz_fields(get_args(field.x_type)[1])
    if len(rest) != 2 or rest[1] not in within:
        raise ConfigError(
            f"{key}={value}: no such setting of {field.logical_name}.{rest[0]}; "
            f"{known_names(rest[-1], within)}"
        )
    return _checked_value(within[rest[1]], key, value)


def _checked_value(field: Field, key: str, value: str) -> str:
    if not (choices := _choices(field.x_type)) or field.meta_factory is None:
        return value
    if int in choices and float not in choices:
        value = _as_whole(value)
    try:
        field.meta_factory.perform_cast(value)
    except CastError as error:
        if choices & _NAMES.keys():
            kinds = " or ".join(sorted(_NAMES.get(choice, str(choice)) for choice in choices))
            raise ConfigError(f"{key}={value} is not {kinds}") from error
        raise ConfigError(f"{key}={value} is unknown; {known_names(value, choices)}") from error
    return value


def _as_whole(value: str) -> str:
    """Rewrite a whole number like 1e3 as 1000; other texts are returned unchanged."""
    if _DECIMAL.fullmatch(value) and (number := float(value)).is_integer():
        return str(int(number)) if number < 2**53 else value
    return value


def _choices(kind: Any) -> set[Any]:
    """Allowed types or literal texts of a plain value; empty for the type of an object."""
    if get_origin(kind) is Literal:
        return {str(option) for option in get_args(kind)}
    if get_origin(kind) in (Union, UnionType):
        options = [_choices(option) for option in get_args(kind) if option is not NoneType]
        return set().union(*options) if all(options) else set()
    return {kind} & _NAMES.keys()


def _check_complete(kind: type, given: Mapping[str, str]) -> None:
    if any(map(_refers, given)):
        return
    missing = []
    for name, field in chz.chz_fields(kind).items():
        inner = settings_within(field, given.get(name))
        required = {name: field} | {f"{name}.{each}": inner[each] for each in inner}
        missing += [
            f"{path}= ({each._doc})"
            for path, each in required.items()
            if path not in given and each._default is each._default_factory is MISSING
        ]
    if missing:
        raise ConfigError(f"not given: {'; '.join(missing)}")
