"""`python -m tests.slow_tier [SECONDS]`: the tests marked slow, file by file.

With a number no file is begun after so many seconds, and which comes first depends on the commit:
so each has its turn where there is no time for all. A file that fails is run once more, for these
tests kill processes at random and share the machine: what passes then is named as unsteady, and
what fails twice fails the tier. What is left out, or not done soon after, is named too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-m", "slow")
# What was begun in time may go on for so long afterwards.
GRACE_S = 8 * 60.0
NO_LIMIT_S = 24 * 3600.0


def slow_files() -> list[str]:
    """Those with a test that is marked slow, in order of name."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600,
    ).stdout  # fmt: skip
    return sorted({line.partition("::")[0] for line in listed.splitlines() if "::" in line})


def rotated(files: Sequence[str], commit: str) -> list[str]:
    """From another one on at each commit."""
    first = int(commit, 16) % len(files)
    return [*files[first:], *files[:first]]


def run(file: str, limit_s: float) -> int | None:
    """pytest's exit code; None if it was not done in time."""
    process = subprocess.Popen([*PYTEST, file], cwd=REPOSITORY, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        return None


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    limit_s = float(argv[0]) if argv else NO_LIMIT_S
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    began = time.monotonic()
    failed, unsteady, left_out = [], [], []
    for file in rotated(slow_files(), commit.stdout.strip()[:8]):
        left_s = limit_s - (time.monotonic() - began)
        code = run(file, left_s + GRACE_S) if left_s > 0 else None
        if code is None:
            left_out.append(file)
        elif code:
            print(f"slow tier: {file} failed, and is run once more", flush=True)
            (failed if run(file, GRACE_S) else unsteady).append(file)
    print(
        f"slow tier: left out for lack of time: {left_out or 'none'}; "
        f"unsteady: {unsteady or 'none'}; failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
