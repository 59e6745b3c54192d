"""Crash record of the problems whose environment or reward code runs: it outlives its writer.

The evaluator writes it, in a mapping that costs nothing; the driver reads it when the evaluator has
died, or does not answer, of such code. Both are on one machine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np


class InsideFile:
    """The writer's end: when each problem entered, by `time.monotonic`; 0 where it is not."""

    def __init__(self, path: str | Path, num_problems: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.zeros(max(1, num_problems)).tofile(path)  # no holes: a full disk shows here, not later
        self._since_P = np.memmap(path, np.float64, "r+")
        self._episodes_P = [0] * num_problems

    @asynccontextmanager
    async def entered(self, problem: int) -> AsyncIterator[None]:
        """Around such code; several of a problem's episodes may be in it."""
        if not self._episodes_P[problem]:
            self._since_P[problem] = time.monotonic()
        self._episodes_P[problem] += 1
        try:
            yield
        finally:
            self._episodes_P[problem] -= 1
            if not self._episodes_P[problem]:
                self._since_P[problem] = 0


def problems_inside(path: str | Path) -> list[int]:
    """Problems inside, the earliest first; none where there is no such file."""
    if not Path(path).exists():
        return []
    since_P = np.fromfile(path, np.float64)
    return [int(p) for p in np.argsort(since_P, kind="stable") if since_P[p]]
