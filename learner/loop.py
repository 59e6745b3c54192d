"""The learner's loop over rollouts (OPD, task reward, or both), one step per call.

    take      waits for: the step's groups      unblocked by: the rollout workers' puts
    sleep     waits for: the engines' GPUs      unblocked by: every policy engine's release
    publish   waits for: acknowledgements       unblocked by: every policy engine's load

The loop is given a source of groups and a `publish` callable. It knows neither queue nor engine.
A `publish` may return before that, once it needs the weights no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.delivery import CONSTANT_REWARD, Taken, TrainedGroups
from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from distill.objective.metrics import group_metrics, merge_updates
from distill.objective.rows import (
    advantage_metrics,
    policy_rows,
    rows_by_group,
    with_other_rows,
    with_reference,
)
from distill.types import TrajectoryGroup
from distill.weights.model_weights import Weights
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.checkpoint_writer import CheckpointWriter
from learner.forward import Forward
from learner.learner import Learner, Part
from learner.policy_loss import PolicyObjectiveLoss, cross_entropy_loss
from learner.supervised import RowStream
from learner.teachers import LocalTeachers
from learner.trace import NO_TRACE, Stages, Tracing


class GroupSource(Protocol):
    """Source of a step's groups: the next ones beside those that are trained."""

    def take(self, trained: TrainedGroups) -> Taken:
        """Blocks until all are there; raises on a deadline, or when the source is closed.

        Asked again before anything was trained, it gives the same.
        """
        ...


# Hands weights of a version, and what they account for, to every policy engine; returns `push/*`
# metrics once all of them acknowledged, or once the weights may change.
Publish = Callable[[Weights, int, TrainedGroups], Mapping[str, float]]
# Is given a step's number, the groups it trained on, and their rows: see `rows_by_group`.
Keep = Callable[[int, Sequence[TrajectoryGroup], Sequence[TrainingRow]], None]


def keep_nothing(
    _step: int, _groups_P: Sequence[TrajectoryGroup], _rows_D: Sequence[TrainingRow]
) -> None:
    """A `Keep` that drops the rollouts."""


class Record(Protocol):
    """Keeps what steps need to be done again."""

    def taken(self, step: int, taken: Taken) -> None:
        """What `step` is about to train on."""
        ...

    def trained(
        self, step: int, metrics: Mapping[str, float], model: torch.nn.Module | None
    ) -> None:
        """What became of it; `model` holds its gradient still. None: this process has a share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedMix:
    """Supervised rows beside the rollouts: a batch in every update, its loss times `coef`."""

    stream: RowStream
    coef: float


class PolicyLoop:
    """Trains a `Learner` on groups, a step at a time. The weight version is the step count."""

    def __init__(
        self,
        *,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        source: GroupSource,
        publish: Publish,
        store: CheckpointStore,
        loss: PolicyObjectiveLoss,
        teacher_weights: Mapping[str, float] | None = None,
        supervised: SupervisedMix | None = None,
        base_is_reference: bool = False,
        push_dtype: torch.dtype | None = None,
        trace: Tracing = NO_TRACE,
        keep: Keep = keep_nothing,
        sleep: Callable[[int], None] | None = None,
        record: Record | None = None,
        resume_from: Checkpoint | None = None,
        background: bool | None = False,
    ) -> None:
        """
        Args:
            background: as `CheckpointWriter` takes it.
            sleep: has engines that hold this version, and share the learner's GPUs, release them
                until the next `publish`, before which the learner releases what it can.
            push_dtype: what weights are rounded to for the engines; None: they get all of them.
            base_is_reference: the learner's model without its adapter is the reference policy.
            keep: is shown what each step trained on, once it has been.
            record: is told of each step before it and after it; None: nobody is.
        """
        self.step_count = 0
        self._base_is_reference = base_is_reference
        self._push_dtype = push_dtype
        self._trace, self._stages = trace, Stages()
        self._keep, self._sleep, self._record = keep, sleep, record
        self.learner = learner
        self._source = source
        self.publisher = publish
        self.writer = CheckpointWriter(learner, tokenizer, store, background=background)
        self.loss = loss
        self._teacher_weights = teacher_weights
        self._supervised = supervised
        self._trained = TrainedGroups()
        if resume_from:
            self.step_count = resume_from.step
            self._trained = TrainedGroups.from_json(resume_from.delivery)
            learner.load_trainer_state(resume_from.path)

    @property
    def teachers(self) -> LocalTeachers | None:
        """The teachers in this process, if the objective needs any here."""
        return self.loss.teachers

    def publish(self) -> Mapping[str, float]:
        """Hands the present weights to the engines, as version `step_count`."""
        if self._sleep is not None:
            self.learner.rest()
        pushed = self.publisher(
            self.learner.weights(self._push_dtype), self.step_count, self._trained
        )
        if (lost := self.learner.lost_share) is None:
            return pushed
        return {**pushed, "push/lost_share": lost}

    def weights(self) -> tuple[Weights, int]:
        """The present weights as engines get them, and their version."""
        return self.learner.weights(self._push_dtype), self.step_count

    def step(self, waited_s: float = 0.0) -> dict[str, float]:
        """Takes one step's groups, trains on them once, publishes; returns the step's metrics.

        Args:
            waited_s: for how long this step's groups have been waited for already.
        """
        with self._trace.around(self.step_count + 1):
            return self._step(waited_s)

    def _step(self, waited_s: float) -> dict[str, float]:
        started = time.perf_counter() - waited_s
        with self._stages("wait"):
            taken = self._source.take(self._trained)
        if self._record is not None:
            self._record.taken(self.step_count + 1, taken)
        groups_P = taken.groups_P
        ids = [group.group_id for group in groups_P]
        accounted = self._trained.after(ids, taken.set_aside)  # before the weights change
        if self._sleep is not None:
            with self._stages("sleep"):
                self._sleep(self.step_count)
        if self._base_is_reference:
            with self._stages("reference"):
                groups_P = with_reference(groups_P, self.learner.base_logprobs)
        with self._stages("learn"):
            metrics = group_metrics(groups_P, version=self.step_count) | self._learn(groups_P)
        self._trained = accounted
        self.step_count += 1
        if self._record is not None:
            model = self.learner.model if self.learner.workers == 1 else None
            self._record.trained(self.step_count, metrics, model)
        with self._stages("push"):
            metrics |= self.publish()
        seconds = time.perf_counter() - started
        times = self._stages.take()
        return metrics | {
            "step": self.step_count,
            "weight_version": self.step_count,
            **times,
            "time/wait": times["time/wait"] + waited_s,
            "time/step": seconds,
            "tokens_per_s": metrics["train/tokens"] / seconds,
            "groups/first": groups_P[0].group_id,
            "groups/last": groups_P[-1].group_id,
            "groups/watermark": self._trained.watermark,
            "groups/overdue": taken.overdue,
            "groups/set_aside": sum(
                reason != CONSTANT_REWARD for reason in self._trained.set_aside.values()
            ),
            **_replaced_metrics(taken),
        }

    def _learn(self, groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """The step's optimizer updates: one, or `num_substeps` on a part of the groups each.

        One that has neither groups (filtered out, or fewer than updates) nor supervised rows is
        skipped: the weights stay, and the schedule goes on.
        """
        objective = self.loss.objective
        groups_P, all_rows_D = self.rows_of(groups_P)
        metrics: dict[str, float] = {"train/groups": len(groups_P)}
        if groups_P:
            metrics |= advantage_metrics(all_rows_D)
        updates = []
        for i, rows_D in enumerate(self._split(all_rows_D, groups_P)):
            update = []
            if rows_D:
                rows_D = with_other_rows(rows_D, objective, self.learner.logprobs)
                update.append(Part(rows_D=rows_D, loss=self.loss))
            if mix := self._supervised:
                batch = mix.stream.batch(self.step_count * objective.num_substeps + i)
                update.append(Part(rows_D=batch, loss=mixed_loss, coef=mix.coef))
            if update:
                updates.append(self.learner.step(*update))
            else:
                self.learner.skip_update()
        self._keep(self.step_count + 1, groups_P, all_rows_D)
        return metrics | merge_updates(updates)

    def rows_of(
        self, groups_P: Sequence[TrajectoryGroup]
    ) -> tuple[Sequence[TrajectoryGroup], list[TrainingRow]]:
        """The groups that a step trains on, and their rows; none where all are filtered out."""
        objective = self.loss.objective
        if objective.remove_constant_reward_groups:
            groups_P = [group for group in groups_P if group.constant_reward is None]
        if not groups_P:
            return [], []
        return groups_P, policy_rows(
            groups_P, objective, self._teacher_weights, self.loss.stop_event
        )

    def _split(
        self, rows_D: list[TrainingRow], groups_P: Sequence[TrajectoryGroup]
    ) -> list[list[TrainingRow]]:
        """The rows of each update, split by group, with the log-probs that ratios need."""
        objective = self.loss.objective
        parts = np.array_split(np.arange(len(groups_P)), objective.num_substeps)
        if objective.correction != "none" and sum(map(bool, map(len, parts))) > 1:
            rows_D = [
                _with_proximal(row, logprobs_N)
                for row, logprobs_N in zip(rows_D, self.learner.logprobs(rows_D), strict=True)
            ]
        rows_P = [rows for _, rows in rows_by_group(groups_P, rows_D)]
        return [[row for p in part for row in rows_P[p]] for part in parts]

    def save(self) -> Checkpoint:
        """Writes a checkpoint of this very state: weights, optimizer, RNG, trained groups."""
        return self.writer.save(self.step_count, self._trained.to_json())

    def begin_save(self) -> Checkpoint | None:
        """Begins one of this very state: see `CheckpointWriter.begin`."""
        return self.writer.begin(self.step_count, self._trained.to_json())


def _replaced_metrics(taken: Taken) -> dict[str, float]:
    """Number of groups that the step passed over, and the mean reward with theirs.

    That is the policy's reward on the prompts as they come; `reward/mean` is that of the groups it
    was trained on.
    """
    metrics: dict[str, float] = {"groups/replaced": len(taken.replaced)}
    if taken.replaced:
        rewards_P = [fmean(t.reward for t in group.trajectories_G) for group in taken.groups_P]
        metrics["reward/mean_of_all"] = fmean([*rewards_P, *taken.replaced.values()])
    return metrics


def _with_proximal(row: TrainingRow, logprobs_N: np.ndarray) -> TrainingRow:
    proximal_T = np.zeros(len(row), np.float32)
    proximal_T[row.loss_mask_T] = logprobs_N
    return replace(row, proximal_logprobs_T=proximal_T)


def mixed_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """Cross-entropy beside the policy loss, whose metrics keep their names."""
    loss, metrics = cross_entropy_loss(forward, batch, counts)
    return loss, {"sft/nll": metrics["train/nll"]}
