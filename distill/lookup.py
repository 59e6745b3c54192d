"""Names in settings and messages: known ones, and `package.module:attribute` of a user's own."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distill.errors import ConfigError

# How many names a message lists.
_NAMED = 4


def known_names(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown `name`: the nearest known one, if any, and all."""
    near = get_close_matches(name, known, n=1)
    every = ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? Known: {every}" if near else f"known: {every}"


def path_meant(path: str, pattern: str = "*") -> str:
    """Question after the path of nearly this name beside a missing one; else an empty string.

    Args:
        pattern: of the names that count; `*/` for directories.
    """
    missing = Path(path)
    if missing.exists():
        return ""
    beside = missing.parent
    near = get_close_matches(missing.name, [each.name for each in beside.glob(pattern)], n=1)
    return f"; did you mean {str(beside / near[0])!r}?" if near else ""


def resolve(setting: str, name: str, known: Collection[str]) -> Any:
    """The object that `package.module:attribute` names, given as the value of `setting`.

    Raises:
        ConfigError: it is of another form, and none of the `known` names; or it cannot be imported.
    """
    _module_of(setting, name, known)
    with _importing(setting, name):
        return pkgutil.resolve_name(name)


def require_module(setting: str, name: str, known: Collection[str]) -> None:
    """Check `package.module:attribute` without an import of the module, which may take seconds.

    Raises:
        ConfigError: it is of another form, and none of the `known` names; or there is no such
            module.
    """
    module = _module_of(setting, name, known)
    with _importing(setting, name):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}")


def _module_of(setting: str, name: str, known: Collection[str]) -> str:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(
            f"{setting}={name!r} is neither built in nor `package.module:attribute`; "
            f"{known_names(name, known)}",
            field=setting,
        )
    return module


@contextmanager
def _importing(setting: str, name: str) -> Iterator[None]:
    """Context of an import of the user's module, which may raise anything."""
    try:
        yield
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError)
        remedy = ". Is the module installed, or its directory on PYTHONPATH?" if missing else ""
        raise ConfigError(
            f"{setting}={name!r} cannot be imported: {type(error).__name__}: {error}{remedy}",
            field=setting,
        ) from error


def resolve_function(setting: str, name: str, known: Collection[str]) -> Any:
    """`resolve`, of what can be called.

    Raises:
        ConfigError: see `resolve`; it cannot be called.
    """
    found = resolve(setting, name, known)
    if not callable(found):
        raise ConfigError(
            f"{setting}={name!r} is a {type(found).__name__}, not a function", field=setting
        )
    return found


def listed(names: Sequence[str]) -> str:
    """The first few of some names, for a message."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def require_arguments(
    setting: str, name: str, function: Callable[..., Any], *arguments: str
) -> None:
    """Raises ConfigError for a function that cannot be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{setting}={name!r} is called as ({', '.join(arguments)}), and takes {signature}: "
            f"{error}",
            field=setting,
        ) from None
