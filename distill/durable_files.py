"""Atomic and durable writes of files and directories, and SHA-256 digests.

whole_write       write a file or a directory atomically: a dying process leaves no partial one
write_whole       write a file atomically, and durably: it survives a power failure
sync_tree         make the contents of a directory durable, and compute its files' digests
sync_directory    make the names in a directory durable
disk_remedy       remedy for a file that could not be written
Retries           how often and how long a failed write is tried again
with_retries      repeat a write while the disk is full
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from distill.errors import CheckpointError

logger = logging.getLogger(__name__)

# Reading and hashing release the GIL; more threads than this only wait for the disk.
_THREADS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Seconds between two tries of a write: the first and the longest pause. Longest time that writes to
# a full disk are tried again.
PAUSE_S, _LONGEST_PAUSE_S, FULL_S = 3.0, 30.0, 1800.0
_MAY_NOT = (errno.EPERM, errno.EACCES, errno.EROFS)
_LOOK_S = 0.25

Value = TypeVar("Value")


@contextmanager
def whole_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a directory, which replaces `path` as the block ends.

    If the block raises, `path` is unchanged. Nothing is synced here: to survive a power failure,
    the caller syncs the contents before the block ends, and the name after it.

    Raises:
        OSError: the written file or directory cannot be renamed to `path`.
    """
    partial = path.with_name(f".{path.name}.partial")
    _remove(partial)  # left by a process that was killed
    try:
        yield partial
        if partial.is_dir():
            _remove(path)  # a directory can replace only an empty directory
        partial.replace(path)
    except BaseException:
        _remove(partial)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; once this returns, the file survives a power failure.

    Raises:
        OSError: the file could not be written and is unchanged.
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
    """SHA-256 of each of the files `names` below `root`, computed in parallel."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest(root / name), names), strict=True))


def sync_tree(root: Path) -> dict[str, str]:
    """Sync all of `root` to disk, directories included; return its files' digests by path."""

    def sync(name: str) -> str:
        with (root / name).open("rb") as file:
            os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(root.rglob("*"))
    names = [str(path.relative_to(root)) for path in paths if path.is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(names, pool.map(sync, names), strict=True))
    for directory in [*(path for path in paths if path.is_dir()), root]:
        sync_directory(directory)
    return found


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
    """True if the error, or an error that caused it, reports that a disk or a quota is full.

    A limit on the size of a file (EFBIG) does not count, because no wait makes room under it.
    Errors of safetensors and torch carry the system's message and no errno.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if any(os.strerror(number).lower() in str(error).lower() for number in _FULL):
        return True
    cause = error.__cause__ if isinstance(error, BaseException) else None
    return cause is not None and is_full(cause)


class Retries:
    """Repeated tries of a write, with a growing pause after each failure.

    Attributes:
        failures: number of failures since the last success.
    """

    def __init__(self) -> None:
        self.failures, self._first = 0, 0.0

    def pause_s(self) -> float:
        """Count a failure; return the seconds until the next try."""
        if not self.failures:
            self._first = time.monotonic()
        self.failures += 1
        return min(PAUSE_S * 1.5 ** (self.failures - 1), _LONGEST_PAUSE_S)

    def wait_for_room(self, error: BaseException) -> bool:
        """True if the disk is full, and has been for less than `FULL_S`."""
        return is_full(error) and time.monotonic() - self._first < FULL_S


def with_retries(write: Callable[[], Value], waiting: Callable[[], None]) -> Value:
    """Call `write`, again and again while the disk is full; `waiting` is called in the pauses.

    Raises:
        CheckpointError: the disk stays full, or the write failed for another reason.
    """
    retries = Retries()
    while True:
        try:
            return write()
        except CheckpointError as error:
            again_at = time.monotonic() + retries.pause_s()
            if not retries.wait_for_room(error):
                raise
            logger.warning("%s. It is retried", error)
        while time.monotonic() < again_at:
            waiting()
            time.sleep(_LOOK_S)
