"""What micro-batches cost: tokens through the layers, by how rows are put together.

    python -m benchmarks.batching

Rows of made-up lengths (log-normal answers to prompts of one length), no model: it only counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.models.shared_prefix import MOST_MASK
from distill.objective.batching import (
    BatchShape,
    TrainingRow,
    split_by_token_budget,
    tokens_in_step,
)

PROMPTS, GROUP, BUDGET, WORKERS = 64, 8, 16384, 8
# Prompt, median answer, and the standard deviation of the answers' logarithm.
WORKLOADS = ((200, 150), (200, 1000), (200, 2000), (200, 6000), (3000, 150))
SPREAD = 0.7


def made_rows(prompt: int, answer: int, seed: int = 0) -> list[TrainingRow]:
    """Groups of one prompt; tokens are random, so that no two prompts are the same."""
    rng = np.random.default_rng(seed)
    rows = []
    for p in range(PROMPTS):
        prompt_T = rng.integers(0, 1 << 16, prompt)
        for length in np.ceil(rng.lognormal(np.log(answer), SPREAD, GROUP)).astype(int):
            tokens_T = np.append(prompt_T, np.zeros(length)).astype(np.int32)
            zeros_T = np.zeros(len(tokens_T), np.float32)
            rows.append(
                TrainingRow(
                    tokens_T=tokens_T,
                    loss_mask_T=np.arange(len(tokens_T)) >= prompt,
                    advantages_T=zeros_T,
                    behaviour_logprobs_T=zeros_T,
                    temperature=0.7,
                    source=f"prompt {p}",
                )
            )
    return rows


def layer_tokens(batches: Sequence[list[TrainingRow]]) -> int:
    return tokens_in_step(batches, 1, MOST_MASK)


def batching_table() -> Table:
    table = Table("prompt", "answer", "rows in full", "ideal sharing", "layer tokens", "batches")
    for prompt, answer in WORKLOADS:
        rows = made_rows(prompt, answer)
        batches = list(split_by_token_budget(rows, BUDGET, most_mask=MOST_MASK))
        shared = sum(BatchShape.of([row]).suffix_width for row in rows) + PROMPTS * (prompt - 1)
        counts = (sum(map(len, rows)), shared, layer_tokens(batches))
        table.add_row(
            str(prompt), str(answer), *(f"{n / 1e6:.2f} M" for n in counts), str(len(batches))
        )
    return table


if __name__ == "__main__":
    Console().print(batching_table())
