"""Rewards that fail, are slow, or wait for events of their run; a slow loss."""

import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor


def refuses_zero(response: str, answer: str) -> float:
    """Raise for prompts whose answer is 0."""
    if answer == "0":
        raise ValueError("a prompt that answers 0")
    return float(answer in response)


def broken(response: str, answer: str) -> float:
    """Raise for all prompts."""
    return len(response) / 0


def kills_at_zero(response: str, answer: str) -> float:
    """End the process for prompts whose answer is 0, like a segmentation fault."""
    if answer == "0":
        os._exit(3)
    return float(answer in response)


# In the run's environment: the file's path.
LOAD_FILE = "ISOTHERM_TEST_LOAD"


def slow(response: str, answer: str) -> float:
    """Sleep for the seconds in the file; reward even digits, so that rewards differ."""
    load = Path(os.environ[LOAD_FILE])
    if load.exists():
        time.sleep(float(load.read_text()))
    return float(len(response) % 2)


def slow_loss(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    """loss=importance_sampling that takes as long as a large model's."""
    time.sleep(1.0)
    return -(logprobs_N - old_N).exp() * advantages_N


def patient(response: str, answer: str) -> float:
    """Wait for an event of the run; reward even digits, so that rewards differ.

    An answer is `out|KIND`: the run's directory, and an event after the first evaluation began,
    `back` (the evaluation engine was restarted), or `none`.
    """
    out, _, kind = answer.partition("|")
    while not _ready(kind, _events(Path(out))):
        time.sleep(0.02)
    return float(len(response) % 2)


def _events(out: Path) -> list[dict[str, Any]]:
    lines = (out / "events.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _ready(kind: str, events: list[dict[str, Any]]) -> bool:
    if kind == "none":
        return True
    kinds = [event["event"] for event in events]
    if "evaluation begins" not in kinds or "evaluation given up" in kinds:
        return True
    if kind == "back":  # the evaluation engine has died, and was started again
        ours = [e["event"] for e in events if e.get("who") == "evaluation engine 0"]
        return ours.count("start") == 2
    return kind in kinds[kinds.index("evaluation begins") :]
