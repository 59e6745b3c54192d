"""A call beside the learner's thread: the rest of a push, while the next step is computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

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

    def check(self) -> None:
        """Raises what the call raised, if it is over; waits for nothing."""
        if self._call is not None and self._call.done():
            self._call.result()
