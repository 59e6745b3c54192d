"""log softmax(z / T) of chosen tokens, and other statistics of such distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """Statistics per position, fp32 (N,).

    Attributes:
        logprobs_N: log-prob of the chosen token.
        entropy_N: entropy of p_T.
        divergence_N: divergence from a teacher; None: not computed.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor | None = None


# (log p_T of some positions (n, V), the slice of these positions in N) -> divergence (n,).
# Gradients flow only through log p_T. Training calls the function again in the backward pass.
DivergenceOf = Callable[[Tensor, slice], Tensor]


# Several tokens may count as one outcome of the next token, an event (`distill.stops`). The column
# of the event's first token then has the probability of the event, and the columns of its other
# tokens have this scaled logit. Their mass is 0 and the difference of two models' log-probs is
# finite there, so their share of a divergence or an entropy, and its gradient, is 0.
ABSENT = -1e30
Event = tuple[int, ...]


def one_outcome(scaled_NV: Tensor, event: Event) -> Tensor:
    """Merge an event's columns of scaled logits z / T into the first one, by log sum exp."""
    if not event:
        return scaled_NV
    columns = torch.tensor(event, device=scaled_NV.device)
    together_N1 = scaled_NV.index_select(1, columns).logsumexp(dim=1, keepdim=True)
    return scaled_NV.index_fill(1, columns, ABSENT).index_copy_(1, columns[:1], together_N1)


def as_outcomes(tokens: Tensor, event: Event) -> Tensor:
    """Column of each token's outcome: the first token of the event for all tokens of the event."""
    if not event:
        return tokens
    columns = torch.tensor(event, device=tokens.device, dtype=tokens.dtype)
    return torch.where(torch.isin(tokens, columns), columns[0], tokens)


def selected_logprobs(
    logits_NV: Tensor, tokens_N: Tensor, temperature_N: Tensor, event: Event = ()
) -> Tensor:
    """log softmax(z / T)[token] in fp32, shape (N,). Every T must be above 0."""
    assert logits_NV.ndim == 2 and tokens_N.ndim == 1 and temperature_N.ndim == 1
    log_p_NV = log_distribution(logits_NV, temperature_N, event)
    return _chosen(log_p_NV, as_outcomes(tokens_N, event))


def log_distribution(logits_NV: Tensor, temperature_N: Tensor, event: Event = ()) -> Tensor:
    """log softmax(z / T) over the vocabulary in fp32, shape (N, V)."""
    return torch.log_softmax(scaled_logits(logits_NV, temperature_N, event), dim=1)


def scaled_logits(logits_NV: Tensor, temperature_N: Tensor, event: Event) -> Tensor:
    return one_outcome(logits_NV.float() / temperature_N[:, None], event)


def _chosen(log_p_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)


def token_stats(
    log_p_NV: Tensor, tokens_N: Tensor, *, entropy_gradient: bool = False
) -> TokenStats:
    """Log-prob of the token, and entropy of the distribution (by default without gradient)."""
    chosen_N = _chosen(log_p_NV, tokens_N)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return TokenStats(chosen_N, entropy_of(log_p_NV))


def entropy_of(log_p_NV: Tensor) -> Tensor:
    return -(log_p_NV.exp() * log_p_NV).sum(dim=1)
