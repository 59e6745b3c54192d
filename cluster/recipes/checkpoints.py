"""Checkpoints of a run: when they are due, and what follows when they are complete.

The learner copies its state for a due checkpoint between two steps, and the copy is written during
the next steps (learner/checkpoint_writer.py). Once the checkpoint is complete on disk, between two
later steps, its groups are committed and the best evaluation is marked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

from cluster.base.outcomes import LearnerFailed, LearnerLost, RunFailed
from cluster.recipes.context import RunContext
from cluster.recipes.plan import NoEvaluations
from cluster.runtime.learner_alone import LearnerAlone
from cluster.supervision.supervise import JOIN_GROUP
from distill.durable_files import Retries, is_full
from distill.errors import CheckpointError, IsothermError
from learner.checkpoint import Checkpoint
from learner.checkpoint_writer import Written

# Number of retries, between steps, of a checkpoint that cannot be written. On a full disk
# training then pauses, and the retries continue.
_SAVE_TRIES = 10
# Longest that a run which ends, by a signal or a failure, waits for its last checkpoint.
_LAST_S = 600.0


class Checkpoints:
    """Saves due checkpoints, one at a time. A full disk delays the run instead of ending it.

    A checkpoint is due at a fixed interval of steps, after each step whose evaluation may be the
    best, and after the last step.
    """

    def __init__(
        self, actors: LearnerAlone, context: RunContext, evaluations: NoEvaluations
    ) -> None:
        self._actors, self._driver, self._context = actors, actors.driver, context
        self._evaluations = evaluations
        config = context.config
        self._every = 1 if config.only_keeps else config.checkpoint.every
        self._steps = config.steps
        self._writing: int | None = None  # step of the checkpoint that is being written
        self._retries, self._not_before = Retries(), 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by metric

    def after_step(self, step: int) -> None:
        """Between two steps: finish a checkpoint that is written, and begin the next if due."""
        self._collect(wait=False)
        best = self._context.best.due or self._evaluations.wants_checkpoint(step)
        due = step % self._every == 0 or self._retries.failures or best
        if step < self._steps and due:
            self._collect(wait=True)
            if self._retries.failures >= _SAVE_TRIES:  # further steps could be lost
                self._until_saved()
            elif time.monotonic() >= self._not_before:
                self._begin(step)

    def times(self) -> dict[str, float]:
        """Seconds since the last call, for the next step's metrics.

        `time/checkpoint`: waits of steps. `time/checkpoint_write`: writing concurrently with
        training.
        """
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def last(self) -> Checkpoint:
        """Checkpoint of the last step."""
        self._collect(wait=True)
        return self._until_saved()

    def _until_saved(self) -> Checkpoint:
        """Save a checkpoint of the current step, once the disk has room."""
        while (saved := self._ask(self._actors.learner.save.remote())) is None:
            self._driver.pause(max(self._not_before - time.monotonic(), 0.0))
        self._written(saved)
        return saved

    def save_now(self) -> None:
        """Save the checkpoint of the last complete step, regardless of signals."""
        self._finish()
        deadline = time.monotonic() + _LAST_S
        while True:
            saving = self._actors.learner.save.remote()
            try:
                saved = self._driver.value("saving a checkpoint", saving, timeout=_LAST_S)
            except CheckpointError as error:
                if not is_full(error) or time.monotonic() > deadline:
                    raise
                self._context.unsaved(error, will_retry=True)
                time.sleep(self._retries.pause_s())
            else:
                self._written(saved)
                return

    def finish_after_failure(self) -> None:
        """After a failure of the run or the learner: finish a checkpoint that is being written."""
        try:
            self._finish()
        except (RunFailed, IsothermError) as error:
            step, self._writing = self._writing, None
            why = f"the checkpoint of step {step} was not completed: {error}"
            self._context.unsaved(CheckpointError(why), will_retry=False)

    def before_recovery(self, lost: LearnerLost) -> None:
        """Finish the checkpoint of a learner that is alive, before the learner is replaced."""
        if isinstance(lost, LearnerFailed):
            self.finish_after_failure()
        elif lost.before is not None and self._writing is not None:
            with suppress(RunFailed, IsothermError):  # an unwritten checkpoint does not exist
                self._await_written()  # written later, it would count as the newest
        self._writing = None
        self._seconds.clear()

    def _begin(self, step: int) -> None:
        self._actors.ask_learner_canaries(step)
        self._context.best.saving(step)
        self._writing = step
        begun = self._ask(self._actors.learner.begin_save.remote())
        if isinstance(begun, Checkpoint):  # written without a copy
            self._written(begun)

    def _collect(self, *, wait: bool) -> None:
        if self._writing is not None:
            self._note(self._ask(self._actors.learner.written.remote(wait)))

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, without polling."""
        if self._writing is None:
            return
        try:
            self._note(self._await_written())
        except CheckpointError as error:
            self._writing = None
            self._context.unsaved(error, will_retry=False)

    def _await_written(self) -> Written | None:
        """Wait for the writer, which a step that waits for a failed worker does not delay."""
        written = self._actors.learner.written.options(concurrency_group=JOIN_GROUP).remote(True)
        return self._driver.value("writing a checkpoint", written, timeout=_LAST_S)

    def _ask(self, reference: Any) -> Any:
        """The learner's answer; None if it could not write."""
        began = time.monotonic()
        try:
            return self._driver.ask_learner("saving a checkpoint", reference)
        except CheckpointError as error:
            self._writing = None
            self._not_before = time.monotonic() + self._retries.pause_s()
            if self._retries.failures > _SAVE_TRIES and not self._retries.wait_for_room(error):
                raise
            self._context.unsaved(error, will_retry=True)
            return None
        finally:
            self._seconds["time/checkpoint"] += time.monotonic() - began

    def _note(self, written: Written | None) -> None:
        if written is not None:
            self._seconds["time/checkpoint_write"] += written.seconds
            self._written(written.checkpoint)

    def _written(self, checkpoint: Checkpoint) -> None:
        self._writing = None
        self._retries = Retries()
        self._actors.commit(checkpoint)  # the queue releases the groups of the checkpoint
        self._context.saved(checkpoint)
