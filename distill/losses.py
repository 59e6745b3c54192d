"""Losses: pure functions from tensors over action tokens to `(loss, metrics)`.

Every loss is a sum over the tokens given, divided by `num_tokens`, the count of trained tokens of
the *whole* optimizer step. Micro-batches therefore add up to exactly the big batch's loss. Metrics
are sums of per-token values; divide by the same count to get means.
"""

from __future__ import annotations

from torch import Tensor

Metrics = dict[str, Tensor]


def importance_sampling(
    logprobs_N: Tensor, behaviour_logprobs_N: Tensor, advantages_N: Tensor, num_tokens: int
) -> tuple[Tensor, Metrics]:
    """-sum_t exp(log pi_T - log behaviour_T) A_t / num_tokens.

    Its gradient at pi = behaviour is the policy gradient -sum_t A_t grad log pi_T(y_t); away from
    it each token is reweighted by its ratio (Degris et al. 2012, per token). The advantage and the
    behaviour log-prob carry no gradient.
    """
    assert logprobs_N.shape == behaviour_logprobs_N.shape == advantages_N.shape
    assert logprobs_N.ndim == 1
    log_ratio_N = logprobs_N - behaviour_logprobs_N.detach()
    ratio_N = log_ratio_N.exp()
    loss = -(ratio_N * advantages_N.detach()).sum() / num_tokens
    return loss, {
        "train/ratio": ratio_N.detach().sum(),
        "train/logprob_gap": log_ratio_N.detach().abs().sum(),
    }


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor, num_tokens: int) -> tuple[Tensor, Metrics]:
    """-sum_t w_t log p(y_t) / num_tokens: plain supervised fine-tuning on the tokens given."""
    assert logprobs_N.shape == weights_N.shape and logprobs_N.ndim == 1
    loss = -(weights_N * logprobs_N).sum() / num_tokens
    return loss, {"train/nll": -logprobs_N.detach().sum()}
