"""Reference of the policy losses as in their papers: token by token, in float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distill.models.logprobs import TokenStats
from distill.objective.batching import Batch, TrainingRow, collate
from distill.objective.losses import StepCounts
from distill.objective.settings import ObjectiveConfig
from tests.samples import training_row


class Drawn(NamedTuple):
    """Batch in float64, the learner's values for its tokens, and a step that has more rows."""

    batch: Batch
    stats: TokenStats
    counts: StepCounts


def rows_of(seed: int, *, proximal: bool = False) -> list[TrainingRow]:
    rows = [training_row(2 + i, 3 + 4 * i, seed=10 * seed + i) for i in range(3)]
    if not proximal:
        return rows
    rng = np.random.default_rng(seed)
    return [
        replace(
            row,
            proximal_logprobs_T=row.behaviour_logprobs_T
            + rng.normal(scale=0.8, size=len(row)).astype(np.float32),
        )
        for row in rows
    ]


def drawn(seed: int, *, divergence: bool = False, proximal: bool = False) -> Drawn:
    """Batch with learner log-probs around the behaviour's, so that ratios lie around 1."""
    batch = in_float64(collate(rows_of(seed, proximal=proximal)))
    size = len(batch.tokens_N)
    generator = torch.Generator().manual_seed(seed)
    noise_N, coef_N, entropy_N, divergence_N = torch.randn(
        4, size, generator=generator, dtype=torch.float64
    )
    old_N = batch.proximal_logprobs_N if proximal else batch.behaviour_logprobs_N
    assert old_N is not None
    stats = TokenStats(
        (old_N + 0.5 * noise_N).requires_grad_(True),
        entropy_N.abs().requires_grad_(True),
        divergence_N.abs().requires_grad_(True) if divergence else None,
    )
    return Drawn(replace(batch, teacher_coef_N=coef_N.abs()), stats, StepCounts(size + 5, 7))


def in_float64(batch: Batch) -> Batch:
    proximal_N = batch.proximal_logprobs_N
    return replace(
        batch,
        advantages_N=batch.advantages_N.double(),
        behaviour_logprobs_N=batch.behaviour_logprobs_N.double(),
        proximal_logprobs_N=None if proximal_N is None else proximal_N.double(),
    )


class Twin(NamedTuple):
    """Loss of one token, its gradient with respect to the log-prob, and the clipped side.

    `side` is -1 for a ratio clipped below 1, 1 above, and 0 for no clipping.
    """

    loss: float
    gradient: float
    side: int


def bounds(how: ObjectiveConfig) -> tuple[float, float]:
    low, high = how.clip_bounds
    return 1 - low, 1 + high


def twin(how: ObjectiveConfig, log_pi: float, log_old: float, A: float, sequence: float) -> Twin:
    """Losses as in their papers, token by token; `sequence` is the row's ratio."""
    low, high = bounds(how)
    ratio = sequence if how.loss == "gspo" else math.exp(log_pi - log_old)
    if how.loss == "importance_sampling":
        return Twin(-ratio * A, -ratio * A, 0)
    if how.loss == "dro":
        beta = 0.05
        gap = log_pi - log_old
        return Twin(-(A * log_pi - beta / 2 * gap**2), -(A - beta * gap), 0)
    of_ratio = -1 if ratio < 1 else 1
    clipped_ratio = low if ratio < low else high if ratio > high else ratio
    if how.loss == "cispo":
        weight = clipped_ratio * A
        return Twin(-weight * log_pi, -weight, of_ratio if clipped_ratio != ratio else 0)
    value, clipped = ratio * A, False
    if clipped_ratio * A < value:
        value, clipped = clipped_ratio * A, True
    if how.loss == "ppo" and A < 0:
        least = 3.0 * A
        if value < least:
            value, clipped = least, True
    return Twin(-value, 0.0 if clipped else -ratio * A, of_ratio if clipped else 0)


def tokens_of(batch: Batch) -> list[list[int]]:
    """Mask of the N tokens that each row has."""
    return [
        [n for n in range(len(batch.tokens_N)) if batch.row_N[n] == b]
        for b in range(len(batch.rows))
    ]


class Written(NamedTuple):
    loss: float
    gradients: list[float]
    clip_share: float
    clip_low_share: float


def written_out(how: ObjectiveConfig, made: Drawn, old: Sequence[float]) -> Written:
    """Policy loss without corrections, by loops over rows and tokens."""
    batch, stats, counts = made
    loss, sides, gradients = 0.0, [], [0.0] * len(batch.tokens_N)
    for tokens in tokens_of(batch):
        mean = 0.0
        for n in tokens:
            mean += (stats.logprobs_N[n].item() - old[n]) / len(tokens)
        for n in tokens:
            A = batch.advantages_N[n].item()
            one = twin(how, stats.logprobs_N[n].item(), old[n], A, math.exp(mean))
            scale = 1 / counts.tokens
            if how.normalisation == "sequence":
                scale = 1 / (counts.sequences * len(tokens))
            total = one.loss - how.entropy_coef * stats.entropy_N[n].item()
            if stats.divergence_N is not None:
                total += batch.teacher_coef_N[n].item() * stats.divergence_N[n].item()
            loss += scale * total
            gradients[n] = scale * one.gradient
            sides.append(one.side)
    clipped = sum(map(abs, sides)) / counts.tokens
    return Written(loss, gradients, clipped, sides.count(-1) / counts.tokens)


def gradient_of(loss: Tensor, values_N: Tensor) -> list[float]:
    return torch.autograd.grad(loss, values_N, retain_graph=True)[0].tolist()
