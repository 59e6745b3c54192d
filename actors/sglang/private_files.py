"""Temporary files of one server: a directory and shared memory that go when the server has ended.

    launcher   `private_directory`: makes the directory and starts the keeper
    keeper     `python -m actors.sglang.private_files DIRECTORY PID`: reads a pipe that the kernel
               closes however the launcher ends; then it kills what is left of the server's
               processes, and removes the directory and what they left in /dev/shm

The keeper is no child of the server and has a session of its own. So it outlives SGLang's kill of
its children and Ray's kill of an actor's process group, by the moment that it needs.
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
# Of the 107 bytes of a unix socket's address; SGLang's own names in the directory are short.
_LONGEST_PARENT = 64
_SHARED_MEMORY = Path("/dev/shm")
# Names that SGLang and torch make from the process that made them.
_BY_PID = re.compile(r"(?:sgl_shm_.+|torch)_(\d+)_")
# How often the keeper notes who belongs to the server: for the names by process.
_NOTE_S = 5.0
_POLL_S = 0.02
# More than a start takes from fork to the end of exec; until then no environment names a directory.
_EXEC_S = 0.2


def private_directory() -> Path:
    """A new directory for this process and what it starts; removed after this process has ended.

    Who starts others sets TMPDIR to it: by that the keeper knows them, as far as it has not seen
    them as children of this process.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = "/tmp"
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    reading, writing = os.pipe()  # the other end closes with this process: no child has it
    os.register_at_fork(after_in_child=lambda: os.close(writing))
    subprocess.run(
        [sys.executable, "-m", __name__, str(directory), str(os.getpid())],
        stdin=reading, start_new_session=True, check=True,
    )  # fmt: skip
    os.close(reading)
    return directory


def kill(processes: Collection[psutil.Process]) -> None:
    """Kills processes; returns when they are gone, but for what nobody has waited for."""
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
    """The keeper. It goes on in a process that is nobody's child."""
    directory, server = Path(sys.argv[1]), psutil.Process(int(sys.argv[2]))
    # It ends with the server: what ends everything on a machine asks politely first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    family = _seen_until_the_end(server)
    kill([server])  # it is ending, if it has not ended
    _kill_all(directory, family - {server})
    time.sleep(_EXEC_S)  # one of them may just have been starting
    _kill_all(directory, family - {server})
    _remove_shared_memory(directory.name, {process.pid for process in family if not _runs(process)})
    shutil.rmtree(directory, ignore_errors=True)


def _seen_until_the_end(server: psutil.Process) -> set[psutil.Process]:
    """Returns the processes that the server was seen to have, itself too, when it has ended."""
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
    """Removes what carries the directory's name, or that of a process that has ended."""
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        made_by = _BY_PID.match(path.name)
        if name in path.name or (made_by and int(made_by[1]) in ended):
            with suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    main()
