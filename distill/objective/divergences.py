"""Divergences between the student p_T and the teacher q_T, both at one temperature.

All of them take log-probs of shape (N, V), a distribution a row, and return fp32 nats of shape
(N,). They are exact sums over the columns, which may be the vocabulary or a coarser partition of it
(`coarse`): some likely tokens and one bucket for the rest. No mass is lost, so each divergence of a
partition is one too: never negative, zero where the partitions agree, and at most that of the whole
vocabulary (the data-processing inequality).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distill.objective.advantages import clipped
from distill.objective.custom import own_divergence

# Least mass of a teacher's tail. What is left of 1 after its top K carries their rounding errors,
# about 1e-6 in fp32; an empty tail would make the student's mass there infinitely bad.
TAIL_FLOOR = 1e-6
# The log-prob of no mass at all, finite so that its gradient is 0 and no NaN.
NO_MASS = -1e4


def kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p(v) (log p(v) - log q(v))."""
    assert log_p_NV.shape == log_q_NV.shape, "the distributions are over different things"
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dim=-1)


def clipped_reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor, kl_clip: float) -> Tensor:
    """sum_v p(v) clip(log p(v) - log q(v)), the clipped log ratio held fixed in the gradient.

    No divergence, but the mean of the sampled estimator with the same clip; its gradient tends to
    that of KL(p || q) as the clip grows.
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
    """The divergence of that name of the student's `log_p_NV` and the teacher's `log_q_NV`.

    Raises:
        DataError: one of the user's own (`module:function`) failed.
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
    """Both distributions over the token ids that both vocabularies have.

    The wider vocabulary is padded with ids that no tokenizer uses. They are masked before its
    softmax: what is left is normalised again, which adds a constant to a state's log-probs. Of the
    teacher's, the gradient of a reverse KL has no part of it.
    """
    width = min(log_p_NV.shape[1], log_q_NV.shape[1])
    return _first_columns(log_p_NV, width), _first_columns(log_q_NV, width)


def _first_columns(logprobs_NV: Tensor, width: int) -> Tensor:
    if logprobs_NV.shape[1] == width:
        return logprobs_NV
    return logprobs_NV[:, :width].log_softmax(dim=1)


def without_padding(width: int, ids_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """log q of the teacher's likeliest tokens, given that none of the listed padding was sampled.

    Padding are ids from `width` on, beyond the student's vocabulary. Padding that is not listed
    stays in the rest, with at most the mass of the least likely listed token each.
    """
    padding_NK = ids_NK >= width
    if not bool(padding_NK.any()):
        return log_q_NK
    mass_N1 = log_q_NK.exp().masked_fill(~padding_NK, 0.0).sum(dim=1, keepdim=True)
    kept_N1 = (1 - mass_N1).clamp_min(TAIL_FLOOR)
    return (log_q_NK - kept_N1.log()).masked_fill(padding_NK, NO_MASS)


def coarse(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log p of K tokens and, in a last column, of all the others together: shape (N, K + 1).

    Ids beyond the student's vocabulary have no mass.
    """
    assert ids_NK.shape[1] < log_p_NV.shape[1], "the top is the whole vocabulary: there is no rest"
    own_NK = _within(log_p_NV, ids_NK)
    rest_N1 = log_p_NV.scatter(1, own_NK, -math.inf).logsumexp(dim=1, keepdim=True)
    rest_N1 = rest_N1.masked_fill((ids_NK >= log_p_NV.shape[1]).all(1, keepdim=True), 0.0)
    return torch.cat([_top_logprobs(log_p_NV, ids_NK), rest_N1], dim=1)


def _within(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """The ids, and in place of those beyond the vocabulary others of their row, if there are."""
    width = log_p_NV.shape[1]
    others_N1 = ids_NK.min(dim=1, keepdim=True).values.clamp_max(width - 1)
    return torch.where(ids_NK < width, ids_NK, others_N1)


def _top_logprobs(log_p_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log p of K tokens."""
    log_p_NK = log_p_NV.gather(1, _within(log_p_NV, ids_NK))
    return log_p_NK.masked_fill(ids_NK >= log_p_NV.shape[1], NO_MASS)


def with_tail(log_q_NK: Tensor) -> Tensor:
    """log q of K tokens and, in a last column, of what is left of 1, at least `TAIL_FLOOR`."""
    rest_N1 = (1 - log_q_NK.double().exp().sum(dim=1, keepdim=True)).clamp_min(TAIL_FLOOR)
    return torch.cat([log_q_NK, rest_N1.log().to(log_q_NK.dtype)], dim=1)


def top_of_reverse_kl(
    log_p_NV: Tensor, ids_NK: Tensor, log_q_NK: Tensor, kl_clip: float | None = None
) -> Tensor:
    """The part of KL(p || q) that falls on K tokens: sum_k p_k (log p_k - log q_k).

    By itself no divergence: it is least where p puts its mass elsewhere, which is how truncated
    reverse KL collapses. It is meant to be completed by the sampled term of the tokens outside; so
    the log ratio is held fixed in the gradient, as it is there (their two extra terms, the
    gradients of the two masses, cancel). With a clip, of the clipped log ratios. Padding ids of the
    teacher's count for nothing, since p has no mass there; log q stays as it is, like the sampled
    term's.
    """
    log_p_NK = _top_logprobs(log_p_NV, ids_NK)
    gap_NK = clipped((log_p_NK - log_q_NK).detach(), kl_clip)
    return (log_p_NK.exp() * gap_NK).sum(dim=1)
