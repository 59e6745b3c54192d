"""Names in settings: known names, suggestions for unknown ones, and `package.module:attribute`."""

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

# Number of names that a message lists.
_NAMED = 4
# Least similarity (`difflib`) of a path that is suggested: a slip, not another word.
_ALIKE = 0.8


def known_names(name: str, known: Collection[str]) -> str:
    """End of an error message about an unknown `name`: the nearest known name and all names."""
    near = get_close_matches(name, known, n=1)
    every = ", ".join(sorted(known))
    return f"did you mean {near[0]!r}? Known: {every}" if near else f"known: {every}"


def path_meant(path: str, pattern: str = "*") -> str:
    """Suggestion of an existing path in place of a similar one that is missing; "" if none.

    Args:
        pattern: glob pattern of the candidates in the same directory; `*/` for directories.
    """
    missing = Path(path)
    if missing.exists():
        return ""
    beside = missing.parent
    names = [each.name for each in beside.glob(pattern)]
    near = get_close_matches(missing.name, names, n=1, cutoff=_ALIKE)
    return f"; did you mean {str(beside / near[0])!r}?" if near else ""


def resolve(setting: str, name: str, known: Collection[str]) -> Any:
    """Import the object that `package.module:attribute` names, the value of `setting`.

    Args:
        known: names that the setting accepts besides, for the error message.

    Raises:
        ConfigError: `name` has another form, or the object cannot be imported.
    """
    _module_of(setting, name, known)
    with _importing(setting, name):
        return pkgutil.resolve_name(name)


def require_module(setting: str, name: str, known: Collection[str]) -> None:
    """Check `package.module:attribute` without importing the module, which may take seconds.

    Args:
        known: names that the setting accepts besides, for the error message.

    Raises:
        ConfigError: `name` has another form, or there is no such module.
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
            f"{known_names(name, known)}"
        )
    return module


@contextmanager
def _importing(setting: str, name: str) -> Iterator[None]:
    """Convert any error of importing the user's module to ConfigError."""
    try:
        yield
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError)
        remedy = "; install the module, or put its directory on PYTHONPATH" if missing else ""
        raise ConfigError(
            f"{setting}={name!r} cannot be imported: {type(error).__name__}: {error}{remedy}"
        ) from error


def resolve_function(setting: str, name: str, known: Collection[str]) -> Any:
    """Import a callable by `resolve`.

    Raises:
        ConfigError: as `resolve`, or the object is not callable.
    """
    found = resolve(setting, name, known)
    if not callable(found):
        raise ConfigError(f"{setting}={name!r} is a {type(found).__name__}, not a function")
    return found


def listed(names: Sequence[str]) -> str:
    """The first few names and the number of the others, for a message."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def require_arguments(
    setting: str, name: str, function: Callable[..., Any], *arguments: str
) -> None:
    """Raise ConfigError if a function cannot be called with `arguments`, which are their names."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{setting}={name!r} is called with ({', '.join(arguments)}), but takes {signature}: "
            f"{error}"
        ) from None
