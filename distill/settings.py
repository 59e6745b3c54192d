"""Sections, names and metadata of settings.

A setting is a field of a chz class. The settings of one part of a run are declared once, in a class
next to the code of that part. A run's settings contain an object of that class as a section, and
the part receives the whole section.

    @chz.chz
    class CheckpointSettings:
        section: ClassVar[Section] = Section.OUTPUT                where --help lists its settings
        within: ClassVar[str] = "checkpoint."
        every: int = setting(at_least(1), default=10, doc="...", metadata=MAY_CHANGE)

    class CommonConfig(...):                                       a run: checkpoint.every=5
        checkpoint: CheckpointSettings = section_field(CheckpointSettings)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeVar, get_args, get_origin

import chz
from chz.field import Field

from distill.errors import ConfigError

Settings = TypeVar("Settings")

# Flags of a field, as its metadata; combined by |.
# A resumed run may change the setting: nothing that a step computes depends on it.
MAY_CHANGE: Final[dict[str, Any]] = {"may_change": True}
# One of the dozen most important settings, which --help shows first.
ESSENTIAL: Final[dict[str, Any]] = {"essential": True}
# Looked up before a run: package.module:attribute, if the value has a colon; an adapter.
FUNCTION: Final[dict[str, Any]] = {"path": "function"}
ADAPTER: Final[dict[str, Any]] = {"path": "adapter"}
_SECTION = "section"
# Short names that are not the last name of their path, or are the last name of several paths.
_SHORT: Final[Mapping[str, str]] = {
    "student": "model.path",
    "prompts": "data.source",
    "prompts_per_step": "data.batch_size",
    "dtype": "engine.dtype",
    "temperature": "sampling.temperature",
    "max_new_tokens": "sampling.max_new_tokens",
}


class Section(StrEnum):
    """Sections of --help, in order."""

    MODEL = "model and data"
    SAMPLING = "sampling and temperature"
    OBJECTIVE = "objective"
    OPTIMIZER = "optimizer and learner"
    ENGINES = "engines and placement"
    SUPERVISION = "supervision"
    EVALUATION = "evaluation"
    OUTPUT = "output and tracking"


def with_default(part: type, name: str, default: Any) -> Any:
    """The field `name` of `part` with another default, for a class that inherits the part."""
    field = copy(chz.chz_fields(part)[name])
    field._default = default
    return field


def section_field(kind: type, **field: Any) -> Any:
    """Field that contains a section: an object with the settings of one part of a run.

    The ClassVar `within` of `kind` is the field's name and a dot. Keyword arguments are those of
    `chz.field`.
    """
    doc = (kind.__doc__ or "").strip()
    return chz.field(default_factory=kind, doc=doc, metadata={_SECTION: True}, **field)


def is_section(field: Field) -> bool:
    """True if the field contains a section."""
    return _SECTION in (field.metadata or {})


def shown_fields(kind: type) -> Mapping[str, Field]:
    """Fields of `kind` that a user may set: all except those named in the ClassVar `hidden`.

    A recipe, or a section that it narrows, hides the settings that the recipe does not have.
    """
    hidden = getattr(kind, "hidden", ())
    return {name: field for name, field in chz.chz_fields(kind).items() if name not in hidden}


def kind_of(section: Field) -> type:
    """Class of the section that a field contains."""
    kind: Any = section._default_factory
    return kind


def class_in(field: Field) -> type | None:
    """Class of the objects in a mapping, such as `teachers`; None for a field of another type."""
    if get_origin(field.x_type) is not Mapping:
        return None
    kind = get_args(field.x_type)[1]
    return kind if chz.is_chz(kind) else None


@cache
def fields_of(kind: type) -> Mapping[str, Field]:
    """Fields of all settings by path, those of sections as `checkpoint.every`."""
    found: dict[str, Field] = {}
    for name, field in shown_fields(kind).items():
        inner = fields_of(kind_of(field)) if is_section(field) else {}
        found |= {f"{name}.{path}": each for path, each in inner.items()}
        if not inner:
            found[name] = field
    return MappingProxyType(found)


def short_names(kind: type) -> dict[str, str]:
    """Paths of settings of `kind` by short name, such as `student`."""
    return {name: path for name, path in _SHORT.items() if path in fields_of(kind)}


def other_names(kind: type, path: str) -> list[str]:
    """Names of a setting beside the ends of its path: short names, and the name of its section.

    Only the main setting of a section has the section's name.
    """
    short = [name for name, meant in short_names(kind).items() if meant == path]
    return [*short, *[path.rpartition(".")[0]] * _is_main(kind, path)]


def meant_by(kind: type, name: str) -> list[str]:
    """Paths of the settings, or the section, of `kind` that a user's name may stand for.

    A name is, in this order: a path (`checkpoint.every`); a short name (`temperature`); section and
    field joined by `_` (`checkpoint_every`); the last name of a path (`keep_last`). If a setting is
    an object itself, the part of the name after it (`env.max_turns`) is kept unchanged.
    """
    fields = fields_of(kind)
    head, dot, rest = name.partition(".")
    if head in shown_fields(kind):
        return [name] if head in fields or name in fields or not dot else []
    if _SHORT.get(head) in fields:
        return [f"{_SHORT[head]}{dot}{rest}"]
    joined = [path for path in fields if path.replace(".", "_") == head]
    last = [path for path in fields if path.rpartition(".")[2] == head and not _is_main(kind, path)]
    return [f"{path}{dot}{rest}" for path in joined or last]


def path_of(kind: type, name: str) -> str:
    """Path of the setting of `kind` that a user's name stands for; an unknown name is unchanged.

    Raises:
        ConfigError: the name may stand for several settings.
    """
    meant = meant_by(kind, name)
    if len(meant) > 1:
        raise ConfigError(f"{name} may be {' or '.join(meant)}; write one of them", field=name)
    return meant[0] if meant else name


def setting_of(kind: type, path: str, value: Any) -> str:
    """Path of the setting that a value sets: with a plain value, `teacher` is `teacher.model`.

    The ClassVar `main` of a section's class is the name of the setting that a plain value sets.
    """
    field = shown_fields(kind).get(path)
    if field is None or not is_section(field) or isinstance(value, Mapping) or chz.is_chz(value):
        return path
    main = getattr(kind_of(field), "main", None)
    return path if main is None else f"{path}.{main}"


def _is_main(kind: type, path: str) -> bool:
    section = path.rpartition(".")[0]
    return bool(section) and setting_of(kind, section, "") == path


def by_path(tree: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Values by path: `{"env": {"max_turns": 3}}` becomes `{"env.max_turns": 3}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= by_path(value, f"{within}{name}.")
        else:
            found[within + name] = value
    return found


def by_names(kind: type[Settings], /, **values: Any) -> Settings:
    """Create settings of the class `kind` from values by name, which may be nested."""
    return chz.Blueprint(kind).apply(_given(kind, values)).make()


def changed(settings: Settings, /, **changes: Any) -> Settings:
    """Copy settings with some values changed. A default that depends on one of them follows it.

    Args:
        changes: values by name; a mapping changes settings within a section or an object.
    """
    kind = type(settings)
    given = _given(kind, changes)
    kept = {
        path: value
        for path, value in by_path(chz.beta_to_blueprint_values(settings)).items()
        if not any(path == name or path.startswith(f"{name}.") for name in given)
    }
    return chz.Blueprint(kind).apply(kept | given).make()


def _given(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values by users' names to values by path."""
    return {
        setting_of(kind, path_of(kind, name), value): value
        for name, value in by_path(values).items()
    }


def may_change_but(identity: Callable[[Any], Any]) -> dict[str, Any]:
    """Flag of a setting of which a resumed run must keep only `identity(value)`."""
    return {"identity": identity}


def identity_of(kind: type, path: str, value: Any) -> Any:
    """The part of a setting's value that a resumed run must keep; by default all of it."""
    field = fields_of(kind).get(path)
    identity = field and (field.metadata or {}).get("identity")
    return identity(value) if identity else value


def declarer_of(kind: type, path: str) -> type:
    """The class that declares a setting first: `kind`, a section of it, or a base of either."""
    name, _, rest = path.partition(".")
    if rest:
        return declarer_of(kind_of(chz.chz_fields(kind)[name]), rest)
    for part in reversed(kind.__mro__):
        if name in getattr(part, "__chz_fields__", {}):
            return part
    raise KeyError(path)


def section_of(kind: type, path: str) -> Section | None:
    """Section of --help that lists a setting of `kind`: that of the class that declares it."""
    return getattr(declarer_of(kind, path), "section", None)


def flagged(kind: type, flag: dict[str, Any]) -> set[str]:
    """Paths of the settings of `kind` that carry `flag`, one of the constants above."""
    fields = fields_of(kind).items()
    return {path for path, field in fields if flag.items() <= (field.metadata or {}).items()}
