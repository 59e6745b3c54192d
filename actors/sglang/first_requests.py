"""First requests of each kind: a server compiles CUDA kernels for them and answers nothing else.

SGLang compiles a kernel when a batch first needs it, in the loop of its scheduler: for minutes no
token comes out, and `/health`, which waits for one, fails. Sampling and scoring need different
kernels. So a kind of request that was never answered gets as long as a start does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class FirstRequests:
    """Account of the kinds of requests that were answered.

    Args:
        patience_s: longest that a kind may wait for its first answer.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._answered: set[str] = set()
        self._since: dict[str, float] = {}  # kinds that were asked for and never answered

    @contextmanager
    def sending(self, kind: str) -> Iterator[None]:
        """Context of a request of this kind; leaving it without an error is the answer."""
        if kind not in self._answered:
            self._since.setdefault(kind, time.monotonic())
        yield
        self._answered.add(kind)
        self._since.pop(kind, None)

    @property
    def under_way(self) -> bool:
        """True while a kind waits for its first answer, within its patience."""
        now = time.monotonic()
        return any(now - since < self._patience_s for since in self._since.values())
