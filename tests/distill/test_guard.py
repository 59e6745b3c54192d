"""The guard of a program, with the process starters in use."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from distill.sandbox.guard import guarded, lifeline
from tests.leftovers import is_alive
from tests.waiting import DEADLINE_S, until


def test_a_program_starts_with_fork_hooks() -> None:
    """uvloop runs them, and CPython with a `preexec_fn`."""
    started = subprocess.run(
        guarded([sys.executable, "-c", "print('started')"]), start_new_session=True,
        pass_fds=(lifeline(),), preexec_fn=lambda: None, capture_output=True, text=True,
        timeout=DEADLINE_S,
    )  # fmt: skip
    assert (started.returncode, started.stdout) == (0, "started\n"), started.stderr


# Starts a guarded program, says so, and waits to be killed.
STARTER = """
import subprocess, sys, time
from distill.sandbox.guard import guarded, lifeline
subprocess.Popen(
    guarded([sys.executable, "-c", sys.argv[1]], scratch=sys.argv[2]), start_new_session=True,
    pass_fds=(lifeline(),),
)
time.sleep(1000)
"""
# Leaves its session to a child, and waits too.
PROGRAM = """
import subprocess, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("started", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("children_first", [False, True])
def test_a_killed_starter_leaves_nothing(tmp_path: Path, children_first: bool) -> None:
    """With its children, as Ray's workers are killed, or alone."""
    scratch = tmp_path / "scratch"
    command = [sys.executable, "-c", STARTER, PROGRAM, str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None and starter.stdout.readline() == "started\n"
        process = psutil.Process(starter.pid)
        started = process.children(recursive=True)
        assert len(started) > 2 and scratch.is_dir()
        for child in process.children() if children_first else ():
            child.kill()
        starter.kill()
    until(lambda: not any(map(is_alive, started)))
    until(lambda: not scratch.exists())


def test_nothing_is_left_of_a_guard_that_is_killed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with subprocess.Popen(
        guarded([sys.executable, "-c", PROGRAM], scratch=str(scratch)), start_new_session=True,
        pass_fds=(lifeline(),), stdout=subprocess.PIPE, text=True,
    ) as front:  # fmt: skip
        assert front.stdout is not None and front.stdout.readline() == "started\n"
        [guard] = psutil.Process(front.pid).children()
        started = guard.children(recursive=True)
        assert len(started) == 2 and scratch.is_dir()
        guard.kill()
    assert front.returncode == -signal.SIGKILL
    assert not any(map(is_alive, started)) and not scratch.exists()
