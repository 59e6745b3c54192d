"""Turns on GPUs that processes of one node share: one process uses the memory, the others sleep.

The turn and the line of waiting processes are locks on the bytes of a file:

    byte 0        locked by the process that has the turn
    byte 1        locked by the next in line, which shows the holder of the turn that others wait
    bytes 2, ...  locked by the processes behind; each moves up when the byte before is free

The locks belong to an open file description (fcntl(2)), so the kernel releases them however their
holder ends. A server's launcher also holds them (actors/sglang/server.py): if an engine dies, its
turn lasts until its server's processes, and therefore their memory on the GPUs, are gone.

Engines take the turn to start, and to wake for calls or for new weights (actors/sglang/turns.py).
A learner on the same GPUs takes it for the computation of a step (`ShardedModel.acquire_turn`):

    engine    waits for: the turn          unblocked by: an engine when its calls have ended, the
                                           learner when it has computed its step
              at most: until the holder ends; the supervisor ends a holder without progress. A
              start is also limited by the engine's deadline
    learner   waits for: the turn on each  unblocked by: an engine when its calls have ended
              set of its GPUs
              at most: a multiple of no_progress_s; then the step fails

The waits form no cycle, because the holder of the turn waits for no process in the line. A call of
an engine needs no other engine. A step begins with all of its groups, their scores included, and
needs no engine until its push; the groups of the next step are fetched meanwhile from object
stores. The learner releases the turn before it pushes, because the push wakes engines. With several
sets of GPUs, the learner may have the turn on one set while it waits for another: the engines of
the other set complete their calls without the learner.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import struct
import time
from pathlib import Path

_POLL_S = 0.05
# Byte at which a process joins the line. Processes that find it locked compete for it in no order.
_LAST = 63
# `struct flock`: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


class GpuTurn:
    """State of one process: it has the turn, waits in the line, or does neither.

    Args:
        path: file with the locks, the same for all processes that share the GPUs.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._place: int | None = None  # byte that is locked; 0: has the turn; None: not in line

    @property
    def file(self) -> int:
        """Descriptor of the locks, for a child process that also holds them."""
        return self._file.fileno()

    @property
    def wanted(self) -> bool:
        """True if another process waits for the turn; valid while this process has it."""
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, 1))
        return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK

    def acquire(self, within_s: float = math.inf) -> bool:
        """Wait for the turn. Return False after `within_s`, and keep the place in the line."""
        end = time.monotonic() + within_s
        while not self._moved_up():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    async def acquire_async(self) -> None:
        """`acquire` for coroutines. Cancellation leaves the line."""
        try:
            while not self._moved_up():
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self.release()
            raise

    def release(self) -> None:
        """Release the turn to the next process, or leave the line."""
        if self._place is not None:
            self._unlock(self._place)
            self._place = None

    def close(self) -> None:
        """Close the file: this releases the turn or the place, unless the launcher still runs."""
        self._file.close()

    def _moved_up(self) -> bool:
        """Move up in the line while the next place is free; True if this process has the turn."""
        if self._place is None and self._locked(_LAST):
            self._place = _LAST
        while self._place and self._locked(self._place - 1):
            self._unlock(self._place)
            self._place -= 1
        return self._place == 0

    def _locked(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, byte))
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by the file system
            return False
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, byte))


def _range(kind: int, byte: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
