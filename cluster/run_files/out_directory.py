"""Checks of a run's `out=` that do not import torch: is it free, and can it be written?"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.run_record import SAVED_IN
from cluster.run_files.run_lock import LOCK, RunLock
from cluster.store.group_store import GROUPS
from distill.errors import ConfigError

# Directories and files that a run writes.
_DIRECTORIES = (*SAVED_IN, "final", "adapter", "failed", "logs", GROUPS)
_FILES = (
    "config.json", "summary.json", "calibration.json", "certificate.json", "metrics.jsonl",
    "events.jsonl", "evaluations.jsonl", "ledger.jsonl", LOCK,
)  # fmt: skip
# Longest wait in seconds for the end of another job: the time that `ray job stop` grants (deploy/,
# docs).
OTHER_JOB_S = 600.0


def check_out(path: Path) -> None:
    """Raise ConfigError if no run can begin or continue in the directory. Leaves no files."""
    check_permissions(path)
    if (path / "config.json").is_file():
        return
    if _holds_files(path):
        raise ConfigError(
            f"out={path} is not empty and is not an isotherm run; choose another out="
        )
    try:  # permissions alone are not sufficient, for example in /proc
        with tempfile.TemporaryFile(dir=_nearest(path)):  # without a name, which a kill would leave
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def claimed_directory(
    out: str | Path, command: str, print_line: Callable[[str], None], *, keep: bool = False
) -> Iterator[Path]:
    """Context manager for the locked directory of a command that is not a run, such as the demo.

    The directory is created if necessary, and the files of an earlier call are deleted. If another
    process holds the lock, wait for its end. Yields the absolute path.

    Args:
        print_line: prints a line if another process holds the lock.
        keep: keep the files of an earlier call.

    Raises:
        ConfigError: the directory is not empty and was not made by the command; or another process
            still holds the lock; or the directory cannot be written.
    """
    path = Path(out).resolve()
    marker = path / f".isotherm-{command}"

    def require_own() -> None:
        if _holds_files(path) and not marker.exists():
            raise ConfigError(
                f"out={path} is not empty and was not made by {command}; choose another out="
            )

    require_own()
    with locked(path, print_line, OTHER_JOB_S):
        require_own()  # the other process may have been a run
        marker.touch()  # first, so that a call that is killed while it deletes can be repeated
        for each in () if keep else path.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            elif each.name not in (LOCK, marker.name):
                each.unlink()
        yield path


def check_permissions(path: Path) -> None:
    """Raise ConfigError if `out/` is a file, or part of it cannot be written."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out={path} is a file; give a directory")
    for part in (_nearest(path), *(path / name for name in (*_DIRECTORIES, *_FILES))):
        if part.exists() and not os.access(part, os.W_OK):
            raise ConfigError(f"out={path} cannot be written (no permission in {part})")
    for name in _DIRECTORIES:
        if (path / name).exists() and not (path / name).is_dir():
            raise ConfigError(f"{path / name} is not a directory; remove it", field="out")


def wait_for_other_job(path: Path, print_line: Callable[[str], None]) -> None:
    """Wait while another job holds the lock of the directory. The run acquires the lock later.

    Raises:
        ConfigError: the other job holds the lock for too long, or the directory cannot be written.
    """
    if (path / LOCK).exists():
        with locked(path, print_line, OTHER_JOB_S):
            pass


def locked(path: Path, print_line: Callable[[str], None], wait_s: float) -> RunLock:
    """Acquire the lock of a directory (`RunLock.acquire`).

    Raises:
        ConfigError: another job still holds the lock, or the directory cannot be written.
    """
    check_permissions(path)
    try:
        return RunLock.acquire(path / LOCK, print_line, wait_s)
    except OSError as error:
        raise _unwritable(path, error) from error


def _holds_files(path: Path) -> bool:
    ours = (LOCK, ".config.json.partial")  # left by a run that was killed during its start
    return path.is_dir() and any(each.name not in ours for each in path.iterdir())


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out={path} cannot be written ({error.strerror} in {_nearest(path)}); choose another out="
    )


def _nearest(path: Path) -> Path:
    """The directory, or its nearest existing parent."""
    return next(each for each in (path, *path.parents) if each.exists())
