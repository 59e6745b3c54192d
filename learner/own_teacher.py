"""estimator=full of a teacher that moves: the learner's own model is the teacher, all of it.

    q    the weights that are trained, as they are at this update; or those of the teacher that
         follows them (`learner.shadow`), which take their place for one pass

No second model is held. The pass comes before the student's own on the same micro-batch, so nothing
that a backward pass will need is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from distill.objective.batching import Batch, collate
from distill.objective.objectives import TeacherDistribution
from learner.forward import Forward
from learner.frozen import as_seen
from learner.shadow import Shadow


class OwnTeacher:
    """The learner's own model as a teacher, on one worker of it."""

    def __init__(
        self,
        forward: Forward,
        shadow: Shadow | None,
        *,
        device: str,
        reshard: Callable[[], None],
    ) -> None:
        """
        Args:
            shadow: the teacher that follows the weights; None: it is the weights themselves.
            reshard: drops what a pass without gradients has gathered of the other workers' shares.
        """
        self._forward, self._shadow = forward, shadow
        self._device, self._reshard = device, reshard

    def distribution_of(self, batch: Batch) -> TeacherDistribution:
        """log q_T of slices of the batch's trained tokens, for the learner's next pass over it.

        It has no noise.
        """
        batch_seen = collate([as_seen(row) for row in batch.rows], self._device)
        if self._shadow is None:
            return self._read(batch_seen, "none")
        self._shadow.swap()
        try:
            return self._read(batch_seen, "trained")
        finally:
            self._shadow.swap()

    def _read(self, batch: Batch, copies: Literal["none", "trained"]) -> TeacherDistribution:
        try:
            return self._forward.distribution_of(batch, copies=copies)
        finally:
            self._reshard()
