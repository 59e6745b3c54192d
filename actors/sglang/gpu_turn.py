"""The turn of a server on GPUs that several servers of one node use: one is awake, others sleep.

    line    lock of whoever has the next turn; the holder of the turn sees by it that others wait
    turn    lock of the server that is awake

Both are locks of files (flock), which the kernel takes back however their holder ends. The server's
launcher holds the turn, too (actors/sglang/server.py): the turn of an engine that dies lasts until
its server's processes, and so their memory on the GPUs, are gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_POLL_S = 0.05


class GpuTurn:
    """One server's part in the turns: it waits, holds the turn, or does neither.

    Args:
        path: file of the turn; all servers that share the GPUs are given the same one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._turn = path.open("ab")
        self._line = path.with_name(path.name + ".next").open("ab")
        self._is_next = False

    @property
    def file(self) -> int:
        """Descriptor of the turn's lock, for the process that holds it beside this one."""
        return self._turn.fileno()

    @property
    def wanted(self) -> bool:
        """True if another server waits for the turn; ask while this one holds it."""
        if not _locked(self._line):
            return True
        _unlock(self._line)
        return False

    def take(self) -> None:
        """Wait for the turn."""
        while not self._tried():
            time.sleep(_POLL_S)

    async def taken(self) -> None:
        """`take`, for coroutines. One that is cancelled waits no longer."""
        try:
            while not self._tried():
                await asyncio.sleep(_POLL_S)
        finally:
            self._leave_line()

    def give(self) -> None:
        """Let the next server have the turn."""
        _unlock(self._turn)

    def close(self) -> None:
        """Give up the turn, or the wait for it, unless the server's launcher still runs."""
        self._turn.close()
        self._line.close()

    def _tried(self) -> bool:
        self._is_next = self._is_next or _locked(self._line)
        if not (self._is_next and _locked(self._turn)):
            return False
        self._leave_line()
        return True

    def _leave_line(self) -> None:
        if self._is_next:
            _unlock(self._line)
            self._is_next = False


def _locked(file: BinaryIO) -> bool:
    """Lock the file if nobody else has; True if this process holds it now."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _unlock(file: BinaryIO) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
