"""Thread for a run's background work, which is done in order and never delays the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Full, Queue


class WorkThread:
    """A daemon thread with a bounded queue of work.

    Args:
        name: name of the thread.
        failed: called in the thread with an exception that work has raised; later work continues.
        limit: maximum number of queued calls.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], limit: int) -> None:
        self._failed = failed
        self._queue: Queue[Callable[[], object] | None] = Queue(limit)
        self._began: float | None = None  # start of the current work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object]) -> bool:
        """Queue a call; False if the queue is full."""
        try:
            self._queue.put_nowait(work)
        except Full:
            return False
        return True

    @property
    def busy_s(self) -> float:
        """Seconds that the current work has taken so far."""
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
            except BaseException as error:  # libraries and user code may raise even SystemExit
                self._failed(error)
            finally:
                self._began = None
