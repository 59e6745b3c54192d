"""The head of a Ray that a run starts ends with its driver, even if Ray hangs."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cluster.placement.forked_workers import SETTING
from tests.waiting import DEADLINE_S, until

HEAD = """
import sys
from cluster.placement import local_head
local_head.START_S, local_head.END_S = map(int, sys.argv[1:])
local_head.run_head(1)
"""


def head(start_s: int, end_s: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD, str(start_s), str(end_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def raylets(head: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Raylets among the head's children, some of which may have ended."""
    found = []
    for child in psutil.Process(head.pid).children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                found.append(child)
    return found


def test_a_ray_that_does_not_start_ends_without_output() -> None:
    with head(1, 30) as process:
        assert process.wait(DEADLINE_S) == -signal.SIGALRM
        assert process.stdout is not None and process.stdout.read() == b""


@pytest.mark.slow
def test_a_ray_that_hangs_is_killed_with_its_head() -> None:
    with head(180, 2) as process:
        assert process.stdin is not None and process.stdout is not None
        assert "address" in json.loads(process.stdout.readline())
        [raylet] = raylets(process)
        raylet.suspend()
        started = psutil.Process(process.pid).children()
        process.stdin.close()  # the driver has ended
        assert process.wait(DEADLINE_S) == -signal.SIGALRM
    _, alive = psutil.wait_procs(started, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.slow
def test_a_start_ends_without_output_if_its_driver_has_ended() -> None:
    program = [sys.executable, "-c", HEAD, "180", "60"]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        until(lambda: raylets(process) or process.poll() is not None)
        [raylet] = raylets(process)  # the head waits for it
        raylet.suspend()
        started = psutil.Process(process.pid).children()
        process.stdin.close()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == -signal.SIGALRM
        assert process.stderr.read() == b""
    _, alive = psutil.wait_procs(started, timeout=DEADLINE_S)
    assert not alive


COMMAND = """
import sys
from cluster.command import run_and_report
from cluster.placement.local_head import local_head

def run(console):
    with local_head(1):
        sys.stdin.read()

sys.exit(run_and_report(run))
"""


def test_a_signal_during_the_start_ends_the_command_and_leaves_no_file() -> None:
    with tempfile.TemporaryDirectory() as directory:
        environment = {name: value for name, value in os.environ.items() if name != SETTING}
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            env={**environment, "TMPDIR": directory},
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            until(lambda: psutil.Process(process.pid).children() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)  # during the imports of the workers' parent
            _, printed = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 128 + signal.SIGTERM
        assert signal.SIGTERM.name in printed.decode()
        assert not list(Path(directory).glob("isotherm-fork-*"))
