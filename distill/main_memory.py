"""Main memory: the free amount, a check that it is enough, and settings of malloc."""

from __future__ import annotations

import ctypes
from pathlib import Path

from distill.errors import ConfigError
from distill.gpu import gib

# Files of a container's limit and usage: cgroup v2, and v1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Fields of memory.stat: pages of files that the kernel drops when memory is requested.
_DROPPABLE = ("inactive_file", "active_file")
# Parameters of glibc's malloc (mallopt(3)) and their values in bytes: the largest block that comes
# from the heap, and how much free memory the heap keeps at its end. malloc stops adjusting both by
# itself once one of them is set.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 32 << 20), (-1, 128 << 20)


def free_main_memory() -> int:
    """Bytes of main memory that are available now, within this container's limit."""
    return int(min(_available(), *(_left_in(*each) for each in _CGROUPS)))


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        import psutil

        return psutil.virtual_memory().available


def _left_in(directory: Path, limit: str, used: str) -> float:
    """Bytes left below a control group's limit; infinite if there is no limit."""
    try:
        left = int((directory / limit).read_text()) - int((directory / used).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such cgroup, or its limit is the word "max"
        return float("inf")
    return left + sum(int(stat.get(name, 0)) for name in _DROPPABLE)


def require_main_memory(needed: int, what: str) -> None:
    """Raise ConfigError if less than `needed` bytes of main memory are free."""
    if needed > (free := free_main_memory()):
        raise ConfigError(
            f"{what} needs {gib(needed)} GiB of main memory, and this machine or container has "
            f"{gib(free)} GiB free (shared memory, such as Ray's object store, counts as used). "
            "Use a machine, or a container limit, with more memory"
        )


def keep_freed_memory() -> None:
    """Make glibc's malloc keep the memory that a step frees: the next step needs as much.

    By default, malloc returns the memory of a model's activations to the kernel, and a page fault
    brings back every 4 KiB: 12 of 40 ms of the teacher's CPU time in a step of
    `benchmarks.short_answers`. Other C libraries are unaffected. Processes that are forked later
    inherit the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, size in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(parameter, size)
