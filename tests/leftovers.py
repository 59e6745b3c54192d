"""Leftovers of a test on the machine: processes, actors, shared memory and temporary files.

Only what is the test's own is looked at, so that tests may run side by side. Processes inherit its
mark in their environment, whoever starts them and whatever becomes of their parents. With the
processes go their ports. A shared Ray's processes are older than the mark; of those, actors count.
Temporary files are in the session's own directory (tests/conftest.py). Shared memory is everybody's
in one place, so there is looked for what nobody has any more.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private import state

from distill.sandbox import bounded_calls

MARK = "ISOTHERM_TEST"
# Against hangs: time for processes and files to disappear.
_GONE_WITHIN_S = 90.0
_POLL_S = 0.1
# Ray's own; if their raylet was killed, they retry their head for a minute before they end.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Named by maker: tensors that torch processes share. A helper of torch removes them, but it does
# not outlive a killed actor.
_BY_PID = re.compile(r"(?:torch|sgl_shm_.+)_(\d+)_")
# Named semaphores and memory of multiprocessing, and SGLang's.
_MAPPED = re.compile(r"sem\.|psm_|sglang_|.*isotherm-")
_SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def nothing_left_over(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail a test that leaves processes, actors, shared memory or temporary files."""
    mark = f"{os.getpid()}-{request.node.nodeid}"
    monkeypatch.setenv(MARK, mark)
    shared, files, actors = shared_memory(), temporary_files(), set(living_actors())
    yield
    left = gone(lambda: marked(mark))
    described = [described_process(process) for process in left]
    for process in left:  # so that they do not slow down the next tests
        with suppress(psutil.Error):
            process.kill()
    assert not left, f"processes live on: {described}"
    left = gone(lambda: living_actors().keys() - actors)
    assert not left, f"actors live on: {[living_actors().get(each) for each in left]}"
    left = gone(lambda: abandoned(shared_memory() - shared))
    assert not left, f"shared memory of processes that are no more: {left}"
    left = gone(lambda: temporary_files() - files)
    assert not left, f"temporary files in {tempfile.gettempdir()}: {left}"


def gone(left: Callable[[], set[Any]]) -> set[Any]:
    """Remaining names after the deadline; empty if all disappeared."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (there := left()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return there


def marked(mark: str) -> set[psutil.Process]:
    """Running processes that carry the mark, except this one."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (
                process.environ().get(MARK) == mark
                and process.pid != os.getpid()
                and process.name() not in _AGENTS
                and not _is_kept(process)
                and is_alive(process)
            ):
                found.add(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    """True if the process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_kept(process: psutil.Process) -> bool:
    """True if this process keeps it for later calls, and it dies with this process.

    Such are a child of distill/sandbox/bounded_calls.py with its guard, and a service of wandb.
    """
    command = " ".join(process.cmdline())
    ours = os.getpid() in (parent.pid for parent in process.parents())
    return ours and ("wandb" in command or bounded_calls.__name__ in command)


def living_actors() -> dict[str, str]:
    """Classes of the actors of this process's Ray, by id; empty without Ray."""
    if not ray.is_initialized():
        return {}
    actors = state.actors()
    return {i: a["ActorClassName"] for i, a in actors.items() if a["State"] != "DEAD"}


def temporary_files() -> set[str]:
    """Names in the session's temporary directory, without W&B's files and uv's locks."""
    return {
        path.name
        for path in Path(tempfile.gettempdir()).iterdir()
        if "wandb" not in path.name and not _is_of_table(path) and not path.match("uv-*.lock")
    }


def _is_of_table(path: Path) -> bool:
    """True for a table's directory, which W&B removes when this process ends."""
    return path.is_dir() and {each.name for each in path.iterdir()} == {"rollouts.table.json"}


def shared_memory() -> set[str]:
    """Names in /dev/shm; empty where there is no /dev/shm."""
    return set(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else set()


def shared_memory_of(*pids: int) -> set[str]:
    """Names in /dev/shm that contain the id of one of these processes as a separate number.

    Other tests' processes make names of random letters and digits there, too.
    """
    ids = {str(pid) for pid in pids}
    return {name for name in shared_memory() if ids & {*re.split("[^0-9A-Za-z]", name)}}


def abandoned(names: set[str]) -> set[str]:
    """Names in /dev/shm whose maker has ended, or that no process has mapped."""
    by_pid = {name: int(made[1]) for name in names if (made := _BY_PID.match(name))}
    mapped = {name for name in names - by_pid.keys() if _MAPPED.match(name)}
    ended = {name for name, pid in by_pid.items() if not psutil.pid_exists(pid)}
    return ended | (_not_mapped(mapped) if mapped else set())


def _not_mapped(names: set[str]) -> set[str]:
    # By inode: a semaphore was mapped under another name, before it had this one.
    used = {inode for pid in psutil.pids() for inode in mapped_inodes(pid)}
    there = [entry for entry in os.scandir(_SHARED_MEMORY) if entry.name in names]
    return {entry.name for entry in there if entry.inode() not in used}


def mapped_inodes(pid: int) -> set[int]:
    """Inodes that a process has mapped from /dev/shm."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        return {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}
    return set()


def described_process(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    return str(process.pid)
