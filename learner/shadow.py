"""A second set of the trained weights that follows the first: a teacher that moves, and is older.

    every=n    s <- w, at each version that n divides: the student as it was 0 to n - 1 steps before
    ema=a      s <- a s + (1 - a) w, after every step (Polyak & Juditsky 1992; Tarvainen & Valpola
               2017): at version v it is  a^v w_0 + (1 - a) sum_{i=1}^{v} a^{v-i} w_i

In fp32, and sharded as the weights are: each worker follows with its own share. What is not trained
is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from learner.config import ShadowRule
from learner.sharding import local

# Ends the names of its tensors, beside AdamW's moments of the same weights.
SUFFIX = ".teacher"


class Shadow:
    """This worker's share; it begins as the weights are."""

    def __init__(self, model: nn.Module, rule: ShadowRule) -> None:
        self._rule = rule
        self._weights = {
            name: p.detach() for name, p in model.named_parameters() if p.requires_grad
        }
        self._shadows = {name: weight.clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Call after each step, with the version of the weights that it has made."""
        if not self._rule.moves_at(version):
            return
        shadows, weights = map(list, zip(*self._pairs(), strict=True))
        if self._rule.ema is None:
            for shadow, weight in zip(shadows, weights, strict=True):
                shadow.copy_(weight)
        else:
            get_ema_multi_avg_fn(self._rule.ema)(shadows, weights, version)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the values of the weights and its own, bit by bit; call it again to undo."""
        for shadow, weight in self._pairs():
            own = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(own)

    def state(self) -> Mapping[str, Tensor]:
        """The tensors themselves, by the names that checkpoints know."""
        return {f"{name}{SUFFIX}": shadow for name, shadow in self._shadows.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, weight in self._weights.items():
            yield local(self._shadows[name]), local(weight)
