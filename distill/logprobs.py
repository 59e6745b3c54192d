"""log softmax(z / T) of chosen tokens, without holding logits for a whole batch.

`VocabularyHead` is the last step of a causal LM, hidden state -> logits. Keeping it apart lets
callers project only the positions they need, a chunk at a time: fp32 logits for N x V values are
the largest tensor of a distillation step by far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError

# Most fp32 logits held at once. On a CPU 4 MiB stay in its cache, which pays for computing them
# twice when training; a GPU wants large kernels.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# But never fewer positions than this: the projection's weights are read once a chunk.
_FEWEST_POSITIONS = 64


def positions_per_chunk(device: torch.device, vocab_size: int) -> int:
    """How many positions to project to the vocabulary at a time."""
    return max(_FEWEST_POSITIONS, _CHUNK_ELEMENTS.get(device.type, 1 << 26) // vocab_size)


class TokenStats(NamedTuple):
    """Per position, fp32, shape (N,): the chosen token's log-prob, the entropy of p_T, and the
    divergence from a teacher where one was asked for."""

    logprobs_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor | None = None


# log p_T of some positions (n, V), and which of the N they are -> their divergence (n,).
DivergenceOf = Callable[[Tensor, slice], Tensor]


def selected_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature_N: Tensor) -> Tensor:
    """log softmax(z / T)[token], fp32, shape (N,). Every T must be above 0."""
    assert logits_NV.ndim == 2 and tokens_N.ndim == 1 and temperature_N.ndim == 1
    scaled_NV = logits_NV.float() / temperature_N[:, None]
    chosen_N = scaled_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return chosen_N - scaled_NV.logsumexp(dim=1)


def log_distribution(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """log softmax(z / T) over the vocabulary, fp32, shape (N, V)."""
    return torch.log_softmax(logits_NV.float() / temperature_N[:, None], dim=1)


def token_stats(
    log_p_NV: Tensor, tokens_N: Tensor, *, entropy_gradient: bool = False
) -> TokenStats:
    """Log-prob of the token and entropy (without gradient unless told) of the distribution."""
    chosen_N = log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(dim=1)
    return TokenStats(chosen_N, entropy_N)


class VocabularyHead:
    """hidden_NH -> logits_NV as the model itself computes it, checked once against the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError if the model post-processes its logits in a way unknown here."""
        projection = model.get_output_embeddings()
        if projection is None:
            raise ConfigError(f"{type(model).__name__} has no vocabulary projection (lm_head)")
        self.projection: Callable[[Tensor], Tensor] = projection
        config = model.config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by logit_scale; Granite divides by logits_scaling.
        self.scale = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )
        self._check(model)

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = self.projection(hidden_NH)
        if self.scale != 1:
            logits_NV = logits_NV * self.scale
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        was_training = model.training
        model.eval()
        ids_BT = (
            torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
        )
        hidden_NH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state[0]
        expected_NV = model(input_ids=ids_BT, use_cache=False).logits[0]
        model.train(was_training)
        gap = (self(hidden_NH).float() - expected_NV.float()).abs().max().item()
        scale = expected_NV.float().abs().max().item()
        if not gap <= 1e-2 * max(scale, 1e-3):
            raise ConfigError(
                f"{type(model).__name__} changes its logits after lm_head (by {gap:.3g} on a "
                "probe), in a way isotherm does not know; its log-probs would be wrong"
            )

    def log_distribution(self, hidden_NH: Tensor, temperature_N: Tensor) -> Tensor:
        """log p_T of the projected hidden states, fp32, shape (N, V): all of it at once."""
        return log_distribution(self(hidden_NH), temperature_N)

    def token_stats(
        self,
        hidden_NH: Tensor,
        tokens_N: Tensor,
        temperature_N: Tensor,
        *,
        divergence_of: DivergenceOf | None = None,
        entropy_gradient: bool = False,
    ) -> TokenStats:
        """`token_stats` of the projected hidden states, a chunk of positions at a time.

        With gradients on and more than one chunk, each chunk's logits are recomputed in the
        backward pass, so peak memory holds one chunk, whatever N is.
        """

        def stats_of(positions: slice, hidden_NH: Tensor) -> TokenStats:
            log_p_NV = self.log_distribution(hidden_NH, temperature_N[positions])
            stats = token_stats(log_p_NV, tokens_N[positions], entropy_gradient=entropy_gradient)
            if divergence_of is None:
                return stats
            return stats._replace(divergence_N=divergence_of(log_p_NV, positions))

        rows = positions_per_chunk(hidden_NH.device, model_width(self.projection))
        chunks = [slice(first, first + rows) for first in range(0, len(hidden_NH), rows)]
        if torch.is_grad_enabled() and len(chunks) > 1:
            stats = [
                checkpoint(stats_of, chunk, hidden_NH[chunk], use_reentrant=False)
                for chunk in chunks
            ]
        else:
            stats = [stats_of(chunk, hidden_NH[chunk]) for chunk in chunks]
        logprobs, entropies, divergences = zip(*stats, strict=True)
        return TokenStats(
            torch.cat(logprobs),
            torch.cat(entropies),
            None if divergence_of is None else torch.cat(divergences),
        )


def model_width(projection: Callable[[Tensor], Tensor]) -> int:
    """Rows of a projection's weight: the vocabulary size V."""
    weight = getattr(projection, "weight")  # noqa: B009 (a Linear, or something that quacks like one)
    return int(weight.shape[0])
