"""One worker of a learner: methods that run on its shard of model and optimizer.

The collectives of a method (gathering a layer's weights, summing a gradient) run in the same
sequence on all workers. So each worker gets the same number of micro-batches, and each method is
called on all workers (`ShardedModel.on_each`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distill.objective.batching import Batch, TrainingRow, collate
from distill.objective.losses import OWN_SHARE, Metrics, add_metrics
from distill.objective.objectives import TeacherDistribution
from distill.records import RowPlace, TrajectorySource
from distill.types import FloatArray, TokenArray
from learner.canaries import CopyAnswer, CopyQuestion, WatchedModel, watched
from learner.config import LearnerConfig
from learner.forward import LossFunction
from learner.lora import adapter_off
from learner.memory import room_bytes
from learner.plan import FrozenRows, MicroBatch, PassShare, UpdateShare
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import WorkerGroup
from learner.rollout_share import RolloutShare
from learner.routers import RouterBalance
from learner.shard import ModelShard
from learner.sharding import reshard, sum_over_replicas, whole
from learner.teachers import FrozenModel, LocalTeachers, teacher_row
from learner.trace import Stages

# A micro-batch's fraction of its part's trained tokens: the weight in the mean train/router_aux.
ROUTER_SHARE = f"train/router_aux{OWN_SHARE}"
# Interval, in optimizer updates, at which one micro-batch also runs without routing replay.
UNREPLAYED_EVERY = 10
_UNREPLAYED = "train/logprob_gap_unreplayed"


class LearnerWorker(ModelShard):
    """A worker that trains its shard with losses on rows, and scores rows.

    Raises: as `ModelShard`.
    """

    def __init__(
        self, config: LearnerConfig, losses: Sequence[LossFunction], group: WorkerGroup
    ) -> None:
        super().__init__(config, group)
        self.losses = list(losses)
        self._rollout_share: RolloutShare | None = None
        self._watched: list[WatchedModel] | None = None
        self._reference: FrozenModel | None = None
        self._stages = Stages(self.device)
        self._balance = RouterBalance(self.model) if config.learner.router_aux_coef else None

    def execute(self, method: str, argument: Any) -> Any:
        """Run a method by name, such as `rollouts.hold`. The leader calls this on every worker."""
        answer = attrgetter(method)(self)(argument)
        self.progress.mark()
        return answer

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[PassShare, UpdateShare]:
        """Accumulate the gradients of the micro-batches, and update this worker's shard.

        If any worker's loss, or the gradient, is not finite, no worker changes its weights.
        """
        self.zero_grad(None)
        unreplayed = self._gap_without_replay(micro_batches)
        passed = self._pass(micro_batches)
        updated = self._optim_step(1.0, passed.non_finite is None)
        return replace(passed, metrics={**passed.metrics, **unreplayed}), updated

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> PassShare:
        """Add the gradients of the micro-batches to those accumulated since the last step."""
        if not self._accumulates:  # `step` does not clear its gradients
            self.zero_grad(None)
            self._accumulates = True
        return self._pass(micro_batches)

    def _pass(self, micro_batches: Sequence[MicroBatch]) -> PassShare:
        made: dict[str, float] = {}
        non_finite = None
        for i, micro in enumerate(micro_batches):
            self._sum_gradients(i == len(micro_batches) - 1)
            loss, metrics = self._accumulate(micro)
            if non_finite is None and not math.isfinite(loss):
                non_finite = (i, loss)
            if micro.counted:
                add_metrics(made, {**metrics, "train/loss": loss})
        return PassShare(metrics=made, non_finite=non_finite, seconds=self._stages.take())

    def _accumulate(self, micro: MicroBatch) -> tuple[float, dict[str, float]]:
        """Add the gradient of a micro-batch; return its loss and metrics.

        The autograd graph must be freed on return: it may hold a teacher's distribution with a copy
        of the teacher's head, for which the passes of the next micro-batch have no memory.
        """
        with self._stages("forward"):
            batch = collate(self.resolve_rows(micro.rows_B), self.device)
            loss, metrics = self._loss(micro, batch)
            loss = loss * (micro.coef if micro.counted else 0.0)
        self.progress.mark()
        with self._stages("backward"):
            loss.backward()
        self.progress.mark()
        return loss.item(), {name: value.item() for name, value in metrics.items()}

    def _sum_gradients(self, last: bool) -> None:
        """Let the next backward pass sum gradients over the workers, or only accumulate them."""
        if self._root is not None and self.passes.reduces_once:
            self._root.sum_gradients(last)

    def _loss(self, micro: MicroBatch, batch: Batch) -> tuple[Tensor, Metrics]:
        """Loss of the micro-batch, including its share (by trained tokens) of the router loss."""
        loss = self._taught(micro, batch)
        if self._balance is not None:
            self._balance.begin()
        made, metrics = loss(self._forward, batch, micro.counts)
        if self._replay is not None:
            metrics = {**metrics, **self._replay.take()}
        if self._balance is None:
            return made, metrics
        share = len(batch.tokens_N) / micro.counts.tokens
        aux = share * self._balance.take(self._forward.real_tokens)
        noted = {"train/router_aux": aux.detach(), ROUTER_SHARE: aux.new_tensor(share)}
        return made + self._config.learner.router_aux_coef * aux, metrics | noted

    def _taught(self, micro: MicroBatch, batch: Batch) -> LossFunction:
        """The micro-batch's loss function, with the teacher's distribution if the loss needs it."""
        loss = self.losses[micro.loss]
        if not isinstance(loss, PolicyObjectiveLoss) or not loss.needs_distribution:
            return loss
        if loss.own_teacher:
            distribution = self._own_distribution(batch)
        else:
            assert loss.teachers is not None, "estimator=full without a teacher"
            distribution = loss.teachers.distribution_of(
                batch, self.passes.token_budget, micro.teachers
            )
        return partial(loss, distribution=distribution)

    def _own_distribution(self, batch: Batch) -> TeacherDistribution:
        """The learner's own model as the teacher: its lagged or EMA weights if any, or the current.

        The weights are swapped for one pass, without dropout or router noise. It runs before the
        student's pass on the batch, so it changes no tensor that a backward pass needs.
        """
        seen = [teacher_row(row) for row in batch.rows]
        copies = "none" if self._shadow is None else "trained"
        with nullcontext() if self._shadow is None else self._shadow.swapped():
            try:
                return self._forward.distribution_of(
                    seen, self.passes.token_budget, self._group, copies=copies
                )
            finally:
                reshard(self._root)

    def _gap_without_replay(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Metric of routing replay: log-prob gap to the sampler without replay.

        The mean of |log p - log p of the sampler| over the first micro-batch, with the experts that
        the learner's routers choose. Computed every `UNREPLAYED_EVERY` updates; otherwise empty.
        """
        if self._replay is None or self.schedule.last_epoch % UNREPLAYED_EVERY:
            return {}
        first = micro_batches[0]
        rows = self.resolve_rows(first.rows_B)
        with self._stages("forward"):
            logprobs = self.logprobs([replace(row, experts_TLK=None) for row in rows])
        if not first.counted or all(row.experts_TLK is None for row in rows):
            return {}
        sampled = [row.behaviour_logprobs_T[row.loss_mask_T] for row in rows]
        gap_N = np.abs(np.concatenate(logprobs) - np.concatenate(sampled))
        return {_UNREPLAYED: float(gap_N.sum()), _UNREPLAYED + OWN_SHARE: len(gap_N)}

    def optim_step(self, divisor: float) -> UpdateShare:
        """Update this worker's shard with the accumulated gradient / `divisor`; drop the gradient.

        If the gradient is not finite, no worker changes its weights.
        """
        updated = self._optim_step(divisor, True)
        self.zero_grad(None)
        return updated

    def _optim_step(self, divisor: float, finite: bool) -> UpdateShare:
        """Clip the gradient and update. `finite`: all of this worker's losses were finite."""
        with self._stages("optimizer"):
            sum_over_replicas(self.model, self._group)
            if divisor != 1:
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(divisor)
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = whole(torch.nn.utils.get_total_norm(gradients)).item()
            # One value for all replicas, which computed it separately: their weights stay equal to
            # the last bit.
            grad_norm = self._group.max_over_workers(norm)
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(),
                self._config.learner.max_grad_norm,
                torch.tensor(grad_norm),
            )
            lr = self.optimizer.param_groups[0]["lr"]
            bad = self._group.sum_over_workers(float(not finite))
            if not bad and math.isfinite(grad_norm):
                self._update()
        return UpdateShare(grad_norm=grad_norm, lr=lr, seconds=self._stages.take())

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Metrics of the micro-batches, including `train/loss`, without training."""
        self.model.eval()
        made: dict[str, float] = defaultdict(float)
        for micro in micro_batches:
            batch = collate(self.resolve_rows(micro.rows_B), self.device)
            loss, metrics = self._taught(micro, batch)(self._forward, batch, micro.counts)
            self.progress.mark()
            if micro.counted:
                metrics["train/loss"] = loss
                add_metrics(made, {name: value.item() for name, value in metrics.items()})
        self._forward.training_mode()
        reshard(self._root)
        return dict(made)

    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """log p_T of each row's trained tokens under the current weights.

        Collective: every worker calls it with its own rows, at least one.
        """
        made = self._forward.logprobs(
            rows_D, self.passes.token_budget, self._group, self.progress.mark
        )
        reshard(self._root)
        return made

    def base_logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        """`logprobs` by the model without its adapter, as the reference."""
        assert self.lora is not None, "a model without an adapter has no base beside it"
        with adapter_off(self.lora):
            return self.logprobs(rows_D)

    def teacher_logprobs(self, asked: FrozenRows) -> list[FloatArray]:
        """`logprobs` by the learner's copy of a teacher."""
        assert self._teachers is not None, "the learner has no copies of teachers"
        return self._teachers.models[asked.model].logprobs(asked.rows_D, self.passes.token_budget)

    def reference_logprobs(self, asked: FrozenRows) -> list[FloatArray]:
        """`logprobs` by a frozen checkpoint, which is loaded by the first such call."""
        if self._reference is None or self._reference.path != asked.model:
            self._reference = FrozenModel(
                asked.model,
                self._group,
                dtype=torch.float32,
                device=self.device,
                compute_dtype=getattr(torch, self._config.dtype),
                packing=self._config.learner.packing,
                event=() if self._config.stops is None else self._config.stops.event,
                room=room_bytes(self.device, self._config.gpu_part, self._config.gpu_taken),
            )
        return self._reference.logprobs(asked.rows_D, self.passes.token_budget)

    def drop_reference(self, _: None) -> None:
        """Free the memory of the model of `reference_logprobs`."""
        self._reference = None

    @property
    def _teachers(self) -> LocalTeachers | None:
        losses = (loss for loss in self.losses if isinstance(loss, PolicyObjectiveLoss))
        return next((loss.teachers for loss in losses), None)

    def canary(self, question: CopyQuestion) -> list[CopyAnswer]:
        """Canary results of this worker's frozen models: copies of teachers, and the base."""
        if self._watched is None:
            teachers, budget = self._teachers, self.passes.token_budget
            self._watched = [] if teachers is None else watched(teachers, budget)
            if question.base:
                self._watched.append(self._watched_base())
        return [model.answer(question) for model in self._watched]

    def _watched_base(self) -> WatchedModel:
        """The model without its adapter. No log-probs of other tokens than the rows' are read."""

        def read(
            rows_D: Sequence[TrainingRow], _: TokenArray
        ) -> list[tuple[FloatArray, FloatArray]]:
            return [(own_N, np.empty(0, np.float32)) for own_N in self.base_logprobs(rows_D)]

        return WatchedModel(
            None, self.origin, self.model, self.model.config,
            dtype=self._config.dtype, read=read, listed=0,
        )  # fmt: skip

    def resolve_rows(self, rows: Sequence[TrainingRow | RowPlace]) -> list[TrainingRow]:
        """Rows, with places of rollouts replaced by the rows that this worker has built."""
        return [self.rollouts.row(r) if isinstance(r, RowPlace) else r for r in rows]

    def take_rollouts_from(self, source: TrajectorySource, loss: PolicyObjectiveLoss) -> None:
        """Set the source of rollouts, and the loss that their rows are built for."""
        self._rollout_share = RolloutShare(
            source,
            loss.objective,
            loss.stop_event,
            self._group,
            score=self.logprobs,
            score_by_reference=self.base_logprobs,
            heads=() if loss.teachers is None else loss.teachers.heads,
        )

    @property
    def rollouts(self) -> RolloutShare:
        """This worker's share of a step's rollouts."""
        assert self._rollout_share is not None, "the source of rollouts is not set"
        return self._rollout_share
