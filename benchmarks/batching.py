"""Tokens through the layers by the way in which rows are batched and dealt to workers.

    python -m benchmarks.batching

Rows have generated lengths (log-normal answers to prompts of one length). No model runs: tokens are
only counted.

The second table compares two ways of dealing a step's rows to learner workers. By rows, as the
learner does (`learner.plan.Dealing`), segments of one trajectory may go to several workers. By
trajectories, each worker gets whole trajectories: the largest first, each to the worker with the
fewest tokens; each worker's rows are then split under the token budget that is best for all. Both
columns are tokens on the workers' critical path over the tokens of one worker / workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from distill.models.shared_prefix import MOST_MASK
from distill.objective.batching import (
    BatchShape,
    RowShape,
    TrainingRow,
    split_by_token_budget,
    tokens_in_step,
)
from distill.objective.rows import RowMeta
from distill.records import RowPlace
from learner.plan import Dealing

PROMPTS, GROUP, BUDGET = 64, 8, 16384
# Prompt, median answer, and the standard deviation of the answers' logarithm.
WORKLOADS = ((200, 150), (200, 1000), (200, 2000), (200, 6000), (3000, 150))
SPREAD = 0.7
# Prompts, samples of each, mean number of turns, and the spread of their answers.
DEALT = ((64, 8, 1, 0.7), (64, 8, 1, 1.2), (32, 8, 5, 0.7), (8, 8, 5, 0.7), (4, 4, 5, 0.7))
DEALT += ((1, 4, 5, 0.7), (1, 1, 10, 0.7))
WORKERS, SEEDS, MOST_TURNS = (2, 8, 16), 5, 20
# Budgets that are tried for whole trajectories, as multiples of a worker's share of the tokens.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 1.25)


def random_rows(prompt: int, answer: int, seed: int = 0) -> list[TrainingRow]:
    """Groups of rows with one prompt each. Tokens are random, so no two prompts are equal."""
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


def made_trajectories(
    prompts: int, group: int, turns: float, spread: float, seed: int
) -> list[list[RowMeta]]:
    """Rows of each trajectory, one per turn. Contexts are earlier turns without their thinking.

    Prompts have 400 tokens. Answers have a median of 300 tokens, two thirds of them thinking, and
    observations a median of 200. Trajectories of one turn: 200 and 1,000.
    """
    rng = np.random.default_rng(seed)
    prompt, median = (200, 1000) if turns == 1 else (400, 300)
    made = []
    for p in range(prompts):
        for member in range(group):
            count, context, rows = min(MOST_TURNS, rng.geometric(1 / turns)), prompt, []
            for n in range(count):
                answer = int(np.ceil(rng.lognormal(np.log(median), spread)))
                key = f"{p}" if n == 0 else f"{p} {member} {n}"
                rows.append(
                    RowMeta(
                        place=RowPlace(p, member, n),
                        tokens=context + answer,
                        first_trained=context,
                        num_trained=answer,
                        context_key=key.encode(),
                        prefix_key=key.encode(),
                        teacher="",
                        ends_sequence=n == count - 1,
                    )
                )
                context += answer // 3 + int(np.ceil(rng.lognormal(np.log(200), spread)))
            made.append(rows)
    return made


def layer_tokens(batches: Sequence[Sequence[RowShape]], packs: bool = False) -> int:
    return tokens_in_step(batches, 1, MOST_MASK, packs)


def by_rows(rows: Sequence[RowMeta], workers: int, packs: bool) -> int:
    """Tokens on the critical path if rows are dealt, as the learner does."""
    dealing = Dealing(workers=workers, token_budget=BUDGET, most_mask=MOST_MASK, packs=packs)
    return tokens_in_step(dealing.split(rows, 1), workers, MOST_MASK, packs)


def by_trajectories(trajectories: Sequence[Sequence[RowMeta]], workers: int, packs: bool) -> int:
    """Tokens on the critical path if whole trajectories are dealt."""
    shares: list[list[RowMeta]] = [[] for _ in range(workers)]
    for rows in sorted(trajectories, key=lambda rows: -sum(map(len, rows))):
        min(shares, key=lambda share: sum(map(len, share))).extend(rows)
    mean = sum(len(row) for share in shares for row in share) / workers
    budgets = {min(BUDGET, int(mean * share) + 1) for share in SHARES}
    return min(_critical_path(shares, budget, packs) for budget in budgets)


def _critical_path(shares: Sequence[Sequence[RowMeta]], budget: int, packs: bool) -> int:
    sizes = [
        sorted(
            (
                layer_tokens([batch], packs)
                for batch in split_by_token_budget(share, budget, 1, MOST_MASK, packs)
            ),
            reverse=True,
        )
        for share in shares
    ]
    return sum(map(max, zip_longest(*sizes, fillvalue=0)))


def batching_table() -> Table:
    table = Table("prompt", "answer", "rows in full", "ideal sharing", "layer tokens", "batches")
    for prompt, answer in WORKLOADS:
        rows = random_rows(prompt, answer)
        batches = list(split_by_token_budget(rows, BUDGET, most_mask=MOST_MASK))
        shared = sum(BatchShape.of([row]).suffix_width for row in rows) + PROMPTS * (prompt - 1)
        counts = (sum(map(len, rows)), shared, layer_tokens(batches))
        table.add_row(
            str(prompt), str(answer), *(f"{n / 1e6:.2f} M" for n in counts), str(len(batches))
        )
    return table


def dealing_table() -> Table:
    table = Table("prompts x samples", "turns", "spread", "workers", "largest / share")
    for how in ("padded", "packed"):
        for column in ("by rows", "by trajectories", "cost"):
            table.add_column(f"{how}: {column}")
    for prompts, group, turns, spread in DEALT:
        made = [made_trajectories(prompts, group, turns, spread, seed) for seed in range(SEEDS)]
        for workers in WORKERS:
            cells = [f"{prompts} x {group}", f"{turns}", f"{spread}", f"{workers}"]
            shares = [sum(sizes) / workers for sizes in map(_sizes, made)]
            largest = [max(_sizes(each)) / share for each, share in zip(made, shares, strict=True)]
            cells.append(f"{fmean(largest):.2f}")
            for packs in (False, True):
                rows = fmean(_against_one(each, workers, packs, whole=False) for each in made)
                whole = fmean(_against_one(each, workers, packs, whole=True) for each in made)
                cells += [f"{rows:.2f}", f"{whole:.2f}", f"{whole / rows - 1:+.0%}"]
            table.add_row(*cells)
    return table


def _sizes(trajectories: Sequence[Sequence[RowMeta]]) -> list[int]:
    return [sum(map(len, rows)) for rows in trajectories]


def _against_one(
    trajectories: Sequence[Sequence[RowMeta]], workers: int, packs: bool, *, whole: bool
) -> float:
    rows = [row for each in trajectories for row in each]
    made = by_trajectories(trajectories, workers, packs) if whole else by_rows(rows, workers, packs)
    return made * workers / by_rows(rows, 1, packs)


if __name__ == "__main__":
    Console().print(batching_table())
    Console(width=160).print(dealing_table())
