"""Calls that do not end, that end everything, and those after them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.sandbox import bounded_calls as bounded
from distill.sandbox.bounded_calls import OverLimit, in_child, in_thread
from distill.sandbox.seccomp import filter_program
from tests.leftovers import gone, mapped_inodes


def nothing() -> None:
    """What a child prepares."""


def end(exit_code: int) -> None:
    os._exit(exit_code)


def connect(address: tuple[str, int]) -> None:
    socket.create_connection(address, 5)


def test_a_child_answers_and_raises() -> None:
    assert in_child(nothing, divmod, 7, 2, timeout_s=60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_child(nothing, divmod, 7, 0, timeout_s=60)


def test_a_child_that_is_over_its_limit_is_ended_and_another_made() -> None:
    with pytest.raises(OverLimit, match="over 1 s"):
        in_child(nothing, time.sleep, 600, timeout_s=1)
    with pytest.raises(OverLimit, match="4 GiB"):
        in_child(nothing, bytes, 5 << 30, timeout_s=60)
    with pytest.raises(OverLimit):
        in_child(nothing, end, 3, timeout_s=60)
    assert in_child(nothing, divmod, 7, 2, timeout_s=60) == (3, 1)


CALLER = """
import sys
from distill.sandbox.bounded_calls import in_child

if __name__ == "__main__":
    print(in_child(int, divmod, 7, 2, timeout_s=60), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in the file system")
def test_a_caller_killed_with_its_process_group_leaves_no_semaphore(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    caller = subprocess.Popen(
        [sys.executable, str(tmp_path / "caller.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert caller.stdout is not None
    assert caller.stdout.readline() == "(3, 1)\n"
    mapped = mapped_inodes(caller.pid)
    there = [Path(entry) for entry in os.scandir("/dev/shm") if entry.inode() in mapped]
    assert there
    os.killpg(caller.pid, signal.SIGKILL)
    caller.communicate()
    assert not gone(lambda: {path for path in there if path.exists()})


@pytest.mark.skipif(not filter_program(), reason="no filter for this machine")
def test_a_child_has_no_sockets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(OSError, match="Address family not supported"),
    ):
        in_child(nothing, connect, server.getsockname(), timeout_s=60)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A thread of the test's own; what hangs waits for the event, which is set at the end."""
    monkeypatch.setattr(bounded, "_caller", bounded._Caller())
    over = threading.Event()
    yield over
    over.set()


def test_calls_share_one_thread(calls: threading.Event) -> None:
    threads = {in_thread(threading.get_ident, timeout_s=60) for _ in range(3)}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_thread_that_is_late_is_given_up(calls: threading.Event) -> None:
    with pytest.raises(OverLimit, match=r"over 0\.1 s"):
        in_thread(calls.wait, timeout_s=0.1)
    assert in_thread(divmod, 7, 2, timeout_s=60) == (3, 1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_a_thread_raises_is_raised(calls: threading.Event, error: type) -> None:
    def fail() -> None:
        raise error("no")

    with pytest.raises(error, match="no"):
        in_thread(fail, timeout_s=60)
    assert in_thread(divmod, 7, 2, timeout_s=60) == (3, 1)


def test_threads_that_still_run_are_counted(calls: threading.Event) -> None:
    for _ in range(4):
        with pytest.raises(OverLimit, match="over"):
            in_thread(calls.wait, timeout_s=0.05)
    with pytest.raises(OverLimit, match="4 earlier calls that were too late still run"):
        in_thread(divmod, 7, 2, timeout_s=60)
    late = [hand.thread for hand in bounded._caller._given_up]
    calls.set()
    for thread in late:
        thread.join(60)
        assert not thread.is_alive()
    assert in_thread(divmod, 7, 2, timeout_s=60) == (3, 1)
