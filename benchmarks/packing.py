"""Effect of packing on padding and on the seconds of a step, measured in one process.

    python -m benchmarks.packing DIR

A random model of hidden size 128 and 4 layers, one thread, alternating steps of two learners on the
same rows of generated lengths (log-normal): demonstrations, and rollouts, whose groups share a
prompt. Seconds are CPU time, so that other load on the machine does not count.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from tests.samples import demonstration, training_row
from tests.tiny import VOCAB_SIZE, tiny_model_dir

STEPS = 8
# Rows of a step, their median length, the standard deviation of its logarithm.
WORKLOADS = ((32, 60, 0.7), (32, 200, 0.7), (128, 200, 0.7), (32, 200, 1.2))
# The same of responses; prompts of a step, tokens of each, samples of each.
ROLLOUTS = ((8, 64, 4, 64, 0.0), (8, 64, 4, 64, 0.7), (8, 200, 4, 200, 0.7), (4, 64, 8, 200, 1.2))
LONGEST = 2048
ON_POLICY = PolicyObjectiveLoss(objective=ObjectiveConfig())


def random_rows(count: int, length: int, spread: float) -> list[TrainingRow]:
    """Rows with a short prompt."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(length), spread, count), LONGEST - 8).astype(int)
    return [demonstration(8, max(1, int(n)), seed=i) for i, n in enumerate(lengths)]


def made_groups(
    prompts: int, prompt: int, group: int, length: int, spread: float
) -> list[TrainingRow]:
    """Rows of `prompts` groups with one prompt each."""
    rng = np.random.default_rng(0)
    rows = []
    for p in range(prompts):
        prompt_T = rng.integers(3, VOCAB_SIZE, prompt).astype(np.int32)
        lengths = np.minimum(rng.lognormal(np.log(length), spread, group), LONGEST - prompt - 8)
        for g, n in enumerate(lengths.astype(int)):
            row = training_row(prompt, max(1, int(n)), seed=100 * p + g)
            tokens_T = np.concatenate([prompt_T, row.tokens_T[prompt:]])
            rows.append(replace(row, tokens_T=tokens_T, temperature=1.0))
    return rows


def measure(model: str, rows: list[TrainingRow], loss: LossFunction) -> tuple[float, float, float]:
    """Padding share without packing; CPU seconds of a step without and with packing."""
    learners = [
        Learner(
            LearnerConfig.of(
                model=model, total_steps=STEPS + 1, device="cpu", threads=1, packing=packs
            ),
            str(Path(model).parent / "failed"),
        )
        for packs in (False, True)
    ]
    part, share = Part(rows_D=rows, loss=loss), 0.0
    seconds: list[list[float]] = [[], []]
    for _ in range(STEPS + 1):
        for learner, taken in zip(learners, seconds, strict=True):
            started = time.process_time()
            made = learner.step(part)
            share = max(share, made["train/padding_share"])
            taken.append(time.process_time() - started)
    padded, packed = (median(taken[1:]) for taken in seconds)  # the first warms up
    return share, padded, packed


def packing_table(directory: Path) -> Table:
    model = tiny_model_dir(
        directory, seed=0, hidden_size=128, layers=4, heads=4, context_length=LONGEST
    )
    table = Table("rows", "median length", "spread", "padding", "s/step", "packed", "ratio")

    def add(name: str, length: int, spread: float, measured: tuple[float, float, float]) -> None:
        share, padded, packed = measured
        table.add_row(
            name, str(length), str(spread), f"{share:.1%}",
            f"{padded:.3f}", f"{packed:.3f}", f"{packed / padded:.2f}",
        )  # fmt: skip

    for count, length, spread in WORKLOADS:
        rows = random_rows(count, length, spread)
        add(str(count), length, spread, measure(model, rows, cross_entropy_loss))
    for prompts, prompt, group, length, spread in ROLLOUTS:
        rows = made_groups(prompts, prompt, group, length, spread)
        name = f"{prompts} prompts of {prompt} x {group}"
        add(name, length, spread, measure(model, rows, ON_POLICY))
    return table


if __name__ == "__main__":
    Console().print(packing_table(Path(sys.argv[1])))
