"""Observation of a run from the code that started it, in the same process.

Recipes are given settings and a console, whoever calls them; `cluster.recipes.opening.begun` asks
here, in the thread of the recipe, who else wants its metrics and may end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from cluster.runtime.driver import Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """
    Attributes:
        line: is given every line of metrics.jsonl, once it is on disk.
        signals: of the run; with one received, the run ends as it does on that signal.
    """

    line: Callable[[Mapping[str, float]], None]
    signals: Signals


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Runs that start within the context, in this thread, are observed."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def present_observer() -> Observer:
    """The observer of this thread's run; one of no consequence where there is none."""
    return _observer.get() or Observer(line=lambda _metrics: None, signals=Signals())
