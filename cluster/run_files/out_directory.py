"""Checks of a run's `out=` that need no library of tensors: is it free, and can it be written?"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from cluster.config.run_record import SAVED_IN
from cluster.run_files.run_lock import RunLock
from cluster.store.group_store import GROUPS
from distill.errors import ConfigError

# What a run writes into its directory.
_DIRECTORIES = (*SAVED_IN, "final", "adapter", "failed", "logs", GROUPS)
_FILES = (
    "config.json", "summary.json", "calibration.json", "certificate.json", "metrics.jsonl",
    "events.jsonl", "evaluations.jsonl", "ledger.jsonl", "rollouts.jsonl", ".lock",
)  # fmt: skip
# Longest wait for another job that still ends: as long as `ray job stop` gives it (deploy/, docs).
OTHER_JOB_S = 600.0


def check_out(path: Path) -> None:
    """Raises ConfigError if no run can begin or go on in the directory; leaves nothing behind."""
    check_permissions(path)
    if (path / "config.json").is_file():
        return
    if path.is_dir() and any(each for each in path.iterdir() if each.name != ".lock"):
        raise ConfigError(
            f"out={path} is not empty and holds no isotherm run; choose another out=", field="out"
        )
    try:  # permissions do not tell that nothing can be made: in /proc
        with tempfile.TemporaryDirectory(prefix=".isotherm-", dir=_nearest(path)):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def claim_directory(out: str, command: str, *, keep: bool = False) -> Path:
    """Create the directory of a command that is no run, such as the demo; returns its whole path.

    Args:
        keep: keep the files of an earlier one; they are removed otherwise.

    Raises:
        ConfigError: the directory is not empty, and the command did not make it.
    """
    path = Path(out).resolve()
    marker = path / f".isotherm-{command}"
    if path.exists() and any(path.iterdir()) and not marker.exists():
        raise ConfigError(
            f"out={path} is not empty and no {command} made it; choose another out=", field="out"
        )
    if not keep:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return path


def check_permissions(path: Path) -> None:
    """Raises ConfigError if `out/` is a file, or part of it cannot be written."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out={path} is a file; give a directory", field="out")
    for part in (_nearest(path), *(path / name for name in (*_DIRECTORIES, *_FILES))):
        if part.exists() and not os.access(part, os.W_OK):
            raise ConfigError(
                f"out={path} cannot be written (no permission in {part})", field="out"
            )
    for name in _DIRECTORIES:
        if (path / name).exists() and not (path / name).is_dir():
            raise ConfigError(f"{path / name} is no directory; remove it", field="out")


def wait_for_other_job(path: Path, say: Callable[[str], None]) -> None:
    """Wait while another job holds the directory. The run's own lock comes later.

    Raises:
        ConfigError: the other job holds it for too long, or the directory cannot be written.
    """
    lock = path / ".lock"
    if lock.exists():
        check_permissions(path)
        with RunLock.acquire(lock, say, OTHER_JOB_S):
            pass


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"out={path} cannot be written ({error.strerror} in {_nearest(path)}); choose another out=",
        field="out",
    )


def _nearest(path: Path) -> Path:
    """The directory itself, or its nearest parent that exists."""
    return next(each for each in (path, *path.parents) if each.exists())
