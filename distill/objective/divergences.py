"""Divergences between the student p_T and the teacher q_T, both at one temperature.

All functions take log-probs of shape (N, V), one distribution per row, and return fp32 nats of
shape (N,). The results are exact sums over the columns. The columns are the vocabulary or a coarser
partition of it (`coarse`): some likely tokens and one bucket for all others. No mass is lost, so
the divergence over a partition is a divergence too: never negative, zero where the partitions
agree, and at most the divergence over the whole vocabulary (the data-processing inequality).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distill.objective.advantages import clipped
from distill.objective.custom import own_divergence

# Smallest mass of a teacher's tail, which is 1 minus the mass of its top K and so carries their
# rounding errors, about 1e-6 in fp32. An empty tail would make the divergence infinite.
TAIL_FLOOR = 1e-6
# Log-prob of zero mass: finite, so that its gradient is 0 and not NaN.
NO_MASS = -1e4


def kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p(v) (log p(v) - log q(v))."""
    assert log_p_NV.shape == log_q_NV.shape, "the distributions are over different things"
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=-1)


def clipped_reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor, kl_clip: float) -> Tensor:
    """sum_v p(v) clip(log p(v) - log q(v)), the clipped log ratio held fixed in the gradient.

    This is not a divergence, but the mean of the sampled estimator with the same clip. Its gradient
    tends to that of KL(p || q) as the clip grows.
    """
    assert log_p_NV.shape == log_q_NV.shape, "the distributions are over different things"
    gap_NV = clipped((log_p_NV - log_q_NV).detach(), kl_clip)
    return (log_p_NV.exp() * gap_NV).sum(dim=-1)


def generalised_jsd(log_p_NV: Tensor, log_q_NV: Tensor, beta: float) -> Tensor:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (Agarwal et al. 2024).

    beta in (0, 1) is the teacher's share. The gradient with respect to p tends to that of
    beta * KL(q || p) as beta goes to 0, and of (1 - beta) * KL(p || q) as it goes to 1.
    """
    log_m_NV = torch.logaddexp(log_q_NV + math.log(beta), log_p_NV + math.log1p(-beta))
    return beta * kl(log_q_NV, log_m_NV) + (1 - beta) * kl(log_p_NV, log_m_NV)


def divergence(log_p_NV: Tensor, log_q_NV: Tensor, name: str, jsd_beta: float) -> Tensor:
    """Divergence called `name` between the student's `log_p_NV` and the teacher's `log_q_NV`.

    Raises:
        DataError: a custom divergence (`module:function`) failed.
    """
    match name:
        case "reverse_kl":
            return kl(log_p_NV, log_q_NV)
        case "forward_kl":
            return kl(log_q_NV, log_p_NV)
        case "jsd":
            return generalised_jsd(log_p_NV, log_q_NV, jsd_beta)
        case own:
            return own_divergence(own)(log_p_NV, log_q_NV)


def shared_columns(log_p_NV: Tensor, log_q_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Restrict both distributions to the token ids that both vocabularies have.

    The surplus columns of the wider one are padding ids that no tokenizer uses. They are cut off
    and the remaining columns are normalised again, which adds a constant to the log-probs of each
    row. For the teacher's rows, this constant does not change the gradient of a reverse KL.
    """
    width = min(log_p_NV.shape[1], log_q_NV.shape[1])
    return _first_columns(log_p_NV, width), _first_columns(log_q_NV, width)


def _first_columns(logprobs_NV: Tensor, width: int) -> Tensor:
    if logprobs_NV.shape[1] == width:
        return logprobs_NV
    return logprobs_NV[:, :width].log_softmax(dim=1)


def without_padding(width: int, ids_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """log q of the teacher's likeliest tokens, conditional on sampling none of the listed padding.

    Padding means ids from `width` on, which are beyond the student's vocabulary. Padding that is
    not listed stays in the rest; each such id has at most the mass of the least likely listed
    token.
    """
    padding_NK = ids_NK >= width
    if not bool(padding_NK.any()):
        return log_q_NK
    mass_N1 = log_q_NK.exp().masked_fill(~padding_NK, 0.0).sum(dim=1, keepdim=True)
    kept_N1 = (1 - mass_N1).clamp_min(TAIL_FLOOR)
    return (log_q_NK - kept_N1.log()).masked_fill(padding_NK, NO_MASS)


def coarse(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log p of K tokens and, in the last column, of all other tokens together, shape (N, K + 1).

    Ids beyond the student's vocabulary have no mass.
    """
    assert ids_NK.shape[1] < log_p_NV.shape[1], "the ids are the whole vocabulary: no rest is left"
    own_NK = _within(log_p_NV, ids_NK)
    rest_N1 = log_p_NV.scatter(1, own_NK, -math.inf).logsumexp(dim=1, keepdim=True)
    rest_N1 = rest_N1.masked_fill((ids_NK >= log_p_NV.shape[1]).all(1, keepdim=True), 0.0)
    return torch.cat([_top_logprobs(log_p_NV, ids_NK), rest_N1], dim=1)


def _within(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Ids with each id beyond the vocabulary replaced by the smallest id of its row.

    If the whole row is beyond the vocabulary, the vocabulary's last id is used.
    """
    width = log_p_NV.shape[1]
    others_N1 = ids_NK.min(dim=1, keepdim=True).values.clamp_max(width - 1)
    return torch.where(ids_NK < width, ids_NK, others_N1)


def _top_logprobs(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log p of K tokens, `NO_MASS` for ids beyond the vocabulary."""
    log_p_NK = log_p_NV.gather(1, _within(log_p_NV, ids_NK))
    return log_p_NK.masked_fill(ids_NK >= log_p_NV.shape[1], NO_MASS)


def with_tail(log_q_NK: Tensor) -> Tensor:
    """log q of K tokens and, in the last column, of the remaining mass, at least `TAIL_FLOOR`."""
    rest_N1 = (1 - log_q_NK.double().exp().sum(dim=1, keepdim=True)).clamp_min(TAIL_FLOOR)
    return torch.cat([log_q_NK, rest_N1.log().to(log_q_NK.dtype)], dim=1)


def top_of_reverse_kl(
    log_p_NV: Tensor, ids_NK: Tensor, log_q_NK: Tensor, kl_clip: float | None = None
) -> Tensor:
    """Part of KL(p || q) that falls on K tokens: sum_k p_k (log p_k - log q_k).

    This part is not a divergence: it is smallest where p puts its mass on other tokens, which is
    how a truncated reverse KL collapses. The sampled term of the tokens outside the K completes it.
    That term holds the log ratio fixed in the gradient, so this part does too (the two terms that
    this leaves out, the gradients of the two masses, cancel). With `kl_clip` the log ratios are
    clipped. The teacher's padding ids contribute nothing, since p has no mass there; log q is not
    renormalised, as in the sampled term.
    """
    log_p_NK = _top_logprobs(log_p_NV, ids_NK)
    gap_NK = clipped((log_p_NK - log_q_NK).detach(), kl_clip)
    return (log_p_NK.exp() * gap_NK).sum(dim=1)
