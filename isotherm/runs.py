"""Whole recipes from Python: settings as arguments, metrics as an iterator."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Generator, Iterator, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rich.console import Console

from cluster.base.outcomes import Interrupted, RunFailed, complaint
from cluster.config.arguments import Arguments
from cluster.console import make_console
from cluster.recipes.observer import Observer, observed_by
from cluster.runtime.driver import Signals
from cluster.train import run_recipe
from distill.errors import ConfigError


def run(recipe: str, *, quiet: bool = False, **settings: Any) -> Generator[dict[str, float]]:
    """Runs a recipe, and yields the lines of its metrics.jsonl: of each step, and of evaluations.

    The run begins with the first line that is asked for. It does not wait while a line is looked
    at. Closing the iterator (a `break` does) ends the run after the step under way, as Ctrl-C does
    on the command line: a checkpoint is saved, all actors end, and the same call resumes.

    Args:
        quiet: prints nothing.
        settings: those of the command line, as values. A mapping gives the settings within one
            (teachers={"a": {"model": DIR}}); a function or class of a module stands for its name;
            None is a setting that is not given.

    Raises:
        IsothermError, RunFailed, EngineError, NonFiniteError: with the message of the command line.
    """
    given = Arguments.of_values({"recipe": recipe, **_given(settings)})
    under_way = _RunThread(given, Console(quiet=True) if quiet else make_console())
    atexit.register(under_way.end)
    try:
        yield from under_way.lines()
    finally:
        under_way.end()
        atexit.unregister(under_way.end)
        under_way.raise_error()


class _RunThread:
    """A recipe in a thread of its own."""

    def __init__(self, arguments: Arguments, console: Console) -> None:
        self._lines: SimpleQueue[dict[str, float] | None] = SimpleQueue()  # None: it has ended
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
            with observed_by(Observer(line=line, signals=self._signals)):
                run_recipe(arguments, console)
        except Interrupted:
            pass  # as `end` asked
        except Exception as error:
            self._error = error
        finally:
            self._lines.put(None)

    def lines(self) -> Iterator[dict[str, float]]:
        while (line := self._lines.get()) is not None:
            yield line

    def end(self) -> None:
        """Ends the run, if it has not ended, and returns when it has."""
        if self._thread.is_alive():
            self._signals.received = signal.SIGINT
            self._thread.join()

    def raise_error(self) -> None:
        """Raises what the run raised; its message has the remedy."""
        if self._error is not None:
            if isinstance(self._error, RunFailed):
                self._error.args = (complaint(self._error),)
            raise self._error


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are None, and with functions and classes by their names."""
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
            f"{name}={function}: the run's workers import functions and classes by name; write it "
            f"into a file, my_file.py beside this one say, and give {name}='my_file:{function}'",
            field=name,
        )
    return f"{module}:{function}"
