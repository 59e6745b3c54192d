"""Orders of a learner's leader to its workers, and their reports.

Orders name a method of `LearnerWorker` (`learner.process_group.Order`); these are the arguments and
answers of some. They travel between processes, so they hold no tensors of a device, and no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distill.objective.batching import TrainingRow
from distill.objective.losses import StepCounts
from distill.records import RowPlace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that run together, under one loss.

    Attributes:
        rows_B: rows, or the places of rows of rollouts that the worker has made itself.
        loss: its number among the worker's losses, which cannot travel.
        counts: of the whole step, over all workers.
        coef: what the loss is multiplied by.
        counted: False where the rows are another worker's, run only to keep step with it.
        teachers: names of the teachers of all workers' micro-batches that run at the same time.
    """

    rows_B: Sequence[TrainingRow | RowPlace]
    loss: int
    counts: StepCounts
    coef: float
    counted: bool
    teachers: Sequence[str]


class FrozenBatches(NamedTuple):
    """Order to score rows with a frozen model: a teacher by its name, a reference by its path."""

    model: str
    batches: Sequence[list[TrainingRow]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShare:
    """A worker's report of forward and backward passes.

    Attributes:
        metrics: of its own micro-batches; `train/loss` among them.
        non_finite: its first micro-batch, by number, whose loss is NaN or infinite; and that loss.
        seconds: `time/forward` and `time/backward`.
    """

    metrics: Mapping[str, float]
    non_finite: tuple[int, float] | None
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShare:
    """A worker's report of an optimizer update.

    Attributes:
        grad_norm: of the whole gradient, before clipping.
        lr: of the update.
        seconds: `time/optimizer`.
    """

    grad_norm: float
    lr: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare(PassShare):
    """A worker's report of a step: its passes and its update, with the seconds of both."""

    grad_norm: float
    lr: float


class Portion(NamedTuple):
    """Order for some of the weights, by name, in this precision; None: in their own."""

    names: Sequence[str]
    dtype: torch.dtype | None


class LentPortion(NamedTuple):
    """Order to gather some of the weights, as `Portion` does, into a bucket for other processes.

    `readers` is how many each worker has, by rank.
    """

    names: Sequence[str]
    dtype: torch.dtype | None
    readers: Sequence[int]
