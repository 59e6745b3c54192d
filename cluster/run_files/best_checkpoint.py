"""`checkpoint.keep_best=METRIC`: the checkpoint of the best evaluation is saved, named and kept."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping

from distill.errors import CheckpointError, ConfigError
from learner.checkpoint import Best, CheckpointStore

logger = logging.getLogger(__name__)

# Metrics for which smaller is better: divergences and losses.
_SMALLER = re.compile(r"(^|[/_])(kl|nll|loss)($|[/_])")
# Metrics that every evaluation of the policy, or of held-out rows, has.
_EVALUATIONS = ("time/eval", "time/validation")


class BestCheckpoint:
    """Tracks the best evaluation of a run. The store records it, so it survives a restart."""

    def __init__(self, store: CheckpointStore, metric: str | None) -> None:
        self._store, self._metric = store, metric
        self._found: Best | None = None  # its checkpoint is not saved yet
        self._unmarked: Best | None = None  # its checkpoint is saved, but not marked as the best
        self._writing: int | None = None

    @property
    def due(self) -> bool:
        """True if the current weights are the best, and no checkpoint, even pending, has them."""
        return self._found is not None and self._found.step != self._writing

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Process a line of metrics of a step or of an evaluation.

        Raises:
            ConfigError: the run's evaluations do not measure the metric.
        """
        if self.due:
            self.drop()
        self._mark()
        step = int(metrics["step"])
        if self._metric is None or not any(name in metrics for name in _EVALUATIONS):
            return
        if self._metric not in metrics:
            known = [name for name in metrics if name.startswith(("eval/", "validation/"))]
            raise ConfigError(
                f"checkpoint.keep_best={self._metric} is not a metric of this run's evaluations; "
                f"they measure {', '.join(sorted(known))}"
            )
        found = Best(step=step, metric=self._metric, value=metrics[self._metric])
        best = self._found or self._unmarked or self._store.best()
        measured = step and math.isfinite(found.value)
        if measured and (best is None or best.metric != found.metric or self._better(found, best)):
            self._found = found
            self.saved({each.step for each in self._store.complete()})

    def recall(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Process the metrics of earlier attempts: a killed one may have left its best unmarked."""
        kept = {each.step for each in self._store.complete()}
        for line in lines:
            if line["step"] in kept and self._metric in line:
                self.observe(line)

    def drop(self) -> None:
        """Drop the best evaluation: its weights are gone, and no checkpoint has them."""
        self._found = None

    def saving(self, step: int) -> None:
        """Record that a checkpoint of the current weights is being written."""
        self._writing = step

    def saved(self, steps: set[int]) -> None:
        """Record that checkpoints of these steps exist."""
        if self._found is not None and self._found.step in steps:
            self._unmarked, self._found = self._found, None
            self._mark()
        if self._writing in steps:
            self._writing = None

    def unsaved(self) -> None:
        """Record that the checkpoint being written was not completed."""
        if self._found is not None and not self.due:
            self.drop()
        self._writing = None

    def _mark(self) -> None:
        """Mark the best checkpoint in the store. If the disk is full, a later call tries again."""
        if self._unmarked is None:
            return
        try:
            self._store.mark_best(self._unmarked)
        except CheckpointError as error:
            logger.warning("step %d is not marked as the best yet: %s", self._unmarked.step, error)
        else:
            self._unmarked = None

    def _better(self, one: Best, other: Best) -> bool:
        if _SMALLER.search(one.metric):
            return one.value < other.value
        return one.value > other.value
