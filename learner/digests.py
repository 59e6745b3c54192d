"""SHA-256 of files, as `sha256sum` prints it, and directories made to survive a power cut."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Reading and hashing leave the interpreter's lock; more threads than this wait for the disk.
_THREADS = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAY_NOT = (errno.EPERM, errno.EACCES, errno.EROFS)


def digest(path: str | Path) -> str:
    """SHA-256 of one file, of any size."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of these files below `root`, several at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: digest(root / name), names), strict=True))


def sync_tree(root: Path) -> dict[str, str]:
    """Syncs all of `root` to disk, directories included; returns the digests of its files."""

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
    """Names that were added to it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_remedy(error: BaseException | str) -> str:
    """Remedy for a file that could not be written."""
    if isinstance(error, OSError) and error.errno in _MAY_NOT:
        return "Give permission to write there"
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
