"""The losses of rollouts, supervised rows and scores: a forward pass, and the objective on it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from distill.objective.batching import Batch
from distill.objective.losses import Metrics, StepCounts
from distill.objective.objectives import (
    bradley_terry,
    cross_entropy,
    policy_loss,
    teacher_divergence,
)
from distill.objective.settings import ObjectiveConfig
from learner.forward import Forward
from learner.teachers import LocalTeachers


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjectiveLoss:
    """The `LossFunction` of rollouts: policy loss, entropy bonus, divergence from the teacher.

    `teachers` are needed by estimator=full alone. The tokens of the `stop_event` are one outcome
    (`distill.stops`) of the forward pass, too.
    """

    objective: ObjectiveConfig
    teachers: LocalTeachers | None = None
    stop_event: tuple[int, ...] = ()

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        how = self.objective
        distribution = None
        if self.teachers is not None and how.estimator == "full" and how.kl_coef:
            distribution = self.teachers.distribution_of(batch)
        stats = forward(
            batch,
            divergence_of=teacher_divergence(batch, how, distribution),
            entropy_gradient=how.entropy_coef > 0,
        )
        return policy_loss(stats, batch, counts, how)


def cross_entropy_loss(
    forward: Forward, batch: Batch, counts: StepCounts
) -> tuple[Tensor, Metrics]:
    """The `LossFunction` of supervised fine-tuning."""
    stats = forward(batch)
    loss, metrics = cross_entropy(stats.logprobs_N, batch.advantages_N, counts)
    metrics["train/entropy"] = stats.entropy_N.sum() / counts.tokens
    return loss, metrics


def reward_model_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """The `LossFunction` of a reward model. Rows come in pairs, the chosen one first."""
    return bradley_terry(forward.scores(batch), counts)
