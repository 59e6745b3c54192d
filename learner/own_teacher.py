"""A teacher that is the learner's own model: as it is, lagged or averaged.

`Shadow` is a second set of the trained weights that follows the first:

    every=n    s <- w, at each version that n divides: the student as it was 0 to n - 1 steps before
    ema=a      s <- a s + (1 - a) w, after every step (Polyak & Juditsky 1992; Tarvainen & Valpola
               2017): at version v it is  a^v w_0 + (1 - a) sum_{i=1}^{v} a^{v-i} w_i

It is in fp32, and sharded as the weights are: each worker follows with its own share. What is not
trained is the same in both.

`OwnTeacher` reads the distribution of estimator=full off the learner's model. No second model is
held: the teacher is the weights at this update, or the shadow, which takes their place for one
pass. The pass comes before the student's own on the same micro-batch, so nothing that a backward
pass will need is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distill.objective.batching import Batch, collate
from distill.objective.objectives import TeacherDistribution
from learner.config import ShadowRule
from learner.forward import Forward
from learner.frozen import as_seen
from learner.sharding import local

# Ends the names of its tensors, beside AdamW's moments of the same weights.
SUFFIX = ".teacher"


class Shadow:
    """A worker's share of the second set; its first values are those of the weights."""

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


@dataclass(frozen=True, slots=True, eq=False)
class OwnTeacher:
    """The learner's own model as a teacher, on one worker of it.

    Attributes:
        shadow: the teacher that follows the weights; None: it is the weights themselves.
        reshard: drops what a pass without gradients has gathered of the other workers' shares.
    """

    forward: Forward
    shadow: Shadow | None
    device: str
    reshard: Callable[[], None]

    def distribution_of(self, batch: Batch) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, for the learner's next pass over it.

        It has no noise.
        """
        batch_seen = collate([as_seen(row) for row in batch.rows], self.device)
        if self.shadow is None:
            return self._read(batch_seen, "none")
        self.shadow.swap()
        try:
            return self._read(batch_seen, "trained")
        finally:
            self.shadow.swap()

    def _read(self, batch: Batch, copies: Literal["none", "trained"]) -> TeacherDistribution:
        try:
            return self.forward.distribution_of(batch, copies=copies)
        finally:
            self.reshard()
