"""A reward that waits for what its run writes down: an order of events, made sure of.

An answer is `out|KIND`, the run's directory and what to wait for there: an event that comes after
the first evaluation began, `back`, or nothing at all, `none`.
"""

import json
import time
from pathlib import Path
from typing import Any


def reward(response: str, answer: str) -> float:
    """Reward even digits, so that rewards differ."""
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
