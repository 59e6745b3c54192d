"""Temporary files of a server are removed with it, however it ends."""

import os
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.leftovers import gone, is_alive

# A server by its outlines: files, a process that nobody ends, and a copy of the server itself.
SERVER = """
import os, subprocess, sys, time
from actors.sglang.private_files import private_directory

directory = private_directory()
(directory / "socket").touch()
if os.path.isdir("/dev/shm"):
    open(f"/dev/shm/sem.{directory.name}-planted", "x").close()
    open(f"/dev/shm/sgl_shm_mq_{os.getpid()}_planted", "x").close()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         env={**os.environ, "TMPDIR": str(directory)}, start_new_session=True)
if not (copy := os.fork()):
    os.closerange(0, 2)
    time.sleep(600)
print(directory, child.pid, copy, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["of itself", "killed with its process group"])
def test_files_and_processes_go_when_the_server_has_ended(end: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    name, pid, copy = server.stdout.readline().split()
    directory, child = Path(name), psutil.Process(int(pid))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and (directory / "socket").exists()

    def left() -> set[str]:
        shared = Path("/dev/shm").iterdir() if Path("/dev/shm").is_dir() else []
        marks = (directory.name, f"_{server.pid}_planted")
        names = {path.name for path in shared if any(mark in path.name for mark in marks)}
        return names | {str(directory)} if directory.exists() else names

    assert len(left()) in (1, 3)
    try:
        if end == "of itself":
            server.stdin.close()
        else:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        assert not gone(left), "the cleaner still waits, for the copy?"
        assert not is_alive(child)
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(copy), signal.SIGKILL)
        server.stdout.close()


def test_a_long_path_is_not_for_sockets(tmp_path: Path) -> None:
    """A unix socket's address has 107 bytes."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    program = "from actors.sglang.private_files import *; print(private_directory())"
    made = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(long)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    directory = Path(made.stdout.strip())
    assert directory.parent == Path("/tmp")
    assert not gone(lambda: {directory} if directory.exists() else set())
