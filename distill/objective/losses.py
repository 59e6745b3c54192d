"""Losses: pure functions from tensors over trained tokens to `(loss, metrics)`.

A policy loss has two halves. `importance_sampling`, `ppo`, `cispo`, `dro` and `gspo` give each
token its own loss; `policy_loss` weighs the tokens by the counts of the *whole* optimizer step and
adds them up, so micro-batches add up to exactly the big batch's loss. Metrics do the same: each is
this micro-batch's share of a mean over the step, to be added up, but for those whose name ends in
`_max` or `_min`. Advantages and the log-probs that ratios are taken against carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from distill.models.logprobs import TokenStats
from distill.objective.batching import Batch
from distill.objective.settings import (
    CLIP,
    CORRECTION_CAP,
    DRO_BETA,
    DUAL_CLIP,
    Normalisation,
    ObjectiveConfig,
    PolicyObjective,
)

Metrics = dict[str, Tensor]


class StepCounts(NamedTuple):
    """Counts of the whole optimizer step, whatever micro-batch a loss is computed on.

    A sequence is a row, or the rows of all segments of a trajectory.
    """

    tokens: int
    sequences: int


class TokenLoss(NamedTuple):
    """Losses per token, shape (N,), before weighing, and whether a bound took the gradient."""

    loss_N: Tensor
    clipped_N: Tensor


def importance_sampling(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """-r_t A_t with r_t = exp(log pi - log old).

    Its gradient at pi = old is the policy gradient -A_t grad log pi(y_t); away from it each token
    is reweighted by its ratio (Degris et al. 2012, per token).
    """
    ratio_N = _ratio(logprobs_N, old_N)
    return TokenLoss(-ratio_N * advantages_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def ppo(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and for A < 0 at least dual_clip A.

    Schulman et al. 2017; two bounds: DAPO (Yu et al. 2025); dual clip: Ye et al. 2020. A token is
    clipped, without gradient, where a bound is the smaller one.
    """
    ratio_N = _ratio(logprobs_N, old_N)
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    least_N = torch.where(advantages_N < 0, dual_clip * advantages_N, -math.inf)
    value_N = torch.minimum(free_N, bounded_N)
    clipped_N = (bounded_N < free_N) | (value_N < least_N)
    return TokenLoss(-torch.maximum(value_N, least_N), clipped_N)


def cispo(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log pi, the clipped ratio held fixed.

    MiniMax-M1 (2025). Every token keeps a gradient; a clipped one has its weight bounded.
    """
    ratio_N = _ratio(logprobs_N, old_N).detach()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-weight_N * advantages_N * logprobs_N, weight_N != ratio_N)


def dro(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, beta: float) -> TokenLoss:
    """-(A log pi - beta / 2 (log pi - log old)^2): Richemond et al. 2024, per token, no ratio."""
    penalty_N = 0.5 * beta * (logprobs_N - old_N).square()
    loss_N = penalty_N - advantages_N * logprobs_N
    return TokenLoss(loss_N, torch.zeros_like(loss_N, dtype=torch.bool))


def gspo(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    mean_of_sequence: Callable[[Tensor], Tensor],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the sequence's ratio per token.

    s = exp(mean_t(log pi - log old)) of the token's own sequence, of which `mean_of_sequence` gives
    each token the mean, from the log ratios of these. GSPO-token of Zheng et al. 2025 (eq.
    13): the value is the sequence's, each token's gradient its own, so that advantages may differ
    within a sequence; where they do not, and sequences are weighed alike, it is GSPO itself.
    """
    sequence_N = mean_of_sequence((logprobs_N - old_N).detach()).exp()
    ratio_N = sequence_N * (logprobs_N - logprobs_N.detach()).exp()
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return TokenLoss(-torch.minimum(free_N, bounded_N), bounded_N < free_N)


def own_advantages(logprobs_N: Tensor, batch: Batch, how: ObjectiveConfig) -> Tensor:
    """The batch's advantages with the learner's own log pi wherever they have the sampler's log mu.

        A_t - b d_t - sum_{s >= t} g^{s-t} c_s d_s    with    d = log pi - log mu, no gradient

    b is `reference_kl_coef`, c the weight of the teacher's sampled term and g `kl_discount_factor`;
    the sum goes on through the following rows of the sequence. Under tokens of mu and the ratio
    pi / mu, A = c (log q - log pi) has the gradient of -c KL(pi || q); log mu in place of log pi,
    that of -c (KL(pi || q) - KL(pi || mu)), which drives pi away from the policy that sampled. What
    centres the reference's term is a baseline: it stays as it was sampled, one for the whole step.
    """
    moved_N = (logprobs_N - batch.behaviour_logprobs_N).detach()
    advantages_N = batch.weights_N.detach()
    if how.reference_kl_coef:
        advantages_N = advantages_N - how.reference_kl_coef * moved_N
    if (coef_N := batch.sampled_kl_coef_N) is not None:
        after_B = batch.of_rows([row.other_rows.future_kl for row in batch.rows])
        moved_kl_N = coef_N.to(moved_N.dtype) * moved_N
        advantages_N = advantages_N - batch.future_sum(moved_kl_N, how.kl_discount_factor, after_B)
    return advantages_N


def mean_of_sequence(log_ratio_N: Tensor, batch: Batch) -> Tensor:
    """The mean log ratio of each token's whole sequence, shape (N,)."""
    others_B = batch.of_rows([row.other_rows.log_ratio for row in batch.rows])
    return ((batch.sum_by_row(log_ratio_N) + others_B) / batch.sequence_tokens())[batch.row_N]


def token_losses(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, batch: Batch, how: PolicyObjective
) -> TokenLoss:
    """The loss named by `how`, with its bounds or their defaults."""
    old_N, advantages_N = old_N.detach(), advantages_N.detach()
    assert logprobs_N.shape == old_N.shape == advantages_N.shape and logprobs_N.ndim == 1
    low, high = CLIP.get(how.loss, (0.0, 0.0))
    low = low if how.clip_low is None else how.clip_low
    high = high if how.clip_high is None else how.clip_high
    match how.loss:
        case "importance_sampling":
            return importance_sampling(logprobs_N, old_N, advantages_N)
        case "ppo":
            return ppo(
                logprobs_N, old_N, advantages_N,
                clip_low=low, clip_high=high, dual_clip=how.dual_clip or DUAL_CLIP,
            )  # fmt: skip
        case "cispo":
            return cispo(logprobs_N, old_N, advantages_N, clip_low=low, clip_high=high)
        case "dro":
            return dro(logprobs_N, old_N, advantages_N, beta=how.dro_beta or DRO_BETA)
        case "gspo":
            return gspo(
                logprobs_N, old_N, advantages_N, partial(mean_of_sequence, batch=batch),
                clip_low=low, clip_high=high,
            )  # fmt: skip
        case unknown:
            raise AssertionError(f"loss={unknown} should have been refused")


def mismatch_weights(
    proximal_N: Tensor, behaviour_N: Tensor, how: PolicyObjective
) -> tuple[Tensor, Tensor]:
    """exp(log proximal - log behaviour), bounded, without gradient; and where the bound acted.

    proximal are the learner's log-probs of the weights it starts the step with, behaviour those
    that the server reported. `truncate` cuts the weight at the cap (Yao et al. 2025); `mask` drops
    tokens whose weight is outside [1 / cap, cap] (IcePop: Ling team 2025).
    """
    cap = CORRECTION_CAP if how.correction_cap is None else how.correction_cap
    weight_N = (proximal_N - behaviour_N).exp().detach()
    if how.correction == "truncate":
        return weight_N.clamp(max=cap), weight_N > cap
    dropped_N = (weight_N > cap) | (weight_N < 1 / cap)
    return weight_N.masked_fill(dropped_N, 0), dropped_N


def normaliser(batch: Batch, counts: StepCounts, how: Normalisation) -> Tensor:
    """Loss weight of each token, shape (N,): one over the step's tokens, or over its sequences
    times the tokens of the token's own sequence."""
    if how == "token":
        return torch.ones_like(batch.weights_N) / counts.tokens
    return 1 / (counts.sequences * batch.sequence_tokens()[batch.row_N])


def policy_loss(
    stats: TokenStats, batch: Batch, counts: StepCounts, how: ObjectiveConfig
) -> tuple[Tensor, Metrics]:
    """The policy loss, less the entropy bonus, plus the divergence from the teacher.

    Args:
        stats: of the learner's present weights; `divergence_N` where a divergence is trained on.
        batch: `weights_N` are the advantages, in which every log p is the sampler's.

    Metrics: `train/ratio` and its extremes, against the server's log-probs; `train/logprob_gap`;
    `train/approx_kl_k1` to `k3`; `train/ess_*`, from which `finish_metrics` makes the effective
    sample size; `train/clip_share`, `train/correction_share`; `train/entropy`;
    `opd/divergence` where there is one.
    """
    logprobs_N, behaviour_N = stats.logprobs_N, batch.behaviour_logprobs_N
    weight_N, corrected_N = torch.ones_like(behaviour_N), None
    old_N = behaviour_N
    if how.correction != "none":
        # Before the first update of a step the learner is its own proximal policy.
        proximal_N = batch.proximal_logprobs_N
        old_N = logprobs_N.detach() if proximal_N is None else proximal_N
        weight_N, corrected_N = mismatch_weights(old_N, behaviour_N, how)
    made = token_losses(logprobs_N, old_N, own_advantages(logprobs_N, batch, how), batch, how)
    scale_N = normaliser(batch, counts, how.normalisation)
    per_token_N = weight_N * made.loss_N
    if how.entropy_coef:
        per_token_N = per_token_N - how.entropy_coef * stats.entropy_N
    if stats.divergence_N is not None:
        per_token_N = per_token_N + batch.teacher_coef_N * stats.divergence_N
    metrics = ratio_metrics(logprobs_N.detach(), behaviour_N, counts)
    metrics["train/clip_share"] = made.clipped_N.sum() / counts.tokens
    metrics["train/entropy"] = stats.entropy_N.detach().sum() / counts.tokens
    if corrected_N is not None:
        metrics["train/correction_share"] = corrected_N.sum() / counts.tokens
    if stats.divergence_N is not None:
        metrics["opd/divergence"] = stats.divergence_N.detach().sum() / counts.tokens
    return (scale_N * per_token_N).sum(), metrics


def ratio_metrics(logprobs_N: Tensor, behaviour_N: Tensor, counts: StepCounts) -> Metrics:
    """Metrics of the ratio of learner to behaviour policy: means over the step's tokens, extremes.

    k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r estimate KL(behaviour || pi) from samples
    of behaviour (Schulman 2020); only k1 and k3 are unbiased, only k2 and k3 never negative.
    """
    log_ratio_N = logprobs_N - behaviour_N
    ratio_N = log_ratio_N.exp()
    means = {
        "train/ratio": ratio_N,
        "train/logprob_gap": log_ratio_N.abs(),
        "train/approx_kl_k1": -log_ratio_N,
        "train/approx_kl_k2": 0.5 * log_ratio_N.square(),
        "train/approx_kl_k3": ratio_N - 1 - log_ratio_N,
        _RATIO_SQUARED: ratio_N.square(),
    }
    return {name: values_N.sum() / counts.tokens for name, values_N in means.items()} | {
        "train/ratio_max": ratio_N.max(),
        "train/ratio_min": ratio_N.min(),
    }


_RATIO_SQUARED = "train/ratio_squared"


def add_metrics(made: dict[str, float], more: Mapping[str, float]) -> None:
    """Adds a micro-batch's metrics to those of its step: sums, and extremes by their names."""
    for name, value in more.items():
        if name not in made:
            made[name] = value
        elif name.endswith("_max"):
            made[name] = max(made[name], value)
        elif name.endswith("_min"):
            made[name] = min(made[name], value)
        else:
            made[name] += value


def finish_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """A whole step's metrics, with those added that can only be computed from the sums.

    `train/ess`: the effective sample size (sum r)^2 / (n sum r^2) as a share of the tokens, in
    (0, 1]; 1 where every ratio is the same (Kong 1992).
    """
    squared = metrics.pop(_RATIO_SQUARED, None)
    if squared:
        metrics["train/ess"] = metrics["train/ratio"] ** 2 / squared
    return metrics


def cross_entropy(
    logprobs_N: Tensor, weights_N: Tensor, counts: StepCounts
) -> tuple[Tensor, Metrics]:
    """-sum_t w_t log p(y_t) / tokens: plain supervised fine-tuning on the tokens given."""
    assert logprobs_N.shape == weights_N.shape and logprobs_N.ndim == 1
    loss = -(weights_N * logprobs_N).sum() / counts.tokens
    return loss, {"train/nll": -logprobs_N.detach().sum() / counts.tokens}


def dpo(
    logprobs_D: Tensor, reference_D: Tensor, counts: StepCounts, *, beta: float
) -> tuple[Tensor, Metrics]:
    """-mean over pairs of log sigmoid(beta ((log pi - log ref)(chosen) - (...)(rejected))).

    Rafailov et al. 2023. Log-probs are sums over a response's tokens, shape (rows,): the chosen one
    of each pair, then its rejected one.

    Metrics, means over pairs: `dpo/accuracy` (share of pairs whose chosen response has the higher
    implicit reward beta (log pi - log ref)), `dpo/margin`, `dpo/chosen_reward`,
    `dpo/rejected_reward`.
    """
    assert logprobs_D.shape == reference_D.shape and len(logprobs_D) % 2 == 0
    pairs = counts.sequences // 2
    chosen_P, rejected_P = (beta * (logprobs_D - reference_D)).view(-1, 2).unbind(dim=1)
    margin_P = chosen_P - rejected_P
    loss = -logsigmoid(margin_P).sum() / pairs
    means = {
        "dpo/accuracy": (margin_P > 0).float(),
        "dpo/margin": margin_P.detach(),
        "dpo/chosen_reward": chosen_P.detach(),
        "dpo/rejected_reward": rejected_P.detach(),
    }
    return loss, {name: values_P.sum() / pairs for name, values_P in means.items()}


def _ratio(logprobs_N: Tensor, old_N: Tensor) -> Tensor:
    return (logprobs_N - old_N).exp()
