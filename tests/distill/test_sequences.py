"""Trajectories of several segments are one sequence across micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distill.models.logprobs import TokenStats
from distill.objective.batching import TrainingRow, collate
from distill.objective.losses import StepCounts
from distill.objective.objectives import policy_loss
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import Segment, TrajectoryGroup
from tests.loss_twin import gradient_of, twin
from tests.samples import segment, trajectory
from tests.sequences import with_other_rows

TURNS = [False, True, True, False, False, True, True, True]
# Sequences of three, one and two segments; untrained tokens between two turns of one.


def made(prompt: int, actions: int, seed: int, **changes: Any) -> Segment:
    reference_T = np.random.default_rng(seed).normal(-3, 1, prompt + actions).astype(np.float32)
    return segment(prompt, actions, seed=seed, reference_logprobs_T=reference_T, **changes)


GROUP = TrajectoryGroup(
    group_id=3,
    trajectories_G=(
        trajectory(
            made(3, 4, 1), made(1, 7, 2, action_mask_T=TURNS, versions_T=[0] * 8), made(2, 2, 3),
            reward=1.0,
        ),
        trajectory(made(4, 5, 4)),
        trajectory(made(2, 1, 5), made(5, 3, 6)),
    ),
)  # fmt: skip
SIZES = [[4, 5, 2], [5], [1, 3]]
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"normalisation": "sequence"},
    "discounted": {"kl_discount_factor": 0.8},
    "undiscounted, sequence": {"kl_discount_factor": 1.0, "normalisation": "sequence"},
    "reference": {"reference_kl_coef": 0.4},
    "reference, discounted": {"reference_kl_coef": 0.4, "kl_discount_factor": 0.8},
    "reference, discounted, beside a divergence": {
        "reference_kl_coef": 0.4, "kl_discount_factor": 0.8, "estimator": "full",
    },
    "clipped, discounted": {"kl_clip": 0.6, "kl_discount_factor": 0.8},
    "clipped, reference, discounted": {
        "kl_clip": 0.6, "reference_kl_coef": 0.4, "kl_discount_factor": 0.8,
    },
    "gspo": {"loss": "gspo", "clip": 0.1},
    "gspo, sequence, discounted": {
        "loss": "gspo", "clip": 10.0, "kl_discount_factor": 0.5,
        "normalisation": "sequence",
    },
    "gspo, corrected": {"loss": "gspo", "correction": "truncate", "kl_discount_factor": 0.5},
}  # fmt: skip


def proximal(rows_D: Sequence[TrainingRow]) -> list[TrainingRow]:
    rng = np.random.default_rng(5)
    return [
        replace(
            row,
            proximal_logprobs_T=row.behaviour_logprobs_T
            + rng.normal(0, 0.1, len(row)).astype(np.float32),
        )
        for row in rows_D
    ]


def present_logprobs(rows_D: Sequence[TrainingRow]) -> list[np.ndarray]:
    """The learner's log-probs, near the sampler's."""
    made = []
    for row in rows_D:
        rng = np.random.default_rng(int(row.tokens_T.sum()))
        behaviour_N = row.behaviour_logprobs_T[row.loss_mask_T]
        made.append(behaviour_N + rng.normal(0, 0.3, len(behaviour_N)).astype(np.float32))
    return made


def gradients(
    rows_D: Sequence[TrainingRow], how: ObjectiveConfig, counts: StepCounts
) -> tuple[float, list[float]]:
    """Loss, and gradient by the log-prob of each token, of one micro-batch."""
    logprobs_N = torch.from_numpy(np.concatenate(present_logprobs(rows_D))).requires_grad_(True)
    stats = TokenStats(logprobs_N, torch.zeros_like(logprobs_N))
    loss, _ = policy_loss(stats, collate(rows_D), counts, how)
    return loss.item(), gradient_of(loss, logprobs_N)


def written_out(
    rows_D: Sequence[TrainingRow], how: ObjectiveConfig, counts: StepCounts
) -> list[float]:
    """Gradients by sequence and token."""
    rows, gradients = iter(rows_D), []
    gaps = [
        (each.behaviour_logprobs_T - each.reference_logprobs_T)[each.action_mask_T]
        for each in GROUP.segments()
        if each.reference_logprobs_T is not None
    ]
    mean_kl = np.concatenate(gaps).mean()
    for member, sizes in zip(GROUP.trajectories_G, SIZES, strict=True):
        of_sequence = [next(rows) for _ in sizes]
        log_pi = np.concatenate(present_logprobs(of_sequence)).tolist()
        log_mu, log_old, log_q, log_ref = [], [], [], []
        for row, each in zip(of_sequence, member.segments, strict=True):
            mask_T = row.loss_mask_T
            log_mu += row.behaviour_logprobs_T[mask_T].tolist()
            corrected = how.correction != "none"
            proximal_T = row.proximal_logprobs_T if corrected else row.behaviour_logprobs_T
            given = proximal_T, each.teacher_logprobs_T, each.reference_logprobs_T
            for column, values_T in zip((log_old, log_q, log_ref), given, strict=True):
                assert values_T is not None
                column += values_T[mask_T].tolist()
        ratio = math.exp(sum(np.subtract(log_pi, log_old)) / sum(sizes))
        for t in range(sum(sizes)):
            A = how.reward_coef * (member.reward - 1 / 3)
            for s in range(t, sum(sizes)):
                discount = how.kl_discount_factor ** (s - t)
                if how.estimator == "sampled":
                    clip = how.kl_clip or math.inf
                    A -= how.kl_coef * discount * min(max(log_pi[s] - log_q[s], -clip), clip)
                A += how.reference_kl_coef * discount * (mean_kl - (log_pi[s] - log_ref[s]))
            scale = 1 / counts.tokens
            if how.normalisation == "sequence":
                scale = 1 / (len(SIZES) * sum(sizes))
            weight = 1.0
            if how.correction == "truncate":
                weight = min(2.0, math.exp(log_old[t] - log_mu[t]))
            gradients.append(scale * weight * twin(how, log_pi[t], log_old[t], A, ratio).gradient)
    return gradients


@pytest.mark.parametrize("settings", HOW.values(), ids=HOW)
def test_a_sequence_is_one_wherever_its_rows_are(settings: dict[str, Any]) -> None:
    how = ObjectiveConfig(**settings, kl_coef=0.7, reward_coef=2.0)
    bare = policy_rows([GROUP], how)
    if how.correction != "none":
        bare = proximal(bare)
    rows = with_other_rows(bare, how, present_logprobs)
    counts = StepCounts(sum(map(sum, SIZES)), sum(row.ends_sequence for row in rows))
    assert counts == (20, 3)
    loss, made = gradients(rows, how, counts)
    assert made == pytest.approx(written_out(rows, how, counts), rel=1e-4, abs=1e-6)
    order = [4, 2, 0, 5, 1, 3]
    apart = {i: gradients([rows[i]], how, counts) for i in order}
    assert sum(loss for loss, _ in apart.values()) == pytest.approx(loss, rel=1e-5)
    assert [g for i in range(6) for g in apart[i][1]] == pytest.approx(made, rel=1e-5, abs=1e-7)
