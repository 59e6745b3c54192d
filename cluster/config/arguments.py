"""Settings from `key=value` and `config=FILE`; a slip is refused in a line with what was meant."""

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
# A whole number as people also write it: 1e3, 1_000.0.
_DECIMAL = re.compile(r"[+-]?\d[\d_]*(\.\d*)?(e\+?\d)?", re.IGNORECASE)
_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


class HelpAsked(Exception):
    """--help or --version was among the arguments; the message is what they ask for."""


def key_values(argv: Sequence[str]) -> dict[str, str]:
    """Values by key; of a key that is given twice, the last.

    Raises:
        ConfigError: an argument that is not key=value, or is not UTF-8.
        HelpAsked: --version is among them.
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
    """What a command was given.

    Attributes:
        texts: from the command line, by name.
        file: the file whose settings they come on top of; empty: none.
        tree: what is in it.
    """

    texts: Mapping[str, str]
    file: str
    tree: Mapping[str, Any]

    @staticmethod
    def of(argv: Sequence[str]) -> Arguments:
        """Raises as `key_values` and `read_settings` do."""
        texts = key_values(argv)
        file = texts.pop(CONFIG, "")
        return Arguments(texts, file, read_settings(file) if file else {})

    def take(self, name: str) -> tuple[str | None, Arguments]:
        """The value of `name`, which is no setting, and the other arguments."""
        value = self.texts.get(name, self.tree.get(name))
        texts, tree = (
            {key: each for key, each in given.items() if key != name}
            for given in (self.texts, self.tree)
        )
        return None if value is None else str(value), Arguments(texts, self.file, tree)

    def settings(self, kind: type) -> dict[str, str]:
        """All settings of the class `kind`, as texts.

        Raises:
            ConfigError: the file has a name that is none, or a value that cannot be one.
        """
        in_file = as_texts(kind, self.tree)
        try:
            for key, value in in_file.items():
                _checked(kind, key, value, in_file)
        except ConfigError as error:
            raise ConfigError(f"config={self.file}: {error}") from error
        return in_file | dict(self.texts)


def make(kind: type[Config], given: Mapping[str, str]) -> Config:
    """Settings of the class `kind`.

    Raises:
        ConfigError: a name that is none, a value that cannot be one, a missing one.
    """
    given = {key: _checked(kind, key, value, given) for key, value in given.items()}
    _check_complete(kind, given)
    try:
        return chz.Blueprint(kind).make_from_argv([f"{k}={v}" for k, v in given.items()])
    except EntrypointException as error:  # several that do not go together
        raise ConfigError(" ".join(str(error).split())) from error


def _check_encoding(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{argument!a} is not UTF-8, as settings, file names among them, must be"
        ) from error


def _refers(key: str) -> bool:
    """True if chz has its own reading of a key: `...lr=` of all that match, `a@=b` of another."""
    return "..." in key or key.endswith("@")


def _checked(kind: type, key: str, value: str, given: Mapping[str, str]) -> str:
    """The value of a setting, as chz reads it."""
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
    near = get_close_matches(key, list(_names(kind, given)), n=1)
    if not near:  # by what it is called elsewhere: learning_rate
        fields, words = chz.chz_fields(kind), key.replace("_", " ")
        near = [name for name, field in fields.items() if words in field._doc.split(";")[0]][:1]
    return f"{f'did you mean {near[0]!r}? ' if near else ''}{HELP} lists all"


def _names(kind: type, given: Mapping[str, str]) -> Iterator[str]:
    for name, field in chz.chz_fields(kind).items():
        yield name
        yield from (f"{name}.{inner}" for inner in settings_within(field, given.get(name)))


def _checked_element(field: Field, key: str, value: str, rest: Sequence[str]) -> str:
    """The value of NAME.setting of a mapping of settings. Other objects are left to chz."""
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
    """1e3 as 1000; what is no whole number as it stands."""
    if _DECIMAL.fullmatch(value) and (number := float(value)).is_integer():
        return str(int(number)) if number < 2**53 else value
    return value


def _choices(kind: Any) -> set[Any]:
    """The types, or the texts, of which a plain value is one; empty for an object's type."""
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
