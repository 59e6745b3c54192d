"""Load balancing of a mixture's experts: the auxiliary loss of Switch Transformers, over a batch.

    aux = E sum_e f_e P_e

E experts, f_e the tokens that choose e (each counted once for each of its experts) over all tokens,
P_e the mean probability that the router gives e; over all tokens and layers (Fedus et al. 2021,
arXiv:2101.03961, equations 4 to 6). aux equals the number of experts per token if all experts are
used equally, and is larger otherwise. transformers computes it (`load_balancing_loss_func`) from
the recorded outputs of its routers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError


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
                field="router_aux_coef",
            )
        first: Any = routers[0]
        self._experts, self._top_k = int(first.num_experts), int(first.top_k)
        self._logits: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        # None in the backward pass, where checkpointed layers run again.
        if self._logits is not None:
            self._logits.append(outputs[self._index].float())

    def begin(self) -> None:
        """Start recording the next forward pass."""
        self._logits = []

    def take(self, real: Tensor | None) -> Tensor:
        """Loss of the pass since `begin`; `real` masks the tokens that count (None: all)."""
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
            f"router_aux_coef: {type(model).__name__} is dense, or balances its experts in another "
            "way: transformers has no load-balancing loss of it. Leave it out",
            field="router_aux_coef",
        )
    return found
