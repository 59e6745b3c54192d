"""Routers of mixtures of experts, as transformers has them: where they are, how they weigh experts.

They return (logits, weights, chosen experts). Which experts are chosen differs much, by biases and
groups; how the chosen ones are weighted, from the logits alone, in three ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from distill.errors import ConfigError
from distill.routing import MixtureShape

# (router, logits (N, E), chosen experts (N, K)) -> their weights (N, K).
Weigh: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def _by_softmax(router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Probabilities; over their sum, unless the config says that this is not done."""
    weights_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(1, chosen_NK)
    if getattr(router, "norm_topk_prob", True):
        weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    return weights_NK


def _by_softmax_of_chosen(_router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    chosen_logits_NK = logits_NE.gather(1, chosen_NK)
    return torch.softmax(chosen_logits_NK, dim=-1, dtype=chosen_logits_NK.dtype)


def _by_sigmoid(router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Scores without the bias that they were chosen by."""
    weights_NK = logits_NE.sigmoid().gather(1, chosen_NK)
    if router.norm_topk_prob:
        weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_NK * router.routed_scaling_factor


# Classes of transformers 5.19 whose weights these are to the bit (tests/learner/test_routing.py).
WEIGH: dict[str, Weigh] = {
    "FlexOlmoTopKRouter": _by_softmax,
    "MixtralTopKRouter": _by_softmax,
    "OlmoeTopKRouter": _by_softmax,
    "Qwen2MoeTopKRouter": _by_softmax,
    "Qwen3MoeTopKRouter": _by_softmax,
    "Qwen3NextTopKRouter": _by_softmax,
    "Qwen3_5MoeTopKRouter": _by_softmax,
    "GptOssTopKRouter": _by_softmax_of_chosen,
    "DeepseekV3TopkRouter": _by_sigmoid,
    "Dots1TopkRouter": _by_sigmoid,
    "ExaoneMoeTopkRouter": _by_sigmoid,
    "Glm4MoeTopkRouter": _by_sigmoid,
    "SolarOpenTopkRouter": _by_sigmoid,
}


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a mixture, by the number of their layer.

    Raises:
        ConfigError: the model is dense, or its routers are of a class that is not known.
    """
    config: Any = model.config
    if MixtureShape.of(config) is None:
        raise ConfigError(
            f"routing_replay is of a mixture's experts, and {type(model).__name__} is dense; leave "
            "it out",
            field="learner.routing_replay",
        )
    routers = {
        int(layer[1]): module
        for name, module in model.named_modules()
        if type(module).__name__ in WEIGH and (layer := _LAYER.search(name))
    }
    if not routers:
        raise ConfigError(
            f"routing_replay=True: isotherm does not know how {type(model).__name__} weighs its "
            "experts (distill/models/routers.py has those that it knows); use routing_replay=False",
            field="learner.routing_replay",
        )
    return routers


def weights_of(router: nn.Module, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """The router's weights of experts that it may not have chosen itself, shape (N, K)."""
    return WEIGH[type(router).__name__](router, logits_NE, chosen_NK)
