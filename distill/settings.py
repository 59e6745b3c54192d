"""Metadata of settings beside name, type, default and doc; parts that commands inherit.

A setting is a field of a chz class. The settings of one part of a run are declared once, in a class
that stands with that part; the classes of commands inherit it, and so do the part's own settings.

    @chz.chz
    class ThreadSettings:
        section: ClassVar[Section] = Section.ENGINES               where --help lists its settings
        threads: int = chz.field(default=1, doc="...", metadata=MAY_CHANGE)

    class CommonConfig(ThreadSettings, ...)                        a run's: threads=2
    class EngineConfig(ThreadSettings)                             an engine's own
    EngineConfig(model=..., **values_of(ThreadSettings, config))   from one to the other
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from enum import StrEnum
from typing import Any, ClassVar, Final, TypeVar

import chz
from chz.field import Field

from distill.rules import at_least, setting

Settings = TypeVar("Settings")

# Flags of a field, as its metadata; joined by |.
# A resumed run may change it: nothing that a step computes depends on it.
MAY_CHANGE: Final[dict[str, Any]] = {"may_change": True}
# One of the dozen settings that matter first.
ESSENTIAL: Final[dict[str, Any]] = {"essential": True}


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


@chz.chz
class ThreadSettings:
    """CPU threads of engines and learner."""

    section: ClassVar[Section] = Section.ENGINES

    threads: int = setting(
        at_least(1),
        default=1,
        doc="torch threads of each engine and of the learner on a CPU",
        metadata=MAY_CHANGE,
    )


def with_default(part: type, name: str, default: Any) -> Any:
    """The field `name` of `part` with another default, for a class that inherits the part."""
    field = copy(chz.chz_fields(part)[name])
    field._default = default
    return field


def values_of(part: type, settings: object) -> dict[str, Any]:
    """The settings that `part` declares or inherits, as an object that has them all holds them."""
    return {name: getattr(settings, name) for name in chz.chz_fields(part)}


def by_path(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Settings by their path: `{"env": {"max_turns": 3}}` is `{"env.max_turns": 3}`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= by_path(value, f"{within}{name}.")
        else:
            found[within + name] = value
    return found


def changed(settings: Settings, /, **changes: Any) -> Settings:
    """Copy settings with some changed. A default that depends on a changed setting follows it.

    Args:
        changes: values by name; a mapping changes the settings within one, as `by_path` has it.
    """
    given = by_path(changes)
    kept = {
        path: value
        for path, value in by_path(chz.beta_to_blueprint_values(settings)).items()
        if not any(path == name or path.startswith(f"{name}.") for name in given)
    }
    return chz.Blueprint(type(settings)).apply(kept | given).make()


def may_change_but(identity: Callable[[Any], Any]) -> dict[str, Any]:
    """Flag of a setting of which a resumed run must keep `identity(value)` alone."""
    return {"identity": identity}


def identity_of(kind: type, name: str, value: Any) -> Any:
    """The part of a setting's value that a resumed run must keep; by default all of it."""
    field = chz.chz_fields(kind).get(name)
    identity = field and (field.metadata or {}).get("identity")
    return identity(value) if identity else value


def declarer_of(kind: type, name: str) -> type:
    """The class, `kind` or one of its bases, that declares the setting `name` first."""
    for part in reversed(kind.__mro__):
        if name in getattr(part, "__chz_fields__", {}):
            return part
    raise KeyError(name)


def section_of(kind: type, name: str) -> Section | None:
    """The section of the class that declares the setting `name` of `kind`, if it has one."""
    return declarer_of(kind, name).__dict__.get("section")


def flagged(kind: type, flag: dict[str, Any]) -> set[str]:
    """Names of the settings of `kind` that carry `flag`, one of the constants above."""
    return {name for name, field in chz.chz_fields(kind).items() if _carries(field, flag)}


def _carries(field: Field, flag: dict[str, Any]) -> bool:
    return flag.items() <= (field.metadata or {}).items()
