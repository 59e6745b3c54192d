"""Policy losses over the ratio of learner to sampler, per token, and the metrics of ratios.

Pure functions of tensors over trained tokens. `importance_sampling`, `ppo`, `cispo`, `dro` and
`gspo` give each token its own loss; `distill.objective.objectives.policy_loss` weighs the tokens
by the counts of the *whole* optimizer step and adds them up, so micro-batches add up to exactly the
big batch's loss. Metrics do the same: each is this micro-batch's share of a mean over the step, to
be added up, but for those whose name ends in `_max` or `_min`. Advantages and the log-probs that
ratios are taken against carry no gradient.
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
    """Counts of the whole optimizer step, whatever micro-batch a loss is computed on.

    A sequence is a row, or the rows of all segments of a trajectory.
    """

    tokens: int
    sequences: int


class TokenLoss(NamedTuple):
    """Losses per token, shape (N,), before weighing, and where a bound acts on the gradient.

    `side_N` is -1 where it took or weakened that of a ratio below 1, 1 above, and 0 elsewhere.
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
    """-(A log pi - beta / 2 (log pi - log old)^2): Richemond et al. 2024, per token, no ratio."""
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
    return TokenLoss(-torch.minimum(free_N, bounded_N), _side(ratio_N, bounded_N < free_N))


def token_losses(
    logprobs_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    how: ObjectiveConfig,
    mean_of_sequence: Callable[[Tensor], Tensor],
) -> TokenLoss:
    """The loss named by `how`, with its bounds or their defaults.

    Args:
        mean_of_sequence: of values (N,), the mean of each token's whole sequence; for gspo.

    Raises:
        DataError: a loss of the user's own failed.
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
# Suffix of means of squares, from which `finish_metrics` makes standard deviations.
SQUARES = "_mean_of_squares"
# Suffix of the share of the step's tokens that a metric's tokens are: `finish_metrics` divides the
# metric by it, which makes a mean over all tokens one over its own.
OWN_SHARE = "_own_share"


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
    (0, 1]; 1 where every ratio is the same (Kong 1992). `NAME_std`: the standard deviation of what
    `NAME_mean` is the mean of. `NAME` with a `NAME_own_share`: the mean over its own tokens.
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
