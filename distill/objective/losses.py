"""Policy losses over the ratio of learner to sampler, per token, and the metrics of ratios.

Pure functions of tensors over trained tokens. `importance_sampling`, `ppo`, `cispo`, `dro` and
`gspo` return one loss per token. `distill.objective.objectives.policy_loss` weights the tokens by
the counts of the *whole* optimizer step and sums them, so the losses of the micro-batches sum to
exactly the loss of the whole batch. Metrics work alike: each is this micro-batch's share of a mean
over the step, to be summed, except the extremes, whose names end in `_max` or `_min`. Advantages
and the log-probs in the denominator of the ratios carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from distill.objective.custom import own_loss
from distill.objective.settings import (
    CORRECTION_CAP,
    ObjectiveConfig,
    is_own,
)

Metrics = dict[str, Tensor]


class StepCounts(NamedTuple):
    """Counts of the whole optimizer step, of which a loss is computed on one micro-batch.

    A sequence is a row, or the rows of all segments of a trajectory.
    """

    tokens: int
    sequences: int


class TokenLoss(NamedTuple):
    """Losses per token, shape (N,), before weighting, and the tokens where a bound acts.

    `side_N` is -1 where a bound removed or weakened the gradient of a token with a ratio below 1,
    1 likewise for a ratio above 1, and 0 elsewhere.
    """

    loss_N: Tensor
    side_N: Tensor


def importance_sampling(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """-r_t A_t with r_t = exp(log pi - log old).

    Its gradient at pi = old is the policy gradient -A_t grad log pi(y_t); away from it each token
    is reweighted by its ratio (Degris et al. 2012, per token).
    """
    ratio_N = _ratio(logprobs_N, old_N)
    return TokenLoss(-ratio_N * advantages_N, torch.zeros_like(ratio_N))


def ppo(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """-max(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), dual_clip A if A < 0).

    Schulman et al. 2017; two bounds: DAPO (Yu et al. 2025); dual clip: Ye et al. 2020. A token
    whose value is that of a bound is clipped: it has no gradient.
    """
    ratio_N = _ratio(logprobs_N, old_N)
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    least_N = torch.where(advantages_N < 0, dual_clip * advantages_N, -math.inf)
    value_N = torch.minimum(free_N, bounded_N)
    clipped_N = (bounded_N < free_N) | (value_N < least_N)
    return TokenLoss(-torch.maximum(value_N, least_N), _side(ratio_N, clipped_N))


def cispo(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log pi, the clipped ratio held fixed.

    MiniMax-M1 (2025). Every token keeps a gradient; a clipped one has its weight bounded.
    """
    ratio_N = _ratio(logprobs_N, old_N).detach()
    weight_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    side_N = _side(ratio_N, weight_N != ratio_N)
    return TokenLoss(-weight_N * advantages_N * logprobs_N, side_N)


def dro(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, beta: float = 0.05
) -> TokenLoss:
    """-(A log pi - beta / 2 (log pi - log old)^2), without a ratio: Richemond et al. 2024."""
    penalty_N = 0.5 * beta * (logprobs_N - old_N).square()
    loss_N = penalty_N - advantages_N * logprobs_N
    return TokenLoss(loss_N, torch.zeros_like(loss_N))


def gspo(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    mean_of_sequence: Callable[[Tensor], Tensor],
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), where s is the ratio of the sequence.

    s = exp(mean_t(log pi - log old)) over the token's sequence; `mean_of_sequence` maps the log
    ratios of a batch's tokens to that mean, for each token. This is GSPO-token (Zheng et al. 2025,
    eq. 13): the value of s is that of the sequence, its gradient that of the token, so advantages
    may differ within a sequence. If they do not, and all sequences have equal weight, the loss is
    GSPO.
    """
    sequence_N = mean_of_sequence((logprobs_N - old_N).detach()).exp()
    ratio_N = sequence_N * (logprobs_N - logprobs_N.detach()).exp()
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return TokenLoss(-torch.minimum(free_N, bounded_N), _side(ratio_N, bounded_N < free_N))


def token_losses(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    how: ObjectiveConfig,
    mean_of_sequence: Callable[[Tensor], Tensor],
) -> TokenLoss:
    """Losses of the kind `how.loss`, with its bounds or their defaults.

    Args:
        mean_of_sequence: function of values (N,) that returns, for each token, the mean over the
            token's whole sequence; for gspo.

    Raises:
        DataError: a custom loss failed.
    """
    old_N, advantages_N = old_N.detach(), advantages_N.detach()
    assert logprobs_N.shape == old_N.shape == advantages_N.shape and logprobs_N.ndim == 1
    low, high = how.clip_bounds
    match how.loss:
        case "importance_sampling":
            return importance_sampling(logprobs_N, old_N, advantages_N)
        case "ppo":
            return ppo(logprobs_N, old_N, advantages_N, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(logprobs_N, old_N, advantages_N, clip_low=low, clip_high=high)
        case "dro":
            return dro(logprobs_N, old_N, advantages_N)
        case "gspo":
            return gspo(
                logprobs_N, old_N, advantages_N, mean_of_sequence,
                clip_low=low, clip_high=high,
            )  # fmt: skip
        case own if is_own(own):
            loss_N = own_loss(own)(logprobs_N, old_N, advantages_N)
            return TokenLoss(loss_N, torch.zeros_like(old_N))
        case unknown:
            raise AssertionError(f"loss={unknown} should have been refused")


def mismatch_weights(
    proximal_N: Tensor, behaviour_N: Tensor, how: ObjectiveConfig
) -> tuple[Tensor, Tensor]:
    """Weights exp(log proximal - log behaviour), bounded, and a mask of where the bound acted.

    `proximal_N` are the learner's log-probs under the weights at the start of the step,
    `behaviour_N` those that the server reported. `truncate` cuts the weight at the cap (Yao et al.
    2025); `mask` drops tokens whose weight is outside [1 / cap, cap] (IcePop: Ling team 2025). The
    weights carry no gradient.
    """
    cap = CORRECTION_CAP if how.correction_cap is None else how.correction_cap
    weight_N = (proximal_N - behaviour_N).exp().detach()
    if how.correction == "truncate":
        return weight_N.clamp(max=cap), weight_N > cap
    dropped_N = (weight_N > cap) | (weight_N < 1 / cap)
    return weight_N.masked_fill(dropped_N, 0), dropped_N


def ratio_metrics(logprobs_N: Tensor, behaviour_N: Tensor, counts: StepCounts) -> Metrics:
    """Metrics of the ratio r of learner to behaviour policy: means over the tokens, and extremes.

    k1 = -log r, k2 = (log r)^2 / 2 and k3 = r - 1 - log r estimate KL(behaviour || pi) from samples
    of the behaviour policy (Schulman 2020); only k1 and k3 are unbiased, only k2 and k3 are never
    negative.
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
# Suffix of means of squares, from which `finish_metrics` computes standard deviations.
SQUARES = "_mean_of_squares"
# Suffix for a metric that covers only a part of the step's tokens: the share of that part.
# `finish_metrics` divides the metric by the share, which turns a mean over all tokens of the step
# into a mean over the covered tokens.
OWN_SHARE = "_own_share"


def add_metrics(made: dict[str, float], more: Mapping[str, float]) -> None:
    """Add a micro-batch's metrics to those of its step, in place.

    Metrics are summed, except those named `*_max` and `*_min`.
    """
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
    """Metrics of a whole step, including those that can only be computed from its sums.

    `train/ess`: the effective sample size (sum r)^2 / (n sum r^2) as a share of the tokens, in
    (0, 1]; 1 if all ratios are equal (Kong 1992). `NAME_std`: the standard deviation that belongs
    to `NAME_mean`. `NAME` with a `NAME_own_share`: the mean over the tokens that the metric covers.
    """
    squared = metrics.pop(_RATIO_SQUARED, None)
    if squared:
        metrics["train/ess"] = metrics["train/ratio"] ** 2 / squared
    for squares in [name for name in metrics if name.endswith(SQUARES)]:
        name = squares.removesuffix(SQUARES)
        variance = metrics.pop(squares) - metrics[f"{name}_mean"] ** 2
        metrics[f"{name}_std"] = math.sqrt(max(0.0, variance))
    for share in [name for name in metrics if name.endswith(OWN_SHARE)]:
        metrics[share.removesuffix(OWN_SHARE)] /= metrics.pop(share)
    return metrics


def _side(ratio_N: Tensor, clipped_N: Tensor) -> Tensor:
    return torch.where(clipped_N, torch.sign(ratio_N.detach() - 1), 0.0)


def _ratio(logprobs_N: Tensor, old_N: Tensor) -> Tensor:
    return (logprobs_N - old_N).exp()
