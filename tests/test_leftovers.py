"""Detection of what tests leave behind."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leftovers import MARK, abandoned, gone, marked, shared_memory
from tests.waiting import DEADLINE_S, until

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                         stdin=sys.stdin, stdout=subprocess.DEVNULL, start_new_session=True)
print(child.pid, flush=True)
"""


def test_an_orphaned_process_is_found_by_its_mark() -> None:
    mark = f"planted-{os.getpid()}"
    reading, writing = os.pipe()
    made = subprocess.run(
        [sys.executable, "-c", ORPHAN], env={**os.environ, MARK: mark}, stdin=reading,
        stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    os.close(reading)
    until(lambda: marked(mark), failing="it is not found")  # its start may not have ended yet
    [orphan] = marked(mark)
    assert orphan.pid == int(made.stdout) and marked("another") == set()
    os.close(writing)  # its input ends, and so does it
    assert gone(lambda: marked(mark)) == set()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in the file system")
def test_memory_of_a_process_that_has_ended_is_found() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=DEADLINE_S)
    there = [Path(f"/dev/shm/torch_{pid}_planted") for pid in (ended.pid, os.getpid())]
    try:
        for path in there:
            path.touch()
        assert abandoned({path.name for path in there}) == {there[0].name}
    finally:
        for path in there:
            path.unlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in the file system")
def test_an_unused_semaphore_is_found() -> None:
    before = shared_memory()
    kept = multiprocessing.get_context("spawn").Lock()
    mine = {name for name in shared_memory() - before if name.startswith("sem.")}
    planted = Path(f"/dev/shm/sem.planted-{os.getpid()}")
    try:
        planted.touch()
        assert mine and not mine & abandoned(mine)
        assert planted.name in abandoned(shared_memory() - before)
    finally:
        planted.unlink()
    del kept
