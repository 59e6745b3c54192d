"""Patience for the first request of each kind, during which a server compiles CUDA kernels.

SGLang compiles a kernel when a batch first needs it, in the loop of its scheduler. For minutes it
produces no token, and `/health`, which waits for a token, fails. Sampling and scoring need
different kernels. So the first request of each kind may take as long as a start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class FirstRequests:
    """Record of the kinds of requests that have been answered.

    Args:
        patience_s: longest time in seconds until the first answer to a kind of request.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._answered: set[str] = set()
        self._since: dict[str, float] = {}  # kind without an answer -> time of its first request

    @contextmanager
    def sending(self, kind: str) -> Iterator[None]:
        """Context manager for a request; leaving it without an error counts as an answer."""
        if kind not in self._answered:
            self._since.setdefault(kind, time.monotonic())
        yield
        self._answered.add(kind)
        self._since.pop(kind, None)

    @property
    def in_progress(self) -> bool:
        """True while a first request is in progress and `patience_s` has not passed."""
        now = time.monotonic()
        return any(now - since < self._patience_s for since in self._since.values())
