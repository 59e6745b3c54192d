"""Lock of a run's directory: one job at a time reads and writes `out/`.

A scheduler may restart a job while the first attempt still writes its last checkpoint, so the new
attempt waits for the lock. The file contains the name of its holder, for the message about the
wait.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from distill.errors import ConfigError

# Name of the lock file in a directory.
LOCK = ".lock"
_POLL_S = 0.2


class RunLock:
    """Exclusive lock on a file, held until the context ends or the process dies."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path, self._file = path, file

    @classmethod
    def acquire(cls, path: Path, print_line: Callable[[str], None], wait_s: float) -> RunLock:
        """Lock `path`; create the file and its directory if they do not exist.

        Args:
            print_line: prints a line if another job holds the lock and `wait_s` is above 0.
            wait_s: seconds to wait for another holder.

        Raises:
            ConfigError: another job still holds the lock.
            OSError: the file cannot be created.
        """
        deadline, printed = time.monotonic() + wait_s, False
        while (held := cls._attempt(path)) is None:
            holder = f"out={path.parent} is in use by a running job{_holder(path)}"
            if time.monotonic() >= deadline:
                waited = f" after {wait_s:.0f} s" if wait_s else ""
                raise ConfigError(
                    f"{holder}{waited}; wait for its end, or choose another out=", field="out"
                )
            if not printed:
                print_line(f"{holder}: waiting for its end, for {wait_s:.0f} s at most")
                printed = True
            time.sleep(_POLL_S)
        return held

    @classmethod
    def _attempt(cls, path: Path) -> RunLock | None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder may have removed the file since it was opened. A lock on a removed file
            # protects nothing, because another process can create the file again.
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise FileNotFoundError(path)
        except (BlockingIOError, FileNotFoundError):
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return cls(path, file)

    def remove(self) -> None:
        """Remove the file. The lock must be held."""
        self._path.unlink()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _holder(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    return f" ({text})" if text else ""
