"""Calls beside the learner's thread, and whose turn it is.

The rest of a push goes on while the next step is computed; engines join meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from distill.errors import EngineError
from distill.pace import Progress

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ended(Generic[Value]):
    """A call that is over, and for how many seconds it was waited for."""

    value: Value
    waited_s: float


class Background(Generic[Value]):
    """At most one call under way. What it raises is raised by whoever waits for it, each time."""

    def __init__(self) -> None:
        self._call: Future[Value] | None = None

    def begin(self, call: Callable[[], Value]) -> None:
        """Runs it in a thread of its own."""
        assert self._call is None, "wait() comes first"
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # of whoever waits
                future.set_exception(error)

        self._call = future
        # A daemon: a process that gives up ends although an engine keeps this thread waiting.
        threading.Thread(target=run, name="push", daemon=True).start()

    def wait(self) -> Ended[Value] | None:
        """The call that was begun last, once it is over; None if there is none."""
        if self._call is None:
            return None
        began = time.perf_counter()
        value = self._call.result()
        self._call = None
        return Ended(value, time.perf_counter() - began)

    @property
    def done(self) -> bool:
        """The call is over, however it ended."""
        return self._call is not None and self._call.done()

    def check(self) -> None:
        """Raises what the call raised, if it is over; waits for nothing."""
        if self._call is not None and self.done:
            self._call.result()


@dataclass(slots=True)
class Turn:
    """A turn. It ends with its context or, if it `goes_on`, when another thread ends it."""

    _lock: threading.Lock
    goes_on: bool = False

    def end(self) -> None:
        self._lock.release()


class Turns:
    """Turns of several threads, one at a time; whoever waits for its own gives up in the end."""

    def __init__(self, timeout_s: float, progress: Progress) -> None:
        """
        Args:
            timeout_s: longest it waits while nothing moves `progress`.
        """
        self._lock, self._timeout_s, self._progress = threading.Lock(), timeout_s, progress

    @contextmanager
    def next(self) -> Iterator[Turn]:
        """Waits for the turns before it.

        Raises:
            EngineError: one of them does not end.
        """
        seen = self._progress.count
        while not self._lock.acquire(timeout=self._timeout_s):
            if seen == (seen := self._progress.count):
                raise EngineError(
                    f"waited {self._timeout_s:.0f} s for other engines to load their weights"
                )
        turn = Turn(self._lock)
        try:
            yield turn
        finally:
            if not turn.goes_on:
                turn.end()
