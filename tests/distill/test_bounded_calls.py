"""Calls that hang or end their process, and the calls after them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distill.sandbox import bounded_calls as bounded
from distill.sandbox.bounded_calls import OverLimit, in_child, in_thread
from distill.sandbox.seccomp import filter_program
from tests.leftovers import gone, mapped_inodes


def nothing() -> None:
    """Preparation of a child."""


def end(exit_code: int) -> None:
    os._exit(exit_code)


def connect(address: tuple[str, int]) -> None:
    socket.create_connection(address, 5)


def test_a_child_answers_and_raises() -> None:
    assert in_child(nothing, divmod, 7, 2, timeout_s=60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_child(nothing, divmod, 7, 0, timeout_s=60)


def test_a_child_that_is_over_its_limit_is_ended_and_another_made() -> None:
    with pytest.raises(OverLimit):
        in_child(nothing, time.sleep, 600, timeout_s=1)
    with pytest.raises(OverLimit):
        in_child(nothing, bytes, 5 << 30, timeout_s=60)
    with pytest.raises(OverLimit):
        in_child(nothing, end, 3, timeout_s=60)
    assert in_child(nothing, divmod, 7, 2, timeout_s=60) == (3, 1)


# A script as README writes them, without `if __name__ == "__main__"`.
CALLER = """
import sys
from distill.sandbox.bounded_calls import in_child

print(in_child(int, divmod, 7, 2, timeout_s=60), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "caller.py").write_text(CALLER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "caller.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:  # fmt: skip
        yield process
        process.kill()


def test_a_script_is_not_run_again_by_its_child(caller: subprocess.Popen[str]) -> None:
    assert caller.communicate("")[0] == "(3, 1)\n"
    assert caller.returncode == 0


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in the file system")
def test_a_killed_caller_leaves_neither_child_nor_semaphore(caller: subprocess.Popen[str]) -> None:
    assert caller.stdout is not None
    assert caller.stdout.readline() == "(3, 1)\n"
    started = {psutil.Process(caller.pid), *psutil.Process(caller.pid).children(recursive=True)}
    shared = set().union(*(mapped_inodes(process.pid) for process in started))
    assert not [entry for entry in os.scandir("/dev/shm") if entry.inode() in shared]
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait()
    assert len(started) > 1
    assert not gone(lambda: {process for process in started if process.is_running()})


def fail_to_prepare() -> None:
    raise ImportError("no such module")


def test_a_child_that_cannot_be_prepared_is_an_error() -> None:
    with pytest.raises(ImportError):
        in_child(fail_to_prepare, divmod, 7, 2, timeout_s=60)


def exit_while_preparing() -> None:
    os._exit(3)


def test_a_child_that_ends_at_its_start_is_no_call_over_its_limit() -> None:
    with pytest.raises(RuntimeError):
        in_child(exit_while_preparing, divmod, 7, 2, timeout_s=60)


def test_a_fork_has_a_child_of_its_own() -> None:
    child = in_child(nothing, os.getpid, timeout_s=60)
    forked = os.fork()
    if forked == 0:
        os._exit(in_child(nothing, os.getpid, timeout_s=60) == child)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert in_child(nothing, os.getpid, timeout_s=60) == child


@pytest.mark.skipif(not filter_program(), reason="no filter for this machine")
def test_a_child_has_no_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError):
        in_child(nothing, connect, server.getsockname(), timeout_s=60)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Separate thread; hanging calls wait for the event, which is set at the end."""
    monkeypatch.setattr(bounded, "_caller", bounded._Caller())
    over = threading.Event()
    yield over
    over.set()


def test_calls_share_one_thread(calls: threading.Event) -> None:
    threads = {in_thread(threading.get_ident, timeout_s=60) for _ in range(3)}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_late_thread_is_abandoned(calls: threading.Event) -> None:
    with pytest.raises(OverLimit):
        in_thread(calls.wait, timeout_s=0.1)
    assert in_thread(divmod, 7, 2, timeout_s=60) == (3, 1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_an_error_of_the_thread_is_raised(calls: threading.Event, error: type) -> None:
    def fail() -> None:
        raise error("no")

    with pytest.raises(error):
        in_thread(fail, timeout_s=60)
    assert in_thread(divmod, 7, 2, timeout_s=60) == (3, 1)
