"""Routers of a mixture of experts: the loss that balances their load, and replay of their choices.

`RouterBalance` is the auxiliary loss of Switch Transformers, over a batch:

    aux = E sum_e f_e P_e

with E experts, f_e the number of tokens that choose expert e divided by the number of tokens, and
P_e the mean probability of expert e in the router, over all tokens and layers (Fedus et al. 2021,
arXiv:2101.03961, equations 4 to 6). aux equals the number of experts per token if all experts are
used equally, and is larger otherwise. transformers computes it (`load_balancing_loss_func`) from
the recorded outputs of its routers.

`RoutingReplay` runs rows through the experts that the engine routed their tokens to. The engine
chooses the experts, but their weights come from the learner's routers, so the gradient reaches the
routers. Known as R3 (Ma et al. 2025, arXiv:2510.11370).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError, DataError
from distill.models.routers import routers_of, weights_of
from distill.objective.batching import TrainingRow
from distill.objective.losses import OWN_SHARE
from distill.routing import MixtureShape, unknown_expert


class RouterBalance:
    """Records the logits of a model's routers, and computes the load-balancing loss from them.

    Raises:
        ConfigError: the model has no routers, or transformers has no such loss for it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._loss = _loss_function(model)
        self._index, routers = _routers(model)
        if not routers:
            raise ConfigError(
                f"router_aux_coef balances a mixture's experts, and {type(model).__name__} is "
                "dense; leave it out",
                field="learner.router_aux_coef",
            )
        first: Any = routers[0]
        self._experts, self._top_k = int(first.num_experts), int(first.top_k)
        self._logits: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        # None in the backward pass, in which checkpointed layers run again.
        if self._logits is not None:
            self._logits.append(outputs[self._index].float())

    def begin(self) -> None:
        """Start recording the next forward pass."""
        self._logits = []

    def take(self, real: Tensor | None) -> Tensor:
        """Loss of the pass since `begin`. `real`: mask of tokens without padding; None: all."""
        logits, self._logits = self._logits, None
        assert logits, "no router has run"
        return self._loss(tuple(logits), self._experts, self._top_k, real)


def check_balances(model: PreTrainedModel) -> None:
    """Raise ConfigError if `RouterBalance` does not support the model, which may be on meta."""
    RouterBalance(model)


def _routers(model: PreTrainedModel) -> tuple[int, list[nn.Module]]:
    """Index of the logits in a router's outputs, and the routers in the order of the layers."""
    recorder = next(_recorders(model), None)
    if recorder is None:
        return 0, []
    found = [each for each in model.modules() if isinstance(each, recorder.target_class)]
    return recorder.index, [router for router in found if hasattr(router, "top_k")]


def _recorders(model: PreTrainedModel) -> Iterator[Any]:
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        if "router_logits" in recorded:
            yield recorded["router_logits"]


def _loss_function(model: PreTrainedModel) -> Callable[..., Tensor]:
    module = sys.modules[type(model).__module__]
    found = getattr(module, "load_balancing_loss_func", None)
    if found is None:
        raise ConfigError(
            f"router_aux_coef: {type(model).__name__} is dense, or balances its experts "
            "differently: transformers has no load-balancing loss for it. Leave it out",
            field="learner.router_aux_coef",
        )
    return found


# A row and a slice of its tokens, which are consecutive in the layers' inputs.
Piece: TypeAlias = tuple[TrainingRow, slice]

MISMATCH = "train/routing_mismatch"
_UNKNOWN = -1


class RoutingReplay:
    """Makes a model's routers choose the experts that are recorded in the rows of a pass.

    A layer that is recomputed in the backward pass (gradient checkpointing) uses the experts of the
    forward pass.

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
                f"{row.source}: its experts have shape {given_TLK.shape[1:]} (layers, experts "
                f"per token), and the learner's model has {shape}"
            )
        unknown = given_TLK == unknown_expert(given_TLK.dtype)
        made_NLK[:tokens] = np.where(unknown, _UNKNOWN, given_TLK.astype(np.int16))[where]
        return made_NLK

    def _reroute(self, layer: int, router: nn.Module, _inputs: Any, outputs: Any) -> Any:
        if self._experts_LNK is None:
            return None
        logits_NE, weights_NK, own_NK = outputs
        given_NK = self._experts_LNK[layer].to(own_NK.dtype)
        assert given_NK.shape == own_NK.shape, "the pass is not the one for which experts were set"
        known_N1 = given_NK[:, :1] != _UNKNOWN
        if self._differ is not None:
            differ_NK = own_NK.sort(dim=1).values != given_NK.sort(dim=1).values
            self._differ[layer] = (differ_NK.any(dim=1, keepdim=True) & known_N1).sum()
        chosen_NK = torch.where(known_N1, given_NK, own_NK)
        return logits_NE, weights_of(router, logits_NE, chosen_NK).to(weights_NK.dtype), chosen_NK

    def take(self) -> dict[str, Tensor]:
        """Mismatch metrics of the pass since `begin`.

        The number of routings (one per token and layer) for which the learner would have chosen
        other experts, and the number of recorded routings. Empty if there are no recorded ones.
        """
        differ, self._differ = self._differ, None
        if not self._known or not differ:
            return {}
        total = torch.stack(list(differ.values())).sum().float()
        return {MISMATCH: total, MISMATCH + OWN_SHARE: total.new_tensor(self._known)}
