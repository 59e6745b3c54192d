"""Routers of mixtures of experts in transformers: how to find them, and how they weight experts.

Routers return (logits, weights, chosen experts). The choice of experts differs between
architectures by biases and groups. The weights of the chosen experts depend only on the logits, and
there are three ways to compute them.
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
    """Softmax probabilities, divided by their sum unless the config disables it."""
    weights_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(1, chosen_NK)
    if getattr(router, "norm_topk_prob", True):
        weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    return weights_NK


def _by_softmax_of_chosen(_router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    chosen_logits_NK = logits_NE.gather(1, chosen_NK)
    return torch.softmax(chosen_logits_NK, dim=-1, dtype=chosen_logits_NK.dtype)


def _by_sigmoid(router: Any, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Sigmoid scores without the bias that is used to choose experts."""
    weights_NK = logits_NE.sigmoid().gather(1, chosen_NK)
    if router.norm_topk_prob:
        weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_NK * router.routed_scaling_factor


# Router classes of transformers 5.19; tests/learner/test_routing.py checks that the weights of each
# are bit-identical to these.
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
    """Routers of a mixture by layer index.

    Raises:
        ConfigError: the model is dense, or the class of its routers is not in `WEIGH`.
    """
    config: Any = model.config
    if MixtureShape.of(config) is None:
        raise ConfigError(
            f"routing_replay needs a mixture-of-experts model, but {type(model).__name__} is "
            "dense; leave it out",
            field="learner.routing_replay",
        )
    routers = {
        int(layer[1]): module
        for name, module in model.named_modules()
        if type(module).__name__ in WEIGH and (layer := _LAYER.search(name))
    }
    if not routers:
        raise ConfigError(
            f"routing_replay=True does not support the routers of {type(model).__name__} "
            "(distill/models/routers.py lists the supported ones); use routing_replay=False",
            field="learner.routing_replay",
        )
    return routers


def weights_of(router: nn.Module, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Router's weights, shape (N, K), for given experts, which another router may have chosen."""
    return WEIGH[type(router).__name__](router, logits_NE, chosen_NK)
