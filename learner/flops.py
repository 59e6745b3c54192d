"""FLOPs of a training step.

Model FLOPs are those of an ideal implementation that runs each row in full and once. Only matrix
products count, and a multiply-add counts as two. Recomputed activations and padding do not count; a
context that is run once for several rows counts for each row. So

    model FLOPs utilisation (MFU) = model FLOPs / seconds / peak FLOPs per second of all devices

as in Chowdhery et al. 2022 (PaLM), appendix B, except that a token attends only to the tokens
that it sees, half of the row on average. The backward pass takes twice the forward pass
(Kaplan et al. 2020, section 2.1): once for the gradients of the inputs, and once for the gradients
of the weights, which frozen weights do not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.models.decoder_sizes import HeadSizes
from distill.objective.batching import RowShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """FLOPs of matrix products with weights, for one token."""

    forward: float = 0.0
    backward: float = 0.0

    @classmethod
    def by(cls, weights: float, *, trained: bool) -> Products:
        """Products of a linear map with `weights` weights."""
        return cls(forward=2 * weights, backward=2 * weights * (2 if trained else 1))

    def __add__(self, other: Products) -> Products:
        return Products(
            forward=self.forward + other.forward, backward=self.backward + other.backward
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of a causal LM, or of a reward model, by part.

    Attributes:
        decoder: FLOPs of the decoder per token.
        projection: FLOPs of the vocabulary projection per trained token.
        attention: one entry for each layer: its sliding window in tokens (None: full attention),
            and the forward FLOPs for each pair of a token and a token that it sees,
            4 x heads x head_dim.
    """

    decoder: Products
    projection: Products
    attention: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFlops | None:
        """FLOPs from the model's modules and config; None if these do not determine the FLOPs.

        That is the case for layers that are not attention (or use another mask than a window), and
        for experts if the config has no number of experts per token.
        """
        decoder = _decoder(model)
        attention = _attention(model.config.get_text_config())
        if decoder is None or attention is None:
            return None
        weight: Tensor | None = getattr(model.get_output_embeddings(), "weight", None)
        projection = Products()  # neglected for a reward model: one number of one token
        if weight is not None:
            projection = Products.by(weight.numel(), trained=weight.requires_grad)
        return cls(decoder=decoder, projection=projection, attention=attention)

    def forward(self, rows_D: Iterable[RowShape]) -> float:
        """FLOPs of computing the rows' log-probs."""
        return sum(
            len(row) * self.decoder.forward
            + row.num_trained * self.projection.forward
            + self._attention(len(row))
            for row in rows_D
        )

    def training(self, rows_D: Iterable[RowShape]) -> float:
        """FLOPs of computing the rows' log-probs and their gradients."""
        rows_D = list(rows_D)
        return self.forward(rows_D) + sum(
            len(row) * self.decoder.backward
            + row.num_trained * self.projection.backward
            + 2 * self._attention(len(row))
            for row in rows_D
        )

    def _attention(self, length: int) -> float:
        return sum(flops * _pairs(length, window) for window, flops in self.attention)


def _pairs(length: int, window: int | None) -> int:
    """Number of pairs of a token and a token that it sees: the last `window`, itself included."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _decoder(model: PreTrainedModel) -> Products | None:
    """Products of all matrices between the embeddings and the vocabulary projection."""
    active: int | None = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    products = Products()
    for path, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Embedding):
            continue
        of_experts = "experts" in path.split(".")
        for weight in module.parameters(recurse=False):
            if weight.ndim < 2:
                continue
            if weight.ndim == 3 and of_experts and active is not None:
                used = weight.numel() * active / len(weight)
            elif of_experts and weight.ndim == 2 and not isinstance(module, nn.Linear):
                continue  # biases of experts
            elif of_experts or weight.ndim > 2:
                return None
            elif isinstance(module, nn.Linear):  # its weights may be stored packed
                used = module.in_features * module.out_features
            else:
                used = weight.numel()
            products += Products.by(used, trained=weight.requires_grad)
    return products


def _attention(config: Any) -> tuple[tuple[int | None, float], ...] | None:
    """Window of each layer, and its FLOPs for a pair of tokens; None if the config lacks them."""
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        return None
    heads, _, head_dim = HeadSizes.of(config)
    # Compressed keys and values differ in size (DeepSeek's latent attention).
    query_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windows = [window] * config.num_hidden_layers
    elif set(kinds) <= {"full_attention", "sliding_attention"}:
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    else:
        return None
    return tuple((window, 2.0 * heads * (query_dim + value_dim)) for window in windows)
