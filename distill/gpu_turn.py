"""The turn on GPUs that several processes of one node use: one has the memory, the others sleep.

    byte 0        lock of the process that has the turn
    byte 1        of whoever is next; the holder of the turn sees by it that others wait
    bytes 2, ...  of those behind: each moves up when the byte before its own is free

The locks are those of an open file description (fcntl(2)), which the kernel takes back however
their holder ends. A server's launcher holds them, too (actors/sglang/server.py): the turn of an
engine that dies lasts until its server's processes, and so their memory on the GPUs, are gone.

Engines take the turn to start, and to wake for calls or for new weights (actors/sglang/turns.py).
A learner on the same GPUs takes it for the computation of a step (`ShardedModel.take_turn`):

    engine    waits for: the turn          unblocked by: an engine when its calls have ended, the
                                           learner when it has computed its step
              ends at the latest: when its holder has; one without progress is ended by its
              supervisor. A start has the engine's deadline besides
    learner   waits for: the turn on each  unblocked by: an engine when its calls have ended
              set of its GPUs
              ends at the latest: after a multiple of no_progress_s, as an error of the step

A holder waits for nobody in the line, so there is no cycle. A call of an engine needs no other
engine. A step begins with all of its groups, their scores included, and needs no engine until its
push; groups of the next step are fetched meanwhile from object stores. The learner gives the turn
up before it pushes, because the push wakes engines. On several sets of GPUs, the learner may have
the turn on one while it waits for the other: the engines of the other end their calls without it.
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
# Place of whoever begins to wait; more than that wait before it, in no order.
_LAST = 63
# `struct flock`: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


class GpuTurn:
    """One process's part in the turns: it waits, has the turn, or does neither.

    Args:
        path: file of the turn; all processes that share the GPUs are given the same one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._place: int | None = None  # in the line; 0: it has the turn; None: neither

    @property
    def file(self) -> int:
        """Descriptor of the locks, for the process that holds them beside this one."""
        return self._file.fileno()

    @property
    def wanted(self) -> bool:
        """True if another process waits for the turn; ask while this one has it."""
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, 1))
        return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK

    def take(self, within_s: float = math.inf) -> bool:
        """Wait for the turn; False if it did not come in time. The place in the line is kept."""
        end = time.monotonic() + within_s
        while not self._moved_up():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    async def taken(self) -> None:
        """`take`, for coroutines. One that is cancelled waits no longer."""
        try:
            while not self._moved_up():
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self.give()
            raise

    def give(self) -> None:
        """Let the next process have the turn, or leave the line."""
        if self._place is not None:
            self._unlock(self._place)
            self._place = None

    def close(self) -> None:
        """Give up the turn, or the wait for it, unless the server's launcher still runs."""
        self._file.close()

    def _moved_up(self) -> bool:
        """Take places in the line up to one that is taken; True if it has the turn."""
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
