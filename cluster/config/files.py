"""`config=FILE`: settings from YAML, TOML or JSON, including the config.json of a run."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import chz
import yaml
from chz.blueprint import Castable
from chz.field import Field

from cluster.config.common import CommonConfig
from cluster.config.help import settings_within
from distill.errors import ConfigError
from distill.lookup import path_meant
from distill.rules import default_of, get
from distill.settings import fields_of, is_section, path_of, setting_of, shown_fields

CONFIG = "config"
_CLASS = "class"
# Key for the class of an object in a run's config.json, as chz writes it.
WRITTEN_CLASS = "__chz_type__"
_NULLS = ("", "~", "null", "Null", "NULL")


def read_settings(path: str) -> dict[str, Any]:
    """Read the settings, including `recipe`, in a file or in the config.json of a run's directory.

    Values of TOML and JSON are returned as parsed. Scalars of YAML are returned as unparsed texts
    (`Castable`), which are cast to the type of their setting, as on the command line.

    Raises:
        ConfigError: there is no such file, or it contains no settings.
    """
    file = Path(path)
    if os.path.isdir(path):
        file /= "config.json"
        if not file.exists():
            raise _refused(
                path,
                "has no config.json, so it is not a run's directory; give a run's directory, or "
                f"a file named {', '.join(SETTINGS_FILES)}",
            )
    if not file.exists():
        raise _refused(path, f"does not exist{path_meant(path)}")
    read = _READERS.get(file.suffix)
    if read is None:
        raise _refused(path, f"is not named {', '.join(SETTINGS_FILES)}, nor a run's directory")
    try:
        tree = _settings_of(read(file.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise _refused(path, f"is not valid {file.suffix[1:]}: {why}") from error
    if tree is None:
        raise _refused(path, "contains no settings; write `name: value` lines")
    if CONFIG in tree:
        raise _refused(path, "refers to another file (config=); give all settings in one file")
    return tree


def _refused(path: str, why: str) -> ConfigError:
    return ConfigError(f"config={path} {why}", field=CONFIG, value=path)


def as_tree(config: Any) -> dict[str, Any]:
    """All settings of a chz object, as for config.json; sections are mappings.

    If the class of a setting's object can be chosen, its mapping also has the class.
    """
    tree = chz.asdict(config, include_type=True)
    shown = shown_fields(type(config))
    tree = {name: tree[name] for name in shown}
    for name, field in shown.items():
        of_one_class = {"": tree[name]} if is_section(field) else {}
        for hidden in getattr(getattr(config, name), "hidden", ()):
            tree[name].pop(hidden)
        if get_origin(field.x_type) is Mapping:
            of_one_class = tree[name]
        for each in of_one_class.values():
            if isinstance(each, dict):
                each.pop(WRITTEN_CLASS, None)
    return json.loads(json.dumps(tree))


def as_yaml(config: CommonConfig, leave: Collection[str] = ()) -> str:
    """YAML for `config=FILE` with the settings that differ from their defaults, except `leave`."""
    kept: dict[str, Any] = {"recipe": config.recipe}
    tree = as_tree(config)
    for path, field in fields_of(type(config)).items():
        value = get(config, path)
        if path not in leave and value != default_of(field):
            section, _, name = path.rpartition(".")
            within = kept.setdefault(section, {}) if section else kept
            within[name] = _readable(at_path(tree, path), value)
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def at_path(tree: Mapping[str, Any], path: str) -> Any:
    """Value of a setting in a result of `as_tree`; None if it is missing."""
    section, _, name = path.rpartition(".")
    within = tree.get(section) if section else tree
    return within.get(name) if isinstance(within, Mapping) else None


def _readable(written: Any, value: Any) -> Any:
    """A setting for a file. Of an object whose class can be chosen: the class, under the key
    `class`, and the fields that differ from the defaults of that class."""
    if not isinstance(written, dict) or WRITTEN_CLASS not in written:
        return written
    fields = chz.chz_fields(value)
    return {_CLASS: written.pop(WRITTEN_CLASS)} | {
        name: each
        for name, each in written.items()
        if getattr(value, name) != default_of(fields[name])
    }


def _settings_of(tree: Any) -> dict[str, Any] | None:
    """Mapping of settings in the content of a file or of a config.json; None if there is none.

    Raises:
        RecursionError: the content contains itself, by a YAML alias.
    """
    if isinstance(tree, dict) and tree.keys() >= {"recipe", "run_id", "settings"}:  # of a run
        settings = tree["settings"]
        tree = {"recipe": tree["recipe"], **settings} if isinstance(settings, dict) else None
    return tree if isinstance(tree, dict) and _names_are_texts(tree) else None


def _names_are_texts(tree: Any) -> bool:
    """True if every key of every mapping is a text."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) for key in tree) and _names_are_texts([*tree.values()])
    return not isinstance(tree, list) or all(map(_names_are_texts, tree))


def by_name(kind: type, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the class `kind` in `tree`, by path, for example `checkpoint.every`.

    A mapping is a section, or the fields of an object with its class under the key `class`, or, for
    a setting whose value is JSON, that value. A list is converted to a text, joined by commas.
    None for a setting whose default is None means that the setting is not given.

    Returns:
        Values, and texts that are not cast yet, as `Castable`.

    Raises:
        ConfigError: a name is ambiguous, a setting is given under two names, or an element of a
            mapping of objects is not a mapping.
    """
    fields = {**shown_fields(kind), **fields_of(kind)}
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in tree.items():
        there = setting_of(kind, path_of(kind, name), value)
        for path, each in _by_name(fields, {there: value}, ""):
            if path in found:
                raise ConfigError(f"{path} is given as {names[path]} and as {name}", field=path)
            found[path], names[path] = each, name
    return found


def text_of(value: Any) -> str:
    """Value of a setting as text, in the form of the command line."""
    if isinstance(value, list | tuple):
        return ",".join(map(text_of, value))
    if isinstance(value, Mapping):
        return json.dumps(_plain(value), default=str)
    return value.value if isinstance(value, Castable) else str(value)


def _by_name(
    fields: Mapping[str, Field], tree: Mapping[str, Any], within: str
) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        field, path = fields.get(name), within + name
        if not isinstance(value, Mapping):
            if value is not None or field is None or field._default is not None:
                yield path, _value(field, value)
        elif field is not None and get_origin(field.x_type) is Mapping:
            of = get_args(field.x_type)[1]
            for key, each in value.items():
                if not chz.is_chz(of) or chz.is_chz(each):
                    yield f"{path}.{key}", each
                elif isinstance(each, Mapping):
                    yield from _by_name(chz.chz_fields(of), each, f"{path}.{key}.")
                else:
                    raise ConfigError(
                        f"{path}.{key}={text_of(each)} is not a mapping of settings; write `{key}: "
                        "{name: value}`"
                    )
        elif field is not None and not settings_within(field, None):
            try:
                yield path, json.dumps(_plain(value))
            except TypeError as error:
                raise ConfigError(f"{path} is not a JSON mapping: {error}", field=path) from error
        else:
            yield from _object(field, value, path)


def _object(field: Field | None, value: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """The class of an object, if given, and its fields."""
    given = dict(value)
    names = [given.pop(key) for key in (_CLASS, WRITTEN_CLASS) if key in given]
    named = Castable(text_of(names[0])) if names else None
    if named is not None:
        yield path, named
    fields = {} if field is None else settings_within(field, named)
    yield from _by_name(fields, given, f"{path}.")


def _value(field: Field | None, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    names_a_class = field is not None and settings_within(field, None)
    if isinstance(value, list | tuple) or (isinstance(value, str) and names_a_class):
        return Castable(text_of(value))
    return value


def _plain(value: Any) -> Any:
    """A mapping that is the value of one setting, with texts of YAML parsed as JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Castable):
        text = value.value
        try:
            return json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:
            return text
    return value


class _Texts(yaml.BaseLoader):
    """YAML loader that keeps scalars as texts, as on the command line: `wandb: off` is "off"."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS:
            return None
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        where = f" in the mapping of line {node.start_mark.line + 1}"
        _refuse_twice([key.value for key, _ in node.value], where)
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> Any:
    return _castable(yaml.load(text, _Texts))


def _castable(tree: Any) -> Any:
    """The tree with its texts, except names, as `Castable`."""
    if isinstance(tree, dict):
        return {name: _castable(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_castable(value) for value in tree]
    return Castable(tree) if isinstance(tree, str) else tree


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object_of_pairs)


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([key for key, _ in pairs])
    return dict(pairs)


def _refuse_twice(keys: Sequence[Any], where: str = "") -> None:
    """Raise ValueError for a name that is given twice: parsers would use the last value."""
    if twice := sorted({key for key in keys if isinstance(key, str) and keys.count(key) > 1}):
        raise ValueError(f"{', '.join(twice)} is given twice{where}")


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _yaml,
    ".yml": _yaml,
    ".toml": tomllib.loads,
    ".json": _json,
}
SETTINGS_FILES = tuple(_READERS)  # suffixes
