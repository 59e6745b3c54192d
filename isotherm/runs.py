"""Recipes called from Python: settings as arguments, metrics as an iterator."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Generator, Iterator, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rich.console import Console

from cluster.base.outcomes import Interrupted, RunFailed, error_text
from cluster.config.arguments import Arguments
from cluster.console import make_console
from cluster.recipes.context import Observer
from cluster.runtime.driver import Signals
from cluster.train import run_recipe
from distill.errors import ConfigError


def run(recipe: str, *, quiet: bool = False, **settings: Any) -> Generator[dict[str, float]]:
    """Run a recipe, and yield the lines of its metrics.jsonl: one for each step and evaluation.

    The run starts when the first line is requested, and continues while the caller processes a
    line. Closing the iterator, for example with `break`, ends the run after the current step like
    Ctrl-C on the command line: a checkpoint is saved, all actors end, and the same call resumes.

    Args:
        quiet: print nothing.
        settings: settings of the command line, as values. A mapping contains nested settings
            (teachers={"a": {"model": DIR}}). A function or class of a module is passed on by its
            name. None: the setting is not given.

    Raises:
        IsothermError, RunFailed, EngineError, NonFiniteError: with the message of the command line.
    """
    given = Arguments.of_values({"recipe": recipe, **_given(settings)})
    running = _RunThread(given, Console(quiet=True) if quiet else make_console())
    atexit.register(running.end)
    try:
        yield from running.lines()
    finally:
        running.end()
        atexit.unregister(running.end)
        running.raise_error()


class _RunThread:
    """A recipe that runs in its own thread."""

    def __init__(self, arguments: Arguments, console: Console) -> None:
        self._lines: SimpleQueue[dict[str, float] | None] = SimpleQueue()  # None: the run has ended
        self._signals = Signals()
        self._error: Exception | None = None
        self._thread = Thread(
            target=self._run, args=(arguments, console), name="recipe", daemon=True
        )
        self._thread.start()

    def _run(self, arguments: Arguments, console: Console) -> None:
        def line(metrics: Mapping[str, float]) -> None:
            self._lines.put(dict(metrics))

        try:
            run_recipe(arguments, console, Observer(line=line, signals=self._signals))
        except Interrupted:
            pass  # by `end`
        except Exception as error:
            self._error = error
        finally:
            self._lines.put(None)

    def lines(self) -> Iterator[dict[str, float]]:
        while (line := self._lines.get()) is not None:
            yield line

    def end(self) -> None:
        """Interrupt the run if it has not ended, and wait until it has ended."""
        if self._thread.is_alive():
            self._signals.received = signal.SIGINT
            self._thread.join()

    def raise_error(self) -> None:
        """Raise the error of the run, if any, with the remedy in its message."""
        if self._error is not None:
            if isinstance(self._error, RunFailed):
                self._error.args = (error_text(self._error),)
            raise self._error


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not None, with functions and classes replaced by their names."""
    return {
        name: _given(value) if isinstance(value, Mapping) else _named(name, value)
        for name, value in settings.items()
        if value is not None
    }


def _named(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_named(name, each) for each in value]
    if not callable(value):
        return value
    module, function = value.__module__, value.__qualname__
    if module == "__main__" or "." in function:
        raise ConfigError(
            f"{name}={function}: the run's workers import functions and classes by name; move it "
            f"to a file, for example my_file.py, and give {name}='my_file:{function}'"
        )
    return f"{module}:{function}"
