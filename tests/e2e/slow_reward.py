"""A reward that is slow while a file exists, as a sandboxed check is under load; a slow loss."""

import os
import time
from pathlib import Path

from torch import Tensor

# In the run's environment: the file's path.
LOAD_FILE = "ISOTHERM_TEST_LOAD"


def reward(response: str, answer: str) -> float:
    """Sleep for the seconds in the file; reward even digits, so that rewards differ."""
    load = Path(os.environ[LOAD_FILE])
    if load.exists():
        time.sleep(float(load.read_text()))
    return float(len(response) % 2)


def loss(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    """loss=importance_sampling that takes as long as a large model's."""
    time.sleep(1.0)
    return -(logprobs_N - old_N).exp() * advantages_N
