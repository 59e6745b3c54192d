"""Recorder of the experts that each token of a forward pass is routed to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.models.routers import routers_of
from distill.routing import ExpertArray, MixtureShape


class RoutingRecorder:
    """Records the chosen experts by forward hooks on a model's routers.

    Raises:
        ConfigError: the model is dense, or the class of its routers is unknown.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        routers, shape = routers_of(model), MixtureShape.of(model.config)
        assert shape is not None
        self._shape = shape
        self._chosen: dict[int, Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._note, layer))

    def _note(self, layer: int, _router: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._chosen[layer] = outputs[2]

    def take(self, tokens: Sequence[int]) -> ExpertArray:
        """Return the experts of the last pass, (*tokens, layers, K), and clear the record.

        Args:
            tokens: shape of the tokens of the pass.
        """
        layers = sorted(self._chosen)
        chosen_NLK = torch.stack([self._chosen[layer] for layer in layers], dim=1).cpu().numpy()
        shape = (len(chosen_NLK), self._shape.layers, self._shape.top_k)
        made_NLK = np.zeros(shape, self._shape.dtype)
        made_NLK[:, layers] = chosen_NLK
        self._chosen = {}
        return made_NLK.reshape(*tokens, *shape[1:])
