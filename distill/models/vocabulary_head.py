"""`VocabularyHead`: the last step of a causal LM, hidden state -> logits.

Callers run the head separately from the decoder, so they can project only the positions that they
need, one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from distill.errors import CheckpointError
from distill.models.linear_stats import (
    LinearStats,
    StatsOfLogits,
    float32_logits,
    positions_per_chunk,
    positions_per_trained_chunk,
    precision_of,
    slices,
)
from distill.models.logprobs import (
    DivergenceOf,
    Event,
    TokenStats,
    as_outcomes,
    log_distribution,
    scaled_logits,
)

# Most elements (N x V) of a batch's distributions that are kept from the forward pass for the
# backward pass: 64 MiB.
_MOST_KEPT = 1 << 24


def kept_until_backward(
    distribution: Callable[[slice], Tensor], elements: int
) -> Callable[[slice], Tensor]:
    """Cache a distribution that a training pass requests twice per slice, forward and backward.

    If the whole batch has more `elements` than `_MOST_KEPT`, it is computed twice to save memory.
    """
    if elements > _MOST_KEPT:
        return distribution
    kept: dict[tuple[int, int], Tensor] = {}

    def of(positions: slice) -> Tensor:
        key = positions.start, positions.stop
        if key in kept:
            return kept.pop(key)
        kept[key] = made = distribution(positions)
        return made

    return of


def projection_of(model: PreTrainedModel) -> nn.Module:
    """Vocabulary projection of a model. Raises CheckpointError if the model has none."""
    projection = model.get_output_embeddings()
    if projection is None:
        raise CheckpointError(f"{type(model).__name__} has no vocabulary projection (lm_head)")
    return projection


class VocabularyHead:
    """Maps hidden_NH to logits_NV as the model itself does."""

    def __init__(
        self, projection: Callable[[Tensor], Tensor], config: Any, event: Event = ()
    ) -> None:
        """
        Args:
            projection: the model's vocabulary projection.
            config: the model's config, which has the scale and soft cap of the logits.
            event: tokens that count as one outcome in all distributions and statistics of the head.
        """
        self.event, self.projection = event, projection
        config = config.get_text_config()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies by logit_scale; Granite divides by logits_scaling.
        self.scale = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )

    @classmethod
    def of(cls, model: PreTrainedModel, event: Event = ()) -> VocabularyHead:
        """Head of a model, compared once with the model's own logits.

        Raises:
            CheckpointError: the logits are not a supported function of the hidden states.
        """
        head = cls(projection_of(model), model.config, event)
        head._check(model)
        return head

    def __call__(
        self, hidden_NH: Tensor, weights: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Tensor:
        """Logits of hidden states; `weights` replace the projection's own weights, by name."""
        module = cast(nn.Module, self.projection)
        if type(module) is nn.Linear and not torch.is_grad_enabled():
            own = dict(module.named_parameters()) | dict(weights)
            return self._finish(float32_logits(hidden_NH, own["weight"], own.get("bias")))
        if not weights:
            return self._finish(self.projection(hidden_NH))
        return self._finish(functional_call(module, dict(weights), (hidden_NH,)))

    def _finish(self, logits_NV: Tensor) -> Tensor:
        """Post-processing of the logits: the model's scale and soft cap."""
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
        decoder = model.base_model
        hidden_BTH = getattr(decoder(input_ids=ids_BT, use_cache=False), "last_hidden_state", None)
        if hidden_BTH is None:
            raise CheckpointError(
                f"{type(model).__name__} has no separate decoder: base_model is "
                f"{type(decoder).__name__}, which returns no last_hidden_state. isotherm projects "
                "hidden states itself; give a checkpoint of a model class with a decoder"
            )
        hidden_NH = hidden_BTH[0]
        expected_NV = model(input_ids=ids_BT, use_cache=False).logits[0]
        model.train(was_training)
        gap = (self(hidden_NH).float() - expected_NV.float()).abs().max().item()
        scale = expected_NV.float().abs().max().item()
        if not gap <= 1e-2 * max(scale, 1e-3):
            raise CheckpointError(
                f"{type(model).__name__} changes its logits after lm_head (by {gap:.3g} on a "
                "probe) in an unsupported way; its log-probs would be wrong"
            )

    def log_distribution(
        self,
        hidden_NH: Tensor,
        temperature_N: Tensor,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """log p_T of the projected hidden states in fp32, shape (N, V), not chunked.

        `weights` replace the projection's own weights, by name (`copied_weights`).
        """
        return log_distribution(self(hidden_NH, weights), temperature_N, self.event)

    def distribution_of(
        self,
        hidden_NH: Tensor,
        temperature_N: Tensor,
        autocast: Callable[[], AbstractContextManager[Any]],
        weights: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Callable[[slice], Tensor]:
        """Return a function: slice of the N positions -> log p_T, shape (n, V), without gradient.

        The function is for a training pass, which calls it for every slice forward and backward.
        The context `autocast` replaces that of the training pass.
        """

        @torch.no_grad()
        def log_p(positions: slice) -> Tensor:
            with autocast():
                return self.log_distribution(
                    hidden_NH[positions], temperature_N[positions], weights
                )

        return kept_until_backward(log_p, len(hidden_NH) * model_width(self.projection))

    def copied_weights(self, *, frozen: bool) -> dict[str, Tensor]:
        """Copies of the projection's weights by name; without `frozen`, only the trained ones."""
        named = cast(nn.Module, self.projection).named_parameters()
        return {name: p.detach().clone() for name, p in named if frozen or p.requires_grad}

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
        backward pass, so peak memory is that of one chunk for any N. `benchmarks/memory.py`
        measures the memory and time at a vocabulary of 151,936.
        """

        def scaled_of(logits_NV: Tensor, positions: slice) -> Tensor:
            return scaled_logits(self._finish(logits_NV), temperature_N[positions], self.event)

        stats_of = StatsOfLogits(
            scaled_of, as_outcomes(tokens_N, self.event), divergence_of, entropy_gradient
        )

        def projected(hidden_nH: Tensor, positions: slice) -> TokenStats:
            return stats_of(self.projection(hidden_nH), positions)

        device, width = hidden_NH.device, model_width(self.projection)
        chunks = slices(0, len(hidden_NH), positions_per_chunk(device, width))
        many = len(chunks) > 1 and torch.is_grad_enabled()
        if type(self.projection) is nn.Linear:
            linear = cast(nn.Linear, self.projection)
            if many or precision_of(linear.weight) != torch.float32:
                rows = positions_per_trained_chunk(device, width)
                return LinearStats.of(hidden_NH, linear.weight, linear.bias, stats_of, rows)
        if not many:
            return _joined([projected(hidden_NH[chunk], chunk) for chunk in chunks])
        # Other projections may have any parameters, adapters and randomness.
        return _joined(
            [
                checkpoint(projected, hidden_NH[chunk], chunk, use_reentrant=False)
                for chunk in chunks
            ]
        )


def _joined(stats: list[TokenStats]) -> TokenStats:
    logprobs, entropies, divergences = zip(*stats, strict=True)
    return TokenStats(
        torch.cat(logprobs),
        torch.cat(entropies),
        None if None in divergences else torch.cat(divergences),
    )


def model_width(projection: Callable[[Tensor], Tensor]) -> int:
    """Rows of a projection's weight: the vocabulary size V."""
    weight = getattr(projection, "weight")  # noqa: B009 (a Linear, or a module with the same attribute)
    return int(weight.shape[0])
