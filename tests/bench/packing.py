"""What packing saves: padding, and seconds of a step, with and without it in one process.

    python -m tests.bench.packing DIR

A random model of hidden size 128 and 4 layers, one thread, interleaved steps of two learners on the
same rows of made-up lengths (log-normal).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.objective.batching import TrainingRow
from learner.config import LearnerConfig
from learner.learner import Learner, Part
from learner.policy_loss import cross_entropy_loss
from tests.samples import demonstration
from tests.tiny import tiny_model_dir

STEPS = 8
# Rows of a step, their median length, the standard deviation of its logarithm.
WORKLOADS = ((32, 60, 0.7), (32, 200, 0.7), (128, 200, 0.7), (32, 200, 1.2))
LONGEST = 2048


def made_rows(count: int, length: int, spread: float) -> list[TrainingRow]:
    """Rows of a short prompt."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(length), spread, count), LONGEST - 8).astype(int)
    return [demonstration(8, max(1, int(n)), seed=i) for i, n in enumerate(lengths)]


def measure(model: str, rows: list[TrainingRow]) -> tuple[float, float, float]:
    """Padding share without packing; seconds of a step without and with it."""
    learners = [
        Learner(
            LearnerConfig(
                model=model, total_steps=STEPS + 1, device="cpu", threads=1, packing=packs
            ),
            str(Path(model).parent / "failed"),
        )
        for packs in (False, True)
    ]
    part, share = Part(rows_D=rows, loss=cross_entropy_loss), 0.0
    seconds: list[list[float]] = [[], []]
    for _ in range(STEPS + 1):
        for learner, taken in zip(learners, seconds, strict=True):
            made = learner.step(part)
            share = max(share, made["train/padding_share"])
            taken.append(made["time/forward"] + made["time/backward"])
    padded, packed = (median(taken[1:]) for taken in seconds)  # the first warms up
    return share, padded, packed


def packing_table(directory: Path) -> Table:
    model = tiny_model_dir(
        directory, seed=0, hidden_size=128, layers=4, heads=4, context_length=LONGEST
    )
    table = Table("rows", "median length", "spread", "padding", "s/step", "packed", "ratio")
    for count, length, spread in WORKLOADS:
        share, padded, packed = measure(model, made_rows(count, length, spread))
        table.add_row(
            str(count), str(length), str(spread), f"{share:.1%}",
            f"{padded:.3f}", f"{packed:.3f}", f"{packed / padded:.2f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    Console().print(packing_table(Path(sys.argv[1])))
