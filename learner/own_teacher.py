"""Teacher that is the learner's own model, with its current, lagged or averaged weights.

`Shadow` is a second set s of the trained weights w, updated from them:

    every=n    s <- w, at each version that n divides: the student as it was 0 to n - 1 steps before
    ema=a      s <- a s + (1 - a) w, after every step (Polyak & Juditsky 1992; Tarvainen & Valpola
               2017): at version v it is  a^v w_0 + (1 - a) sum_{i=1}^{v} a^{v-i} w_i

The shadow is fp32, and sharded like the weights: each worker updates its own share. Weights that
are not trained exist once.

`OwnTeacher` computes the teacher's distribution for estimator=full with the learner's model, not
with a second one: by the current weights, or by the shadow, which is swapped in for one pass. This
pass runs before the student's pass on the same micro-batch, so it changes no tensor that a
backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from distill.objective.batching import Batch
from distill.objective.objectives import TeacherDistribution
from learner.config import ShadowRule
from learner.forward import Forward
from learner.frozen import teacher_row
from learner.process_group import WorkerGroup
from learner.sharding import local

# Suffix of the shadow's tensors, which are saved with AdamW's moments of the same weights.
SUFFIX = ".teacher"


class Shadow:
    """A worker's share of the second set of weights, initially equal to the weights."""

    def __init__(self, model: nn.Module, rule: ShadowRule) -> None:
        self._rule = rule
        self._weights = {
            name: p.detach() for name, p in model.named_parameters() if p.requires_grad
        }
        self._shadows = {name: weight.clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Update the shadow. Call this after each step, with the new version of the weights."""
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
        """Exchange the exact values of the weights and the shadow. Call it again to undo."""
        for shadow, weight in self._pairs():
            own = weight.clone()
            weight.copy_(shadow)
            shadow.copy_(own)

    def state(self) -> Mapping[str, Tensor]:
        """The tensors, not copied, by their names in checkpoints."""
        return {f"{name}{SUFFIX}": shadow for name, shadow in self._shadows.items()}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, weight in self._weights.items():
            yield local(self._shadows[name]), local(weight)


@dataclass(frozen=True, slots=True, eq=False)
class OwnTeacher:
    """The learner's own model as a teacher, on one worker.

    Attributes:
        shadow: the lagged or EMA teacher; None: the teacher is the current weights.
        reshard: drops the other workers' shares, which a pass without gradients leaves gathered.
    """

    forward: Forward
    shadow: Shadow | None
    group: WorkerGroup
    token_budget: int
    reshard: Callable[[], None]

    def distribution_of(self, batch: Batch) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, without dropout or router noise.

        The result is for the learner's next pass over the batch.
        """
        if self.shadow is None:
            return self._read(batch, "none")
        self.shadow.swap()
        try:
            return self._read(batch, "trained")
        finally:
            self.shadow.swap()

    def _read(self, batch: Batch, copies: Literal["none", "trained"]) -> TeacherDistribution:
        seen = [teacher_row(row) for row in batch.rows]
        try:
            return self.forward.distribution_of(seen, self.token_budget, self.group, copies=copies)
        finally:
            self.reshard()
