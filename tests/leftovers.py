"""What a test leaves on the machine: processes, actors and shared memory of its runs.

Only what carries the test's own mark is looked at, so that tests may run side by side: processes
inherit it in their environment, whoever starts them and whatever becomes of their parents. With the
processes go their ports. A shared Ray's processes are older than the mark; of those, actors count.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.e2e.scaling_cluster import is_alive

MARK = "ISOTHERM_TEST"
# Against hangs: what is ending is waited for so long.
_GONE_WITHIN_S = 90.0
_POLL_S = 0.1
# Ray's own: where a raylet was killed they try to tell its head for a minute, and end.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# What torch makes for tensors that processes share, by the process that made it; it stays there
# until a helper of torch's removes it, which does not outlive an actor that is killed.
_SHARED = re.compile(r"torch_(\d+)_")


@pytest.fixture(autouse=True)
def nothing_left_over(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fails a test that leaves anything of its runs behind."""
    mark = f"{os.getpid()}-{request.node.nodeid}"
    monkeypatch.setenv(MARK, mark)
    shared, actors = abandoned_memory(), set(living_actors())
    yield
    left = gone(lambda: marked(mark))
    described = [_described(process) for process in left]
    for process in left:  # they would take the next tests' time
        with suppress(psutil.Error):
            process.kill()
    assert not left, f"processes live on: {described}"
    left = gone(lambda: living_actors().keys() - actors)
    assert not left, f"actors live on: {[living_actors().get(each) for each in left]}"
    left = gone(lambda: abandoned_memory() - shared)
    assert not left, f"shared memory of processes that are no more: {left}"


def gone(left: Callable[[], set[Any]]) -> set[Any]:
    """What is still there after a patient wait; empty if it went."""
    deadline = time.monotonic() + _GONE_WITHIN_S
    while (there := left()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return there


def marked(mark: str) -> set[psutil.Process]:
    """Processes, but this one, that carry the mark and still do anything."""
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


def _is_kept(process: psutil.Process) -> bool:
    """Whether this very process keeps it for its next call, and it dies with us: of code that is
    not trusted (distill/sandbox/bounded_calls.py), or of wandb."""
    command = " ".join(process.cmdline())
    return process.ppid() == os.getpid() and ("multiprocessing" in command or "wandb" in command)


def living_actors() -> dict[str, str]:
    """Classes of the actors of this process's Ray, by id; none without one."""
    if not ray.is_initialized():
        return {}
    actors = ray._private.state.actors()
    return {i: a["ActorClassName"] for i, a in actors.items() if a["State"] != "DEAD"}


def abandoned_memory() -> set[str]:
    """Names in /dev/shm of processes that have ended."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    found = ((name, _SHARED.match(name)) for name in names)
    return {name for name, by in found if by and not psutil.pid_exists(int(by[1]))}


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    return str(process.pid)
