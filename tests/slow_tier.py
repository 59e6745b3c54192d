"""`python -m tests.slow_tier [FILES]`: run the slow tests of these files, or of all, file by file.

A file that fails is run once more, because these tests kill processes at random and share the
machine. If it passes then, it is reported as unsteady; if it fails again, the tier fails.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-m", "slow", "--durations=5")
# A file that takes longer hangs.
DEADLINE_S = 30 * 60.0


def slow_files() -> list[str]:
    """Files with a test that is marked slow, sorted."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600,
    ).stdout  # fmt: skip
    return sorted({line.partition("::")[0] for line in listed.splitlines() if "::" in line})


def passes(file: str) -> bool:
    """True if pytest ends in time, with exit code 0."""
    process = subprocess.Popen([*PYTEST, file], cwd=REPOSITORY, start_new_session=True)
    try:
        return process.wait(DEADLINE_S) == 0
    except subprocess.TimeoutExpired:
        print(f"slow tier: {file} hangs", flush=True)
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        return False


def main(files: Sequence[str]) -> int:
    """Run these files, or all; return the exit code."""
    failed, unsteady = [], []
    for file in files or slow_files():
        if passes(file):
            continue
        print(f"slow tier: {file} failed, and is run once more", flush=True)
        (unsteady if passes(file) else failed).append(file)
    print(f"slow tier: unsteady: {unsteady or 'none'}; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
