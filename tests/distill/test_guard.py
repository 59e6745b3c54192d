"""The guard of a program, as the starters of processes that we use start it."""

import subprocess
import sys

from distill.sandbox.guard import guarded, lifeline


def test_a_program_may_be_started_by_what_runs_hooks_of_forks_first() -> None:
    """So uvloop does, and CPython with a `preexec_fn`."""
    started = subprocess.run(
        guarded([sys.executable, "-c", "print('started')"]), start_new_session=True,
        pass_fds=(lifeline(),), preexec_fn=lambda: None, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (started.returncode, started.stdout) == (0, "started\n"), started.stderr
