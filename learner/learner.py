"""One model, its optimizer, and the optimizer step, independent of the source of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distill.errors import NonFiniteError
from distill.models.loading import resolve_device
from distill.objective.batching import (
    BatchShape,
    TrainingRow,
)
from distill.objective.losses import add_metrics, finish_metrics
from distill.records import RowPlace
from distill.types import FloatArray
from learner.canaries import CopyAnswer, CopyQuestion
from learner.config import LearnerConfig
from learner.flops import ModelFlops
from learner.forward import LossFunction
from learner.plan import (
    Dealing,
    FrozenRows,
    MicroBatch,
    Part,
    PassShare,
    UpdateShare,
    slowest,
    summed,
)
from learner.process_group import WorkerGroup
from learner.sharded_model import ShardedModel


class Learner(ShardedModel):
    """Trains a model with losses on rows. It leads the other workers, if there are any.

    Raises: as `ShardedModel`.
    """

    def __init__(
        self,
        config: LearnerConfig,
        dump_dir: str,
        *,
        losses: Sequence[LossFunction] = (),
        group: WorkerGroup | None = None,
    ) -> None:
        """
        Args:
            dump_dir: receives the rows of a step that turned non-finite.
            losses: losses that steps will use, in the same order on every worker; a learner with
                one worker accepts other losses as well.
            group: the leader's end of the worker group; None: there are no other workers.
        """
        super().__init__(config, losses, group or WorkerGroup(None, resolve_device(config.device)))
        self.dealing = Dealing(
            workers=self._group.size,
            token_budget=self.worker.passes.token_budget,
            most_mask=self.worker.most_mask,
            packs=self.worker.packs,
        )
        self._dump_dir = Path(dump_dir)
        self._flops = ModelFlops.of(self.model)

    def step(self, *parts: Part) -> dict[str, float]:
        """Take one optimizer step over all rows, in micro-batches under the token budget.

        Returns `train/*` metrics, and those of the parts' losses; `time/forward`, `time/backward`
        and `time/optimizer`, in seconds; and `train/tflops_per_s` of all workers together, from the
        operations that the model requires (learner.flops), not those that were executed.

        Raises:
            NonFiniteError: a loss or the gradient norm is NaN or infinite. The weights are
                unchanged, and the rows are in `dump_dir`.
        """
        parts = tuple(map(self.dealing.dealt, parts))
        by_rank: list[list[MicroBatch]] = [[] for _ in range(self._group.size)]
        for part in parts:
            for mine, more in zip(by_rank, self._micro_batches(part), strict=True):
                mine += more
        shares: list[tuple[PassShare, UpdateShare]] = self.on_each("step", by_rank)
        passes, updates = zip(*shares, strict=True)
        self._require_finite_losses(passes, by_rank)
        if not math.isfinite(norm := updates[0].grad_norm):
            rows = [[row for m in mine if m.counted for row in m.rows_B] for mine in by_rank]
            raise self._non_finite(f"the gradient norm is {norm}", self._made(rows))
        times = slowest(passes) | slowest(updates)
        made = summed(passes) | times
        rows_D = [row for part in parts for row in part.rows_D]
        if self._flops is not None:
            made["train/tflops_per_s"] = self._flops.training(rows_D) / sum(times.values()) / 1e12
        shapes = (
            BatchShape.of(rows_B, self.worker.packs)
            for part in parts
            for mine in part.dealt or ()
            for rows_B, counted in mine
            if counted
        )
        return finish_metrics(made) | {
            "train/grad_norm": norm,
            "train/lr": updates[0].lr,
            "train/tokens": sum(row.num_trained for row in rows_D),
            # Counted before shared contexts are deduplicated.
            "train/padding_share": 1 - sum(map(len, rows_D)) / sum(s.in_full for s in shapes),
        }

    def evaluate(self, part: Part) -> dict[str, float]:
        """Metrics of the part's loss on its rows, including `train/loss`, without training."""
        made: dict[str, float] = {}
        for metrics in self.on_each("evaluate", self._micro_batches(part)):
            add_metrics(made, metrics)
        return finish_metrics(made)

    def forward_backward(self, part: Part) -> dict[str, float]:
        """Add the gradient of a part's loss to that of earlier calls, for `optim_step`.

        The loss is a mean over the part. If `coef` is the part's number of tokens (or sequences),
        and the divisor of `optim_step` is their total, several calls are equal to one call with all
        rows.

        Returns the loss's metrics, `train/loss` (times `coef`), `time/forward`, `time/backward`.

        Raises:
            NonFiniteError: a loss is NaN or infinite. The whole accumulated gradient is dropped,
                and the rows are in `dump_dir`.
        """
        by_rank = self._micro_batches(part)
        shares: list[PassShare] = self.on_each("forward_backward", by_rank)
        if any(share.non_finite is not None for share in shares):
            self.zero_grad()
        self._require_finite_losses(shares, by_rank)
        return finish_metrics(summed(shares))

    def zero_grad(self) -> None:
        """Drop the gradient that `forward_backward` has accumulated."""
        self.on_all("zero_grad")

    def optim_step(self, divisor: float = 1.0) -> dict[str, float]:
        """One optimizer update with the accumulated gradient / `divisor`; drops the gradient.

        Returns `train/grad_norm` (of the quotient), `train/lr` and `time/optimizer`.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite. The weights are unchanged.
        """
        shares: list[UpdateShare] = self.on_all("optim_step", divisor)
        if not math.isfinite(norm := shares[0].grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {norm}; the gradient is dropped, and the weights are as "
                "before"
            )
        return {
            "train/grad_norm": norm,
            "train/lr": shares[0].lr,
            **slowest(shares),
        }

    def _micro_batches(self, part: Part) -> list[list[MicroBatch]]:
        return self.dealing.micro_batches(part, self._number_of(part.loss))

    def _number_of(self, loss: LossFunction) -> int:
        losses = self.worker.losses
        if loss not in losses:
            assert self._group.size == 1, f"the other workers do not have the loss {loss}"
            losses.append(loss)
        return losses.index(loss)

    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """log p_T of each row's trained tokens under the current weights, one array per row."""
        return self._logprobs("logprobs", rows_D)

    def teacher_logprobs(self, name: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by the lagged or EMA teacher, if any, else by the copy of teacher `name`."""
        if self.own_teacher is not None:
            with self.as_teacher():
                return self.logprobs(rows_D)
        return self._logprobs("teacher_logprobs", rows_D, partial(FrozenRows, name))

    def reference_logprobs(self, path: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by a frozen checkpoint. Its model stays in memory until `drop_reference`.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            ConfigError: the model does not fit into memory.
        """
        return self._logprobs("reference_logprobs", rows_D, partial(FrozenRows, path))

    def drop_reference(self) -> None:
        """Free the memory of the model of `reference_logprobs`, if there is one."""
        self.on_all("drop_reference")

    def base_logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by the model without its adapter: a reference that needs no extra memory."""
        return self._logprobs("base_logprobs", rows_D)

    def canary(self, question: CopyQuestion) -> list[list[CopyAnswer]]:
        """Canary results of every worker's frozen models, by rank (`learner.canaries`)."""
        return self.on_all("canary", question)

    def _logprobs(
        self,
        method: str,
        rows_D: Sequence[TrainingRow],
        argument: Callable[[list[TrainingRow]], Any] = list,
    ) -> list[FloatArray]:
        dealt = self.dealing.deal(self.dealing.split(rows_D, 1))
        by_rank = [[row for rows_B, _ in mine for row in rows_B] for mine in dealt]
        answers = self.on_each(method, list(map(argument, by_rank)))
        by_row: dict[int, FloatArray] = {}
        for mine, answer in zip(by_rank, answers, strict=True):
            by_row |= zip(map(id, mine), answer, strict=True)
        return [by_row[id(row)] for row in rows_D]

    def _require_finite_losses(
        self, shares: Sequence[PassShare], by_rank: Sequence[Sequence[MicroBatch]]
    ) -> None:
        for rank, share in enumerate(shares):
            if share.non_finite is not None:
                place, loss = share.non_finite
                rows: list[Sequence[TrainingRow | RowPlace]] = [[] for _ in by_rank]
                rows[rank] = by_rank[rank][place].rows_B
                raise self._non_finite(f"the loss is {loss}", self._made(rows))

    def _made(self, rows: Sequence[Sequence[TrainingRow | RowPlace]]) -> list[TrainingRow]:
        """Rows of all workers; rows of rollouts come from the worker that built them."""
        return [row for mine in self.on_each("resolve_rows", rows) for row in mine]

    def _non_finite(self, what: str, rows: Sequence[TrainingRow]) -> NonFiniteError:
        path = self._dump_dir / "non_finite_rows.npz"
        arrays = {}
        for i, row in enumerate(rows):
            for name in ("tokens_T", "loss_mask_T", "advantages_T", "behaviour_logprobs_T"):
                arrays[f"row{i}/{name}"] = getattr(row, name)
            arrays[f"row{i}/temperature"] = np.array(row.temperature)
            arrays[f"row{i}/source"] = np.array(row.source)
        try:
            self._dump_dir.mkdir(parents=True, exist_ok=True)
            np.savez(path, **arrays)
        except OSError as error:
            where = f"cannot be written to {path}: {error}"
        else:
            where = f"are in {path} (numpy.load)"
        return NonFiniteError(
            f"{what}; training stops before the weights are touched. The {len(rows)} rows {where}"
        )
