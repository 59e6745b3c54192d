"""Files that appear whole or not at all, survive a power failure, and are known by their digests.

whole_write       a file or a directory, whoever dies while it is written
write_whole       a file, after a power failure as well
sync_tree         the contents of a directory, with the digests of its files
sync_directory    the names in a directory
disk_remedy       what to do about a file that could not be written
Retries           how often and how long it is tried again
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

# Reading and hashing leave the interpreter's lock; more threads than this wait for the disk.
_THREADS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Seconds between two tries of a write, at first and at most, and that a full disk is given.
PAUSE_S, _LONGEST_PAUSE_S, FULL_S = 3.0, 30.0, 1800.0
_MAY_NOT = (errno.EPERM, errno.EACCES, errno.EROFS)


@contextmanager
def whole_write(path: Path) -> Iterator[Path]:
    """Path to write a file or a directory to; at the block's end it replaces `path`.

    A block that raises leaves `path` as it was. What must survive a power failure is synced by the
    caller, before the end of the block and, for the name, after it.

    Raises:
        OSError: the written file or directory cannot take its name.
    """
    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)  # left by a process that was killed
    try:
        yield partial
        if partial.is_dir():
            _remove(path)  # a directory replaces an empty one only
        partial.replace(path)
    except BaseException:
        _remove(partial)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; it is on disk once this returns.

    Raises:
        OSError: it could not be written. The file is as it was.
    """
    with whole_write(path) as partial, partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def digest(path: str | Path) -> str:
    """SHA-256 of one file, of any size, as `sha256sum` prints it."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of these files below `root`, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest(root / name), names), strict=True))


def sync_tree(root: Path) -> dict[str, str]:
    """Sync all of `root` to disk, directories included; return the digests of its files."""

    def sync(name: str) -> str:
        with (root / name).open("rb") as file:
            os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(root.rglob("*"))
    names = [str(path.relative_to(root)) for path in paths if path.is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:
        made = dict(zip(names, pool.map(sync, names), strict=True))
    for directory in [*(path for path in paths if path.is_dir()), root]:
        sync_directory(directory)
    return made


def sync_directory(path: Path) -> None:
    """Make names that were added to a directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_remedy(error: BaseException | str) -> str:
    """Remedy for a file that could not be written."""
    if isinstance(error, OSError) and error.errno in _MAY_NOT:
        return "Give permission to write there"
    if os.strerror(errno.EFBIG) in str(error):
        return "Lift the limit on the size of a file (ulimit -f)"
    return "Free some space" if is_full(error) else "Remove this cause"


def is_full(error: BaseException | str) -> bool:
    """True if the error, or one that caused it, says that a disk or a quota is full.

    Errors of safetensors and torch carry the system's message and no errno.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if any(os.strerror(number).lower() in str(error).lower() for number in _FULL):
        return True
    cause = error.__cause__ if isinstance(error, BaseException) else None
    return cause is not None and is_full(cause)


class Retries:
    """Tries of a write, later and later after each failure.

    Attributes:
        failures: number of those since the last success.
    """

    def __init__(self) -> None:
        self.failures, self._first = 0, 0.0

    def pause_s(self) -> float:
        """Count a failure; returns the seconds until the next try."""
        if not self.failures:
            self._first = time.monotonic()
        self.failures += 1
        return min(PAUSE_S * 1.5 ** (self.failures - 1), _LONGEST_PAUSE_S)

    def wait_for_room(self, error: BaseException) -> bool:
        """True if the disk is full, and has been for less than `FULL_S`."""
        return is_full(error) and time.monotonic() - self._first < FULL_S
