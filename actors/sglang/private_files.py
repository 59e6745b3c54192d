"""Temporary files of one server: a directory and shared memory, removed when the server has ended.

    launcher   `private_directory`: creates the directory and starts the cleaner
    cleaner    `python -m actors.sglang.private_files DIRECTORY PID`: reads a pipe, which the kernel
               closes however the launcher ends; then kills the remaining processes of the server,
               and removes the directory and their files in /dev/shm

The cleaner is not a child of the server, and has its own session. So it survives when SGLang kills
its children or Ray kills an actor's process group, and can clean up afterwards.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

PREFIX = "isotherm-"
# Bytes. A unix socket's address has at most 107; SGLang's names in the directory are short.
_LONGEST_PARENT = 64
_SHARED_MEMORY = Path("/dev/shm")
# Names of shared memory that contain the id of the process of SGLang or torch that created it.
_BY_PID = re.compile(r"(?:sgl_shm_.+|torch)_(\d+)_")
# Seconds between the cleaner's lists of the server's processes, which it needs for these names.
_NOTE_S = 5.0
_POLL_S = 0.02
# Longer than a process takes from fork to the end of exec. Only then is its TMPDIR visible.
_EXEC_S = 0.2


def private_directory() -> Path:
    """Create a directory for this process and its children; removed after this process has ended.

    The caller must set TMPDIR to the directory before it starts processes. The cleaner recognises
    processes of the server by TMPDIR, in addition to those that it has seen as children.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    reading, writing = os.pipe()  # no child inherits `writing`: it closes with this process
    os.register_at_fork(after_in_child=lambda: os.close(writing))
    subprocess.run(
        [sys.executable, "-m", __name__, str(directory), str(os.getpid())],
        stdin=reading, start_new_session=True, check=True,
    )  # fmt: skip
    os.close(reading)
    return directory


def kill(processes: Collection[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended; zombies count as ended."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    while any(map(_runs, processes)):
        time.sleep(_POLL_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> None:
    """Run the cleaner, in a forked process that is not a child of the server."""
    directory, server = Path(sys.argv[1]), psutil.Process(int(sys.argv[2]))
    # The cleaner must outlive the server. A shutdown of the machine sends these signals first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    family = _wait_for_end(server)
    kill([server])  # it has closed the pipe, but may not have ended yet
    _kill_all(directory, family - {server})
    time.sleep(_EXEC_S)  # a process may have been between fork and exec
    _kill_all(directory, family - {server})
    _remove_shared_memory(directory.name, {process.pid for process in family if not _runs(process)})
    shutil.rmtree(directory, ignore_errors=True)


def _wait_for_end(server: psutil.Process) -> set[psutil.Process]:
    """Wait for the server's end, and return the processes seen until then, the server included."""
    family = {server}
    while not select.select([0], [], [], _NOTE_S)[0]:
        with suppress(psutil.Error):
            family |= set(server.children(recursive=True))
    return family


def _kill_all(directory: Path, family: set[psutil.Process]) -> None:
    while left := [*_started_with(directory), *filter(_runs, family)]:
        kill(left)


def _started_with(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(directory):
                found.append(process)
    return found


def _remove_shared_memory(name: str, ended: set[int]) -> None:
    """Remove shared memory named after the directory, or after a process that has ended."""
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        made_by = _BY_PID.match(path.name)
        if name in path.name or (made_by and int(made_by[1]) in ended):
            with suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    main()
