"""A reward that is slow while a file exists, as a sandboxed check is under load."""

from __future__ import annotations

import os
import time
from pathlib import Path

# In the run's environment: the file's path.
LOAD_FILE = "ISOTHERM_TEST_LOAD"


def reward(response: str, answer: str) -> float:
    """Blocks for as many seconds as the file says. Even digits pay, so that rewards differ."""
    load = Path(os.environ[LOAD_FILE])
    if load.exists():
        time.sleep(float(load.read_text()))
    return float(len(response) % 2)
