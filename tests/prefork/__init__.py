"""Ray workers forked from a process that has imported what they need.

Most of what a small run costs is importing: each of its five or six processes takes some six
seconds of CPU for torch and transformers before it does anything. `parent.py` imports them once a
session; `sitecustomize.py`, which Python runs at its start wherever `start` has been called, asks
it for a fork in place of each Ray worker, and stands for that fork until it ends.

The slow tier goes without, as does `ISOTHERM_PREFORK=off`: there the workers start as users' do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = "ISOTHERM_PREFORK"
_HERE = Path(__file__).parent


def start() -> subprocess.Popen[bytes] | None:
    """Starts the parent of the session's Ray workers, which ends when its standard input closes.

    None if there is one already (in a worker of pytest-xdist), or shall be none.
    """
    if ADDRESS in os.environ:
        return None
    directory = tempfile.mkdtemp(prefix="isotherm-prefork-")
    address = os.path.join(directory, "socket")
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.prefork.parent", address],
        cwd=_HERE.parents[1],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[ADDRESS] = address
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{_HERE}{os.pathsep}{others}" if others else str(_HERE)
    return parent


def end(parent: subprocess.Popen[bytes]) -> None:
    """Ends it; its forks live as long as the Ray that asked for them."""
    assert parent.stdin is not None
    parent.stdin.close()
    parent.wait(60)
