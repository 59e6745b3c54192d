"""Record of the problems whose environment or reward code is running, readable after a crash.

The evaluator writes the record through a memory-mapped file, at negligible cost. The driver reads
the file when the evaluator has died or does not answer because of such code. Both processes are on
the same machine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np


class UserCodeFile:
    """Writer of the record: for each problem `time.monotonic` of its entry, or 0 if outside."""

    def __init__(self, path: str | Path, num_problems: int) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Written without holes, so that a full disk raises here and not during the evaluation.
        np.zeros(max(1, num_problems)).tofile(path)
        self._since_P = np.memmap(path, np.float64, "r+")
        self._episodes_P = [0] * num_problems

    @asynccontextmanager
    async def entered(self, problem: int) -> AsyncIterator[None]:
        """Context manager around user code; several episodes of a problem may be inside."""
        if not self._episodes_P[problem]:
            self._since_P[problem] = time.monotonic()
        self._episodes_P[problem] += 1
        try:
            yield
        finally:
            self._episodes_P[problem] -= 1
            if not self._episodes_P[problem]:
                self._since_P[problem] = 0


def problems_in_user_code(path: str | Path) -> list[int]:
    """Problems that are inside user code, earliest entry first; empty if there is no file."""
    if not Path(path).exists():
        return []
    since_P = np.fromfile(path, np.float64)
    return [int(p) for p in np.argsort(since_P, kind="stable") if since_P[p]]
