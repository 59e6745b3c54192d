"""Loss functions for rollouts, supervised rows, preference pairs and reward models.

Each runs the forward pass itself (`LossFunction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from distill.objective.batching import Batch
from distill.objective.losses import OWN_SHARE, Metrics, StepCounts
from distill.objective.objectives import (
    TeacherDistribution,
    bradley_terry,
    cross_entropy,
    dpo,
    policy_loss,
    teacher_cross_entropy,
    teacher_divergence,
)
from distill.objective.settings import Normalisation, ObjectiveConfig
from learner.forward import Forward, LossFunction
from learner.teachers import LocalTeachers


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjectiveLoss:
    """The `LossFunction` of rollouts: policy loss, entropy bonus, divergence from the teacher.

    Attributes:
        teachers: teachers in the learner; needed only for estimator=full.
        own_teacher: the learner's own model is the teacher instead (`learner.teachers`).
        stop_event: tokens that are one outcome (`distill.stops`), also in the forward pass.
    """

    objective: ObjectiveConfig
    teachers: LocalTeachers | None = None
    own_teacher: bool = False
    stop_event: tuple[int, ...] = ()

    @property
    def needs_distribution(self) -> bool:
        """True if the loss must be called with the teacher's distribution."""
        return self.objective.estimator == "full" and self.objective.kl_coef != 0

    def __call__(
        self,
        forward: Forward,
        batch: Batch,
        counts: StepCounts,
        distribution: TeacherDistribution | None = None,
    ) -> tuple[Tensor, Metrics]:
        """`distribution`: distribution of the teacher, if `needs_distribution`."""
        how = self.objective
        stats = forward(
            batch,
            divergence_of=teacher_divergence(batch, how, distribution),
            entropy_gradient=how.entropy_coef > 0,
        )
        return policy_loss(stats, batch, counts, how)


def policy_loss_of(losses: Sequence[LossFunction]) -> PolicyObjectiveLoss:
    """The rollout loss, which is the first of a policy learner's losses."""
    loss = losses[0]
    assert isinstance(loss, PolicyObjectiveLoss)
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSamplesLoss:
    """The `LossFunction` of groups that the teacher sampled: cross-entropy at the groups' T."""

    normalisation: Normalisation

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        return teacher_cross_entropy(forward(batch).logprobs_N, batch, counts, self.normalisation)


def cross_entropy_loss(
    forward: Forward, batch: Batch, counts: StepCounts
) -> tuple[Tensor, Metrics]:
    """The `LossFunction` of supervised fine-tuning."""
    stats = forward(batch)
    loss, metrics = cross_entropy(stats.logprobs_N, batch.advantages_N, counts)
    metrics["train/entropy"] = stats.entropy_N.sum() / counts.tokens
    return loss, metrics | _nll_by_source(stats.logprobs_N.detach(), batch, counts)


def _nll_by_source(logprobs_N: Tensor, batch: Batch, counts: StepCounts) -> Metrics:
    """`train/nll/source=NAME` for rows with the name of one of several sources."""
    nll_B = -batch.sum_by_row(logprobs_N)
    metrics: Metrics = {}
    for source in sorted({row.data_source for row in batch.rows} - {""}):
        own_B = batch.of_rows([row.data_source == source for row in batch.rows])
        trained_B = batch.of_rows([row.num_trained for row in batch.rows])
        name = f"train/nll/source={source}"
        metrics[name] = (nll_B * own_B).sum() / counts.tokens
        metrics[f"{name}{OWN_SHARE}"] = (trained_B * own_B).sum() / counts.tokens
    return metrics


def reward_model_loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
    """The `LossFunction` of a reward model. Rows come in pairs, the chosen one first."""
    return bradley_terry(forward.scores(batch), counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The `LossFunction` of DPO. Rows are pairs, the chosen one first, with reference log-probs.

    `sft_coef` is the coefficient of the chosen response's mean negative log-likelihood per token,
    averaged over pairs (Pang et al. 2024): DPO alone may lower the likelihood of both responses.
    """

    beta: float
    sft_coef: float = 0.0

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        stats = forward(batch)
        assert batch.reference_logprobs_N is not None, "the rows lack the reference's log-probs"
        loss, metrics = dpo(
            batch.sum_by_row(stats.logprobs_N),
            batch.sum_by_row(batch.reference_logprobs_N),
            counts,
            beta=self.beta,
        )
        metrics["train/entropy"] = stats.entropy_N.sum() / counts.tokens
        chosen_nll_P = -batch.mean_by_row(stats.logprobs_N)[::2]
        nll = chosen_nll_P.sum() / (counts.sequences // 2)
        metrics["dpo/chosen_nll"] = nll.detach()
        return loss + self.sft_coef * nll, metrics
