"""Policy loss of a micro-batch, built from an objective's settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from distill.models.logprobs import DivergenceOf
from distill.objective.batching import Batch
from distill.objective.divergences import coarse, divergence, top_of_reverse_kl, with_tail
from distill.objective.losses import Metrics, StepCounts, cross_entropy, policy_loss
from distill.objective.settings import DEFAULT_JSD_BETA, ObjectiveConfig
from learner.forward import Forward
from learner.teachers import LocalTeachers


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjectiveLoss:
    """The `LossFunction` of rollouts: policy loss, entropy bonus, divergence from the teacher.

    `teachers` are needed by estimator=full alone.
    """

    objective: ObjectiveConfig
    teachers: LocalTeachers | None = None

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        stats = forward(
            batch,
            divergence_of=self._divergence_of(batch),
            entropy_gradient=self.objective.entropy_coef > 0,
        )
        return policy_loss(stats, batch, counts, self.objective)

    def _divergence_of(self, batch: Batch) -> DivergenceOf | None:
        how = self.objective
        if how.estimator == "sampled" or not how.kl_coef:
            return None
        jsd_beta = DEFAULT_JSD_BETA if how.jsd_beta is None else how.jsd_beta
        if how.estimator == "full":
            assert self.teachers is not None, "estimator=full needs the teachers in the learner"
            return self.teachers.divergence_of(batch, how.divergence, jsd_beta)
        ids_NK, log_q_NK = batch.teacher_top_ids_NK, batch.teacher_top_logprobs_NK
        assert ids_NK is not None and log_q_NK is not None, "the rows lack the teacher's top_k"

        def of_top(log_p_NV: Tensor, positions: slice) -> Tensor:
            ids_nK, log_q_nK = ids_NK[positions], log_q_NK[positions]
            if how.tail == "sampled":
                return top_of_reverse_kl(log_p_NV, ids_nK, log_q_nK)
            return divergence(
                coarse(log_p_NV, ids_nK), with_tail(log_q_nK), how.divergence, jsd_beta
            )

        return of_top


def cross_entropy_loss(
    forward: Forward, batch: Batch, counts: StepCounts
) -> tuple[Tensor, Metrics]:
    """The `LossFunction` of supervised fine-tuning."""
    stats = forward(batch)
    loss, metrics = cross_entropy(stats.logprobs_N, batch.weights_N, counts)
    metrics["train/entropy"] = stats.entropy_N.sum() / counts.tokens
    return loss, metrics
