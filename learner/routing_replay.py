"""Routing replay: rows run through the experts that the engine routed their tokens to.

The experts are the engine's, but their weights are those of the learner's routers, so the gradient
reaches the routers. Known as R3 (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.errors import DataError
from distill.models.routers import routers_of, weights_of
from distill.objective.batching import TrainingRow
from distill.objective.losses import OWN_SHARE
from distill.routing import MixtureShape, unknown_expert

# A row and a slice of its tokens, which are consecutive in the layers' inputs.
Piece: TypeAlias = tuple[TrainingRow, slice]

MISMATCH = "train/routing_mismatch"
_UNKNOWN = -1


class RoutingReplay:
    """Makes a model's routers choose the experts that are recorded in the rows of the pass.

    A layer that is recomputed in the backward pass (gradient checkpointing) uses the experts of the
    same pass.

    Raises:
        ConfigError: the model is dense, or the class of its routers is not supported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers, shape = routers_of(model), MixtureShape.of(model.config)
        assert shape is not None
        self._shape, self._device = shape, model.device
        self._routed = sorted(routers)  # layers
        self._experts_LNK: Tensor | None = None
        self._known = 0
        self._differ: dict[int, Tensor] | None = None
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._reroute, layer))

    def begin(self, blocks: Sequence[Sequence[Piece]], *, padded: bool) -> None:
        """Set the experts of the next pass.

        Args:
            blocks: all tokens of the pass, in the order of the layers' inputs.
            padded: the pieces of each block are padded on the right to its longest piece.
        """
        self._experts_LNK, self._known, self._differ = None, 0, {}
        if all(row.experts_TLK is None for pieces in blocks for row, _ in pieces):
            return
        parts = []
        for pieces in blocks:
            longest = max(len(row.tokens_T[where]) for row, where in pieces)
            for row, where in pieces:
                parts.append(self._of_piece(row, where, longest if padded else None))
        experts_NLK = np.concatenate(parts)
        self._known = int((experts_NLK[:, self._routed, 0] != _UNKNOWN).sum())
        experts_LNK = np.ascontiguousarray(experts_NLK.swapaxes(0, 1))
        self._experts_LNK = torch.from_numpy(experts_LNK).to(self._device)

    def _of_piece(self, row: TrainingRow, where: slice, width: int | None) -> np.ndarray:
        tokens = len(row.tokens_T[where])
        shape = (self._shape.layers, self._shape.top_k)
        made_NLK = np.full((width or tokens, *shape), _UNKNOWN, np.int16)
        if (given_TLK := row.experts_TLK) is None:
            return made_NLK
        if given_TLK.shape[1:] != shape:
            raise DataError(
                f"{row.source}: its tokens have experts of {given_TLK.shape[1:]} (layers, experts "
                f"of a token), and the learner's model has {shape}"
            )
        unknown = given_TLK == unknown_expert(given_TLK.dtype)
        made_NLK[:tokens] = np.where(unknown, _UNKNOWN, given_TLK.astype(np.int16))[where]
        return made_NLK

    def _reroute(self, layer: int, router: nn.Module, _inputs: Any, outputs: Any) -> Any:
        if self._experts_LNK is None:
            return None
        logits_NE, weights_NK, own_NK = outputs
        given_NK = self._experts_LNK[layer].to(own_NK.dtype)
        assert given_NK.shape == own_NK.shape, "the pass is not the one that was begun"
        known_N1 = given_NK[:, :1] != _UNKNOWN
        if self._differ is not None:
            differ_NK = own_NK.sort(dim=1).values != given_NK.sort(dim=1).values
            self._differ[layer] = (differ_NK.any(dim=1, keepdim=True) & known_N1).sum()
        chosen_NK = torch.where(known_N1, given_NK, own_NK)
        return logits_NE, weights_of(router, logits_NE, chosen_NK).to(weights_NK.dtype), chosen_NK

    def take(self) -> dict[str, Tensor]:
        """Mismatch metrics of the pass since `begin`.

        The number of routings (of a token in a layer) for which the learner would have chosen other
        experts, and the number of routings that were given. Empty if none were given.
        """
        differ, self._differ = self._differ, None
        if not self._known or not differ:
            return {}
        total = torch.stack(list(differ.values())).sum().float()
        return {MISMATCH: total, MISMATCH + OWN_SHARE: total.new_tensor(self._known)}


def check_replays(model: PreTrainedModel) -> None:
    """Raise ConfigError if `RoutingReplay` does not support the model, which may be on meta."""
    routers_of(model)
