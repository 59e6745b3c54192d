"""Arguments and results of calls of a learner's workers: micro-batches of a step, its metrics.

    Part          rows with one loss                                       made by the loop
    Dealing       parts as micro-batches under the token budget, by worker
    MicroBatch    rows that run together                                   argument of `step`
    PassShare, UpdateShare    metrics and seconds of one worker            its result; `summed`

They are sent between processes (`learner.process_group.Followers`), so they contain no tensors of a
device, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from distill.objective.batching import (
    Row,
    TrainingRow,
    deal,
    split_by_token_budget,
    tokens_in_step,
)
from distill.objective.losses import StepCounts, add_metrics
from distill.objective.rows import RowMeta
from distill.records import RowPlace
from learner.forward import LossFunction

# Micro-batches by worker, each with True if it counts (False: a repeated one that fills a round).
Dealt: TypeAlias = Sequence[Sequence[tuple[list[Any], bool]]]
# Candidate token budgets, as multiples of a worker's share of the step's tokens: room for padding.
_SLACKS = (1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Rows with one loss. An optimizer step has one or several parts, such as distillation and SFT.

    Attributes:
        rows_D: rows; or metadata of rows that workers build from rollouts (`learner.rollouts`).
        rows_per_unit: number of consecutive rows that stay in one micro-batch: 2 for pairs.
        coef: factor of the loss.
        dealt: micro-batches by worker, as `deal` returns them; None: not dealt yet.
    """

    rows_D: Sequence[TrainingRow] | Sequence[RowMeta]
    loss: LossFunction
    rows_per_unit: int = 1
    coef: float = 1.0
    dealt: Dealt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """Assignment of rows to workers, in micro-batches.

    Attributes:
        workers: number of workers.
        token_budget: largest number of tokens in a micro-batch of more than one unit.
        most_mask, packs: see `distill.objective.batching.BatchShape`.
    """

    workers: int
    token_budget: int
    most_mask: int
    packs: bool

    def dealt(self, part: Part) -> Part:
        """The part, with its micro-batches assigned to workers as in a step."""
        if part.dealt is not None:
            return part
        return replace(part, dealt=self.deal(self.split(part.rows_D, part.rows_per_unit)))

    def deal(self, batches: Sequence[list[Row]]) -> list[list[tuple[list[Row], bool]]]:
        """Micro-batches by worker; see `distill.objective.batching.deal`."""
        return deal(batches, self.workers, self.most_mask, self.packs)

    def split(self, rows_D: Sequence[Row], rows_per_unit: int) -> list[list[Row]]:
        """Split rows into micro-batches under the token budget.

        With several workers, smaller budgets are tried as well. The budget with the fewest tokens
        on the workers' critical path is used, which keeps all workers busy.
        """
        workers, most_mask, packs = self.workers, self.most_mask, self.packs

        def split(budget: int) -> list[list[Row]]:
            return list(split_by_token_budget(rows_D, budget, rows_per_unit, most_mask, packs))

        fullest = split(self.token_budget)
        if workers == 1:
            return fullest
        share = tokens_in_step(fullest, 1, most_mask, packs) / workers
        budgets = {min(self.token_budget, math.ceil(share * slack)) for slack in _SLACKS}
        ways = [split(budget) for budget in sorted(budgets)]
        return min(ways, key=lambda batches: tokens_in_step(batches, workers, most_mask, packs))

    def micro_batches(self, part: Part, loss: int) -> list[list[MicroBatch]]:
        """The part's micro-batches, by worker.

        Args:
            loss: index of its loss in the workers' `losses`.
        """
        counts = StepCounts(
            tokens=sum(row.num_trained for row in part.rows_D),
            sequences=sum(row.ends_sequence for row in part.rows_D),
        )
        dealt = self.dealt(part).dealt or ()
        # Workers may run different teachers at the same time (learner.teachers).
        teachers = [
            sorted({rows[0].teacher for rows, _ in in_round})
            for in_round in zip(*dealt, strict=True)
        ]
        return [
            [
                MicroBatch(
                    rows_B=[row.place if isinstance(row, RowMeta) else row for row in rows],
                    loss=loss,
                    counts=counts,
                    coef=part.coef,
                    counted=counted,
                    teachers=in_round,
                )
                for (rows, counted), in_round in zip(mine, teachers, strict=True)
            ]
            for mine in dealt
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that run together, under one loss.

    Attributes:
        rows_B: rows, or the places of rows that the worker has built from rollouts.
        loss: index in the worker's `losses`. Losses cannot be sent between processes.
        counts: counts of the whole step, over all workers.
        coef: factor of the loss.
        counted: False if the rows are another worker's, and run only because passes are collective.
        teachers: names of the teachers of all workers' micro-batches that run at the same time.
    """

    rows_B: Sequence[TrainingRow | RowPlace]
    loss: int
    counts: StepCounts
    coef: float
    counted: bool
    teachers: Sequence[str]


class FrozenRows(NamedTuple):
    """Rows to score with a frozen model. `model`: name of a teacher, or path of a reference."""

    model: str
    rows_D: Sequence[TrainingRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShare:
    """A worker's report of forward and backward passes.

    Attributes:
        metrics: metrics of its own micro-batches, including `train/loss`.
        non_finite: (index, loss) of its first micro-batch whose loss is NaN or infinite, or None.
        seconds: `time/forward` and `time/backward`.
    """

    metrics: Mapping[str, float]
    non_finite: tuple[int, float] | None
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShare:
    """A worker's report of an optimizer update.

    Attributes:
        grad_norm: norm of the whole gradient, before clipping.
        lr: learning rate of the update.
        seconds: `time/optimizer`.
    """

    grad_norm: float
    lr: float
    seconds: Mapping[str, float]


class CopyCost(NamedTuple):
    """Size of a copy of this worker's moments, and free main memory of its host, in bytes."""

    host: str
    bytes: int
    free: int


class Portion(NamedTuple):
    """Names of weights to gather, in this dtype; None: in their own dtypes.

    `readers`: number of processes that each worker lends the weights to, by rank.
    """

    names: Sequence[str]
    dtype: torch.dtype | None
    readers: Sequence[int] = ()


def summed(shares: Sequence[PassShare]) -> dict[str, float]:
    """Metrics summed over workers, and their `slowest` times."""
    made: dict[str, float] = {}
    for share in shares:
        add_metrics(made, share.metrics)
    return made | slowest(shares)


def slowest(shares: Sequence[PassShare] | Sequence[UpdateShare]) -> dict[str, float]:
    """For each stage, the seconds of the slowest worker, for which the others wait."""
    return {name: max(share.seconds[name] for share in shares) for name in shares[0].seconds}
