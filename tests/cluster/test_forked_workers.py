"""Forked workers: a fork equals a process that Python starts, and ends with its stand-in."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.placement import fork_server
from cluster.placement.forked_workers import SETTING
from tests.waiting import DEADLINE_S, until

TELL = """
import json, os, random, signal, sys, tempfile
loaded = "torch" in sys.modules
import torch
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "name": __name__, "file": __file__,
    "environment": dict(os.environ), "niceness": os.nice(0), "input": sys.stdin.read(),
    "temporary": tempfile.gettempdir(), "threads": torch.get_num_threads(),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "own": {"loaded": loaded, "pid": os.getpid(), "random": random.random()},
}), flush=True)
exec(sys.argv[1])
"""


START = """
import os, sys
from cluster.placement import forked_workers
forked_workers.no_gpu_here = lambda: True
parent = forked_workers.parent_of_workers()
parent.start()
print(os.environ[forked_workers.SETTING], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Socket of the parent of this session, or of one that the test starts."""
    if os.environ.get(SETTING, "off") != "off":
        yield os.environ[SETTING]
        return
    plain = {name: value for name, value in os.environ.items() if name != SETTING}
    parent = subprocess.Popen(
        [sys.executable, "-c", START], env=plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdin is not None and parent.stdout is not None
        yield parent.stdout.readline().decode().strip()
        parent.stdin.close()


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A program at the path of Ray's workers."""
    path = tmp_path / "ray" / "_private" / "workers" / "default_worker.py"
    path.parent.mkdir(parents=True)
    path.write_text(TELL)
    return path


def begin(worker: Path, address: str, code: str) -> subprocess.Popen[bytes]:
    """Start the program as Ray would, by a stand-in of the parent at `address`."""
    command = [sys.executable, "-IS", fork_server.__file__, address]
    return subprocess.Popen(
        [*command, str(worker), code], cwd=worker.parent,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": "/one:/other"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip


def facts_of(process: subprocess.Popen[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts that all starts share, and facts of this process."""
    assert process.stdout is not None
    line = json.loads(process.stdout.readline())
    return line, line.pop("own")


def test_a_fork_equals_a_process_that_python_starts(worker: Path, address: str) -> None:
    forks = [begin(worker, address, "0") for _ in range(2)]
    plain = begin(worker, "/nobody/answers", "0")
    (fork, own), (_, other), (process, plain_own) = map(facts_of, [*forks, plain])
    assert fork == process
    assert own["loaded"] and not plain_own["loaded"]
    assert own["random"] != other["random"]
    assert plain_own["pid"] == plain.pid  # it replaced the stand-in
    assert [each.wait(DEADLINE_S) for each in (*forks, plain)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("code", "status"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("1 / 0", 1)],
)
def test_a_stand_in_has_the_exit_status_of_its_fork(
    worker: Path, address: str, code: str, status: int
) -> None:
    assert begin(worker, address, code).wait(DEADLINE_S) == status


def test_a_stopped_fork_ends_with_its_stand_in(worker: Path, address: str) -> None:
    process = begin(worker, address, "os.kill(os.getpid(), signal.SIGSTOP)")
    fork = psutil.Process(facts_of(process)[1]["pid"])
    until(lambda: fork.status() == psutil.STATUS_STOPPED)
    process.kill()
    until(lambda: not fork.is_running())


def test_a_fork_ends_with_a_stand_in_that_was_killed_before_its_answer(
    worker: Path, address: str
) -> None:
    request = {
        "arguments": [str(worker), "import time; time.sleep(1000)"],
        "environment": dict(os.environ), "directory": str(worker.parent), "niceness": 0,
    }  # fmt: skip
    body, (output, its_output) = json.dumps(request).encode(), os.pipe()
    with socket.socket(socket.AF_UNIX) as channel, open(os.devnull) as null:
        channel.connect(address)
        size = len(body).to_bytes(8, "little")
        socket.send_fds(channel, [size], [null.fileno(), its_output, its_output])
        channel.sendall(body)
        os.close(its_output)
        with open(output) as lines:
            fork = psutil.Process(json.loads(lines.readline())["own"]["pid"])
        channel.recv(1, socket.MSG_PEEK)  # the answer is there, and stays unread
    until(lambda: not fork.is_running())


def test_workers_of_this_machine_s_ray_are_forks(ray_cluster: None) -> None:
    class Actor:
        def imported(self) -> bool:
            return "torch" in sys.modules

        def pid(self) -> int:
            return os.getpid()

    actor: Any = ray.remote(num_cpus=0)(Actor).remote()
    forked = os.environ.get(SETTING, "off") != "off"
    assert ray.get(actor.imported.remote()) == forked
    process = psutil.Process(ray.get(actor.pid.remote()))
    process.suspend()
    ray.kill(actor)
    until(lambda: not process.is_running())
