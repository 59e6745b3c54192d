"""`--help`: the most important settings. `--help WORD`: settings by section or by name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import chz
from chz.blueprint import Castable
from chz.field import Field
from chz.util import MISSING

from distill.rules import rules_of
from distill.settings import (
    ESSENTIAL,
    Section,
    class_in,
    fields_of,
    flagged,
    is_section,
    kind_of,
    other_names,
    section_of,
    shown_fields,
)

_WIDTH = 100
# Column of the docs. The doc of a longer name begins on the next line.
_INDENT = 26
_ABOVE_ALL = [
    "Settings are key=value. config=FILE reads them from a YAML, TOML or JSON file, and config=DIR",
    "from another run's directory; the command line has precedence.",
]
# Largest number of settings that --help without a word explains completely.
_FEW = 40
_ALL = "all"
_OF_SECTIONS = [
    "A name may be shortened if no other setting ends in it: checkpoint_every, keep_last. Names",
    "before a comma are other names of the same setting.",
]

_MORE = [
    "--help WORD explains the settings of a section, or those with WORD in their name, for example",
    "--help sampling or --help checkpoint. --help all explains all settings.",
]


def help_text(kind: type, given: Mapping[str, Any], word: str = "") -> str:
    """Text of --help for the settings class `kind`.

    Args:
        given: values by name; env= adds the fields of its class.
        word: explain the settings with this word in a name or in the title of their section;
            "all": every setting; "": the most important ones, or all if there are few.
    """
    fields, essential = fields_of(kind), flagged(kind, ESSENTIAL)
    if not word and len(fields) <= _FEW:
        word = _ALL
    names = {path: ", ".join([*other_names(kind, path), path]) for path in fields}
    sections: dict[str, list[str]] = {section: [] for section in Section}
    for path in fields:
        sections.setdefault(section_of(kind, path) or "settings", []).append(path)
    parts: dict[str, list[str]] = {}
    if word in ("", _ALL):
        first = [path for paths in sections.values() for path in paths if path in essential]
        first.sort(key=lambda path: _optional(fields[path]))
        parts["the most important settings"] = first
    if word:
        parts |= {
            title: [path for path in paths if _asked(word, title, names[path], path in essential)]
            for title, paths in sections.items()
        }
    lines = [(kind.__doc__ or kind.__name__).strip(), "", *_ABOVE_ALL]
    if any(map(is_section, chz.chz_fields(kind).values())):
        lines += _OF_SECTIONS
    if not any(parts.values()):
        near = get_close_matches(word, {part for path in fields for part in path.split(".")}, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        lines += ["", f"No setting or section has {word!r} in its name{meant}"]
    for title, paths in parts.items():
        if paths:
            lines += ["", f"{title}:"]
        for path in paths:
            lines += _explained(names[path], fields[path], given.get(path))
    if word != _ALL:
        titles = [f"  {title} ({len(paths)})" for title, paths in sections.items() if paths]
        lines += ["", f"all {len(fields)} settings, by section:", *titles, "", *_MORE]
    return "\n".join(lines)


def _asked(word: str, title: str, names: str, essential: bool) -> bool:
    """True if --help `word` explains a setting of these names, in the section `title`."""
    return not essential if word == _ALL else word.lower() in title or word.lower() in names


def settings_within(field: Field, given: Any) -> dict[str, Field]:
    """Fields of a setting that is itself an object.

    Args:
        given: the object, its class, or a text that names its class; None for the default.
    """
    if field._default_factory is MISSING or not chz.is_chz(field._default_factory):
        return {}
    if is_section(field):
        return dict(shown_fields(kind_of(field)))
    named: Any = field._default_factory if given is None else given
    if isinstance(given, Castable) and field.meta_factory is not None:
        named = field.meta_factory.from_string(given.value)
    return chz.chz_fields(named) if chz.is_chz(named) else {}


def type_text(field: Field) -> str:
    """Description of a setting's type: choices, or the kind of number; empty for an object."""
    return _kind_text(field.x_type)


def rules_text(field: Field) -> str:
    """Description of a setting's rules, except rules that are equal to its type's description."""
    return "; ".join(rule.text for rule in rules_of(field) if rule.text != type_text(field))


def _kind_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return ",".join(map(_kind_text, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        texts = [_kind_text(option) for option in get_args(kind) if option is not NoneType]
        return "|".join(texts) if all(texts) else ""
    return kind.__name__ if kind in (int, float, str, bool) else ""


def _explained(names: str, field: Field, given: Any) -> Iterator[str]:
    notes = [note for note in (type_text(field), default_text(field), rules_text(field)) if note]
    text = field._doc + (f" [{'; '.join(notes)}]" if notes else "")
    head = f"  {names}"
    first = head.ljust(_INDENT) if len(head) < _INDENT - 1 else " " * _INDENT
    if first.isspace():
        yield head
    yield textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for inner, each in settings_within(field, given).items():
        yield from _explained(f"{names}.{inner}", each, None)
    if (kind := class_in(field)) is not None:
        for inner, each in shown_fields(kind).items():
            yield from _explained(f"{names}.NAME.{inner}", each, None)


def _optional(field: Field) -> bool:
    return field._default is not MISSING or field._default_factory is not MISSING


def default_text(field: Field) -> str:
    """Description of a setting's default; empty for None, which the setting's doc explains."""
    if field._default_factory is not MISSING:
        name = getattr(field._default_factory, "__name__", "")
        return f"default {name}" if chz.is_chz(field._default_factory) else ""
    if not _optional(field):
        return "required"
    if field._default is None:
        return ""
    return f"default {field._default if field._default != '' else repr('')}"
