"""A thread that does a run's side work in order, so that the run never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Full, Queue


class WorkThread:
    """A daemon thread with a bounded queue of work.

    Args:
        name: the thread's name.
        failed: called in the thread with what a piece of work raised; the next one follows.
        limit: how much work may wait.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], limit: int) -> None:
        self._failed = failed
        self._queue: Queue[Callable[[], object] | None] = Queue(limit)
        self._began: float | None = None  # the work under way
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object]) -> bool:
        """Queue some work; False if the queue is full."""
        try:
            self._queue.put_nowait(work)
        except Full:
            return False
        return True

    @property
    def busy_s(self) -> float:
        """Seconds that the work under way has taken so far."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def finish(self, timeout_s: float) -> bool:
        """Wait for all queued work; False if some is left after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return False
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._began = time.monotonic()
            try:
                work()
            except BaseException as error:  # of a library or the user: it may even exit
                self._failed(error)
            finally:
                self._began = None
