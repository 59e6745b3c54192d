"""Runs of the project's commands as processes, and reading of what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import require


def command(deadline_s: float, module: str, *words: str, **settings: Any) -> None:
    """Run a module of the project with its output in the check's log; it must exit with 0."""
    arguments = [*words, *(f"{name}={value}" for name, value in settings.items())]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"}, timeout=deadline_s, check=False,
    )  # fmt: skip
    require(done.returncode == 0, f"{module} ended with {done.returncode}: the log says why")


def trained(deadline_s: float, out: Path, steps: int, **settings: Any) -> list[Mapping[str, Any]]:
    """Train with recipe=opd and audit the run; returns the metrics of each step."""
    command(deadline_s, "cluster.train", "recipe=opd", out=out, steps=steps, **settings)
    command(deadline_s, "cluster.audit", out=out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    made = [line for line in lines if "time/step" in line]
    require(len(made) == steps, f"{len(made)} steps of {steps}")
    return made
