"""One model, its optimizer, and the optimizer step, independent of the source of rows."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.errors import NonFiniteError
from distill.models.loading import resolve_device
from distill.objective.batching import (
    BatchShape,
    Row,
    TrainingRow,
    deal,
    split_by_token_budget,
    tokens_in_step,
)
from distill.objective.losses import StepCounts, add_metrics, finish_metrics
from distill.objective.rows import RowMeta
from distill.pace import Progress
from distill.records import RowPlace, TrajectorySource
from distill.types import FloatArray
from distill.weights.adapter import AdapterWeights
from distill.weights.lending import LenderPlace, LentBucket
from distill.weights.model_weights import Weights, joined, save_weights, total_bytes
from distill.weights.tensors import TensorLayout
from learner.canaries import CopyAnswer, CopyQuestion
from learner.config import LearnerConfig, ShadowRule
from learner.fingerprints import Fingerprints, of_all
from learner.flops import ModelFlops
from learner.forward import LossFunction
from learner.lora import save_adapter, served_form
from learner.orders import (
    FrozenBatches,
    LentPortion,
    MicroBatch,
    PassShare,
    Portion,
    StepShare,
    UpdateShare,
)
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import Order, WorkerGroup
from learner.rollout_share import Shares
from learner.state_copy import CopyCost, StateCopy, copied, copied_weights
from learner.state_files import TrainerState, read_trainer, write_trainer
from learner.worker import LearnerWorker

# Micro-batches by worker, each with True if it counts (False: a repeated one that fills a round).
Dealt: TypeAlias = Sequence[Sequence[tuple[list[Any], bool]]]
# Candidate token budgets, as multiples of a worker's share of the step's tokens: room for padding.
_SLACKS = (1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Rows with one loss. An optimizer step has one or several parts, such as distillation and SFT.

    Attributes:
        rows_D: rows; or metadata of rows of rollouts, which workers build (`learner.rollouts`).
        rows_per_unit: number of consecutive rows that stay in one micro-batch: 2 for pairs.
        coef: factor of the loss.
        dealt: micro-batches by worker, as `deal` returns them; None: not dealt yet.
    """

    rows_D: Sequence[TrainingRow] | Sequence[RowMeta]
    loss: LossFunction
    rows_per_unit: int = 1
    coef: float = 1.0
    dealt: Dealt | None = None


class Learner:
    """Trains a model with losses on rows. Leads the workers that hold the model, or is the only
    worker.

    Raises:
        CheckpointError: the initial checkpoint cannot be loaded.
        ConfigError: the model does not fit into memory.
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
        self._group = group or WorkerGroup(None, resolve_device(config.device))
        self._ordering = threading.RLock()
        self.worker = LearnerWorker(config, losses, self._group)
        self._token_budget = self.worker.passes.token_budget
        self._dump_dir = Path(dump_dir)
        self._flops = ModelFlops.of(self.model)

    @property
    def device(self) -> str:
        return self.worker.device

    @property
    def workers(self) -> int:
        return self._group.size

    @property
    def progress(self) -> Progress:
        """Progress counter of the worker in this process."""
        return self.worker.progress

    @property
    def model(self) -> PreTrainedModel:
        """The model in this process: whole, or sharded."""
        return self.worker.model

    def step(self, *parts: Part) -> dict[str, float]:
        """One optimizer step over all rows, accumulated in micro-batches under the token budget.

        Returns `train/*` metrics, and those of the parts' losses; `time/forward`, `time/backward`
        and `time/optimizer`, in seconds; and `train/tflops_per_s` of all workers together, from the
        operations that the model requires (learner.flops), not those that were executed.

        Raises:
            NonFiniteError: a loss or the gradient norm is NaN or infinite. The weights are
                unchanged, and the rows are in `dump_dir`.
        """
        parts = tuple(map(self.dealt, parts))
        orders: list[list[MicroBatch]] = [[] for _ in range(self._group.size)]
        for part in parts:
            for mine, more in zip(orders, self._micro_batches(part), strict=True):
                mine += more
        shares: list[StepShare] = self.on_each("step", orders)
        self._require_finite(shares, orders)
        made = _summed(shares)
        rows_D = [row for part in parts for row in part.rows_D]
        if self._flops is not None:
            seconds = sum(made[name] for name in shares[0].seconds)
            made["train/tflops_per_s"] = self._flops.training(rows_D) / seconds / 1e12
        shapes = (
            BatchShape.of(rows_B, self.worker.packs)
            for part in parts
            for mine in part.dealt or ()
            for rows_B, counted in mine
            if counted
        )
        return finish_metrics(made) | {
            "train/grad_norm": shares[0].grad_norm,
            "train/lr": shares[0].lr,
            "train/tokens": sum(row.num_trained for row in rows_D),
            # counted before shared contexts are deduplicated
            "train/padding_share": 1 - sum(map(len, rows_D)) / sum(s.in_full for s in shapes),
        }

    def evaluate(self, part: Part) -> dict[str, float]:
        """Metrics of the part's loss on its rows, including `train/loss`, without training."""
        made: dict[str, float] = {}
        for metrics in self.on_each("evaluate", self._micro_batches(part)):
            add_metrics(made, metrics)
        return finish_metrics(made)

    def forward_backward(self, part: Part) -> dict[str, float]:
        """Adds the gradient of a part's loss to that of earlier calls, for `optim_step`.

        The loss is a mean over the part. With its number of tokens (or sequences) as `coef`, and
        their total as the divisor of `optim_step`, several calls are one on all their rows.

        Returns the loss's metrics, `train/loss` (times `coef`), `time/forward`, `time/backward`.

        Raises:
            NonFiniteError: a loss is NaN or infinite. The whole accumulated gradient is dropped,
                and the rows are in `dump_dir`.
        """
        orders = self._micro_batches(part)
        shares: list[PassShare] = self.on_each("forward_backward", orders)
        if any(share.non_finite is not None for share in shares):
            self.zero_grad()
        self._require_finite_losses(shares, orders)
        return finish_metrics(_summed(shares))

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
            "time/optimizer": max(share.seconds["time/optimizer"] for share in shares),
        }

    def skip_update(self) -> None:
        """Skip an update that the schedule counts: only the learning rate changes."""
        self.on_all("skip_update")

    def rest(self) -> None:
        """Release the memory of gradients and of cached blocks until the next pass."""
        self.on_all("rest")

    def dealt(self, part: Part) -> Part:
        """The part, with its micro-batches assigned to workers as in a step."""
        if part.dealt is not None:
            return part
        return replace(part, dealt=self._dealt(self.split(part.rows_D, part.rows_per_unit)))

    def _micro_batches(self, part: Part) -> list[list[MicroBatch]]:
        """The part's micro-batches, by worker."""
        counts = StepCounts(
            tokens=sum(row.num_trained for row in part.rows_D),
            sequences=sum(row.ends_sequence for row in part.rows_D),
        )
        loss, dealt = self._number_of(part.loss), self.dealt(part).dealt or ()
        # Workers may run different teachers at the same time (learner.frozen).
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

    def _dealt(self, batches: Sequence[list[Row]]) -> list[list[tuple[list[Row], bool]]]:
        return deal(batches, self._group.size, self.worker.most_mask, self.worker.packs)

    def split(self, rows_D: Sequence[Row], rows_per_unit: int) -> list[list[Row]]:
        """Split rows into micro-batches under the token budget.

        With several workers, smaller budgets are tried as well. The one with the fewest tokens on
        the workers' critical path is used, which keeps all workers busy.
        """
        workers, most_mask, packs = self._group.size, self.worker.most_mask, self.worker.packs

        def split(budget: int) -> list[list[Row]]:
            return list(split_by_token_budget(rows_D, budget, rows_per_unit, most_mask, packs))

        fullest = split(self._token_budget)
        if workers == 1:
            return fullest
        share = tokens_in_step(fullest, 1, most_mask, packs) / workers
        budgets = {min(self._token_budget, math.ceil(share * slack)) for slack in _SLACKS}
        ways = [split(budget) for budget in sorted(budgets)]
        return min(ways, key=lambda batches: tokens_in_step(batches, workers, most_mask, packs))

    def _number_of(self, loss: LossFunction) -> int:
        losses = self.worker.losses
        if loss not in losses:
            assert self._group.size == 1, f"the other workers do not know {loss}"
            losses.append(loss)
        return losses.index(loss)

    def on_each(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call a method on every worker, each with its own argument; return the results by rank.

        Calls are serialised by a lock: the transports of a push gather weights in several threads.
        """
        with self._ordering:
            self._group.send([Order(method, argument) for argument in arguments])
            return self._group.collect(self.worker.carry_out(method, arguments[0]))

    def on_all(self, method: str, argument: Any = None) -> list[Any]:
        """Call a method on every worker with the same argument; return the results by rank."""
        return self.on_each(method, [argument] * self._group.size)

    def take_rollouts_from(self, source: TrajectorySource, loss: PolicyObjectiveLoss) -> None:
        """Set the source of rollouts of the leader's worker.

        Other workers get theirs where they are constructed.
        """
        self.worker.take_rollouts_from(source, loss)

    def fetch_ahead(self, shares: Sequence[Shares]) -> None:
        """Make each worker prefetch its shares, concurrently with its orders.

        Returns once the leader has fetched its own. Call it in a thread.
        """
        self._group.send_ahead(shares)
        self.worker.fetch_ahead(shares[0])

    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """log p_T of each row's trained tokens under the current weights, one array per row."""
        return self._logprobs("logprobs", rows_D)

    def teacher_logprobs(self, name: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by the teacher of that name in the learner: a copy, or lagged or EMA."""
        if self.own_teacher is not None:
            with self.as_teacher():
                return self.logprobs(rows_D)
        return self._logprobs("teacher_logprobs", rows_D, partial(FrozenBatches, name))

    def reference_logprobs(self, path: str, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by a frozen checkpoint. It stays in memory until `drop_reference`.

        Raises:
            CheckpointError: it cannot be loaded.
            ConfigError: it does not fit into memory.
        """
        return self._logprobs("reference_logprobs", rows_D, partial(FrozenBatches, path))

    def drop_reference(self) -> None:
        """Free the memory of the model of `reference_logprobs`, if there is one."""
        self.on_all("drop_reference")

    def base_logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by the model without its adapter: a reference that needs no extra memory."""
        return self._logprobs("base_logprobs", rows_D)

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of every trained tensor's weights, and of its gradient while it exists."""
        return of_all(self.on_all("fingerprints"))

    def canary(self, question: CopyQuestion) -> list[list[CopyAnswer]]:
        """Canary results of every worker's frozen models, by rank (`learner.canaries`)."""
        return self.on_all("canary", question)

    def _logprobs(
        self,
        method: str,
        rows_D: Sequence[TrainingRow],
        order: Callable[[list[list[TrainingRow]]], Any] = list,
    ) -> list[FloatArray]:
        dealt = self._dealt(self.split(rows_D, 1))
        answers = self.on_each(method, [order([rows for rows, _ in mine]) for mine in dealt])
        by_row: dict[int, FloatArray] = {}
        for mine, answer in zip(dealt, answers, strict=True):
            for (rows_B, _), logprobs in zip(mine, answer, strict=True):
                by_row |= {id(row): part_N for row, part_N in zip(rows_B, logprobs, strict=True)}
        return [by_row[id(row)] for row in rows_D]

    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        """Current weights under the checkpoint's names. They are read lazily: a step changes them.

        Rounded to `dtype` if one is given, except tensors that stay exact (`learner.export`).
        """
        return _LearnerWeights(self, dtype)

    def adapter(self, dtype: torch.dtype) -> AdapterWeights:
        """The adapter's current tensors, rounded to `dtype`, for servers that hold the base."""
        assert self.worker.lora is not None
        tensors = {name: tensor.to(dtype) for name, tensor in self._adapter().items()}
        return AdapterWeights(tensors, served_form(self.worker.lora))

    def lender_places(self) -> list[LenderPlace]:
        """Location of each worker's memory, by rank, for engines that read weights from it."""
        return self.on_all("lender_place")

    @property
    def own_teacher(self) -> ShadowRule | None:
        """Update rule of the EMA or lagged teacher (`learner.own_teacher`), or None without one."""
        return self.worker.own_teacher

    def follow(self, version: int) -> None:
        """Update the EMA or lagged teacher. Call it after each step, with the new version."""
        if self.own_teacher is not None:
            self.on_all("follow", version)

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        """Context manager in which weights and log-probs are those of the EMA or lagged teacher."""
        self.on_all("swap_teacher")
        try:
            yield
        finally:
            self.on_all("swap_teacher")

    @property
    def lost_share(self) -> float | None:
        """Fraction of an adapter's change that was lost to rounding in the last gathered weights
        (`learner.lora.RoundedUpdate`); None without an adapter."""
        return None if self.worker.lora is None else self.worker.rounded.lost_share

    def save(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a checkpoint of the weights and the training state.

        The weights are written as a Hugging Face checkpoint to `model/`. An adapter is merged into
        it, and also written to `adapter/`. Any number of workers can resume from the checkpoint.

        Raises:
            CheckpointError, OSError, RuntimeError, SafetensorError: it could not be written.
        """
        self.export(path / "model", tokenizer)
        if self.worker.lora is not None:
            save_adapter(path / "adapter", self.worker.lora, self._adapter())
        self.on_all("save_optimizer", str(path / "optimizer"))
        write_trainer(path, self._trainer_state())

    def copied(self, tokenizer: PreTrainedTokenizerBase) -> StateCopy:
        """Copy the state that `save` writes into main memory.

        The copy takes 12 bytes for each trained number: 8 of moments, sharded over the workers, and
        4 of weights, on the leader. It must be written or dropped before the next copy.
        """
        write_adapter = None
        if (lora := self.worker.lora) is not None:
            write_adapter = partial(save_adapter, lora=lora, tensors=copied(self._adapter()))
        return StateCopy(
            weights=copied_weights(self.weights()),
            moments=self.on_all("copy_moments")[0],
            trainer=deepcopy(self._trainer_state()),
            write_model=partial(self._export, tokenizer),
            write_adapter=write_adapter,
        )

    def has_room_for_copy(self) -> bool:
        """True if `copied` needs at most half of the free main memory on every host."""
        costs: list[CopyCost] = self.on_all("copy_cost")
        needed = Counter({costs[0].host: total_bytes(self.weights())})
        for cost in costs:
            needed[cost.host] += cost.bytes
        return all(2 * needed[cost.host] <= cost.free for cost in costs)

    def _adapter(self) -> dict[str, torch.Tensor]:
        return self.on_all("gather_adapter")[0]

    def _trainer_state(self) -> TrainerState:
        return TrainerState(
            schedule=self.worker.schedule.state_dict(), rng=self.on_all("rng_state")
        )

    def export(self, model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the weights and the tokenizer as a Hugging Face checkpoint to a new directory.

        Includes tensors of the initial checkpoint that the model's class ignores, but servers use.

        Raises: as `save`.
        """
        self._export(tokenizer, model_dir, self.weights())

    def _export(
        self, tokenizer: PreTrainedTokenizerBase, model_dir: Path, weights: Weights
    ) -> None:
        model_dir.mkdir()
        self.worker.files.write(model_dir, tokenizer)
        save_weights(model_dir, joined(weights, self.worker.carried_over()))

    def load_trainer_state(self, path: Path) -> None:
        """Restore the state that `save` wrote to `path`, except for the weights.

        A checkpoint that `learner.fork` wrote contains only the moments.

        Raises:
            CheckpointError: it cannot be read, or was written for another model.
        """
        state = read_trainer(path)
        if state.moments:
            self.on_all("load_optimizer", str(path / "optimizer"))
        if state.schedule is not None:
            self.on_all("set_schedule", state.schedule)
        if state.schedule is not None and self.own_teacher is not None:  # a fork starts a new one
            self.on_all("load_teacher", str(path / "optimizer"))
        # Workers that are not in the checkpoint keep their initial RNG state.
        missing: list[dict[str, torch.Tensor]] = [{}] * max(0, self._group.size - len(state.rng))
        self.on_each("set_rng_state", [*state.rng, *missing][: self._group.size])

    def _require_finite(
        self, shares: Sequence[StepShare], orders: Sequence[Sequence[MicroBatch]]
    ) -> None:
        self._require_finite_losses(shares, orders)
        if not math.isfinite(norm := shares[0].grad_norm):
            rows = [[row for m in mine if m.counted for row in m.rows_B] for mine in orders]
            raise self._non_finite(f"the gradient norm is {norm}", self._made(rows))

    def _require_finite_losses(
        self, shares: Sequence[PassShare], orders: Sequence[Sequence[MicroBatch]]
    ) -> None:
        for rank, share in enumerate(shares):
            if share.non_finite is not None:
                place, loss = share.non_finite
                rows: list[Sequence[TrainingRow | RowPlace]] = [[] for _ in orders]
                rows[rank] = orders[rank][place].rows_B
                raise self._non_finite(f"the loss is {loss}", self._made(rows))

    def _made(self, rows: Sequence[Sequence[TrainingRow | RowPlace]]) -> list[TrainingRow]:
        """Rows of all workers; rows of rollouts come from the worker that built them."""
        return [row for mine in self.on_each("made_rows", rows) for row in mine]

    def _non_finite(self, what: str, rows: Sequence[TrainingRow]) -> NonFiniteError:
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        path = self._dump_dir / "non_finite_rows.npz"
        arrays = {}
        for i, row in enumerate(rows):
            for name in ("tokens_T", "loss_mask_T", "advantages_T", "behaviour_logprobs_T"):
                arrays[f"row{i}/{name}"] = getattr(row, name)
            arrays[f"row{i}/temperature"] = np.array(row.temperature)
            arrays[f"row{i}/source"] = np.array(row.source)
        np.savez(path, **arrays)
        return NonFiniteError(
            f"{what}; training stops before the weights are touched. The {len(rows)} rows are in "
            f"{path} (numpy.load)"
        )


def _summed(shares: Sequence[PassShare]) -> dict[str, float]:
    """Metrics summed over workers; times are the slowest worker's, for which the others wait."""
    made: dict[str, float] = {}
    for share in shares:
        add_metrics(made, share.metrics)
    for name in shares[0].seconds:
        made[name] = max(share.seconds[name] for share in shares)
    return made


class _LearnerWeights:
    """`Weights` of a learner, gathered from its workers in portions.

    Implements `Lends` as well: each worker can lend the tensors that it has gathered.
    """

    def __init__(self, learner: Learner, dtype: torch.dtype | None) -> None:
        self._learner, self._dtype = learner, dtype
        weights = learner.worker.weights.values()
        self.layouts: list[TensorLayout] = [weight.layout_in(dtype) for weight in weights]

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return self._learner.on_all("gather", Portion(names, self._dtype))[0]

    def first_non_finite(self) -> str | None:
        return next(filter(None, self._learner.on_all("first_non_finite")), None)

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        return self._learner.on_all("lend", LentPortion(names, self._dtype, readers))

    def take_back(self) -> None:
        self._learner.on_all("take_back")
