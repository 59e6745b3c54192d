"""(Re)starts the learner's workers from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cluster.base.outcomes import LearnerLost
from cluster.handles import calls, errors
from cluster.hosts.learners import LearnerActors
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Driver
from cluster.supervision.supervise import ActorSpec, Supervisor
from distill.errors import CheckpointError
from learner.checkpoint import Checkpoint

# Longest that a learner which is to go back may write a checkpoint.
_WRITING_S = 600.0
# Makes the learner's workers from a checkpoint, or from the run's start; how often it did before.
MakeLearners = Callable[[Checkpoint | None, int], LearnerActors]


class LearnerLifecycle:
    """The present learner's workers; the loss of one is the loss of all."""

    def __init__(
        self,
        make: MakeLearners,
        spec: ActorSpec,
        supervisor: Supervisor,
        directory: RunDirectory,
        checkpoint_every: int,
    ) -> None:
        self._make, self._spec = make, spec
        self._checkpoint_every = checkpoint_every
        self._supervisor, self._directory = supervisor, directory
        self._attempt = 0
        self._actors: LearnerActors | None = None

    @property
    def leader(self) -> Any:
        assert self._actors is not None
        return self._actors.leader

    def fill(self, checkpoint: Checkpoint | None) -> None:
        """Creates the learner's workers, without waiting for their start."""
        self._actors = self._make(checkpoint, self._attempt)
        for index, actor in enumerate(self._actors.all):
            self._supervisor.adopt(self._spec, index, actor, self._attempt)
        self._attempt += 1

    def recovered(self, seconds: float) -> None:
        """Writes down that the learner is back."""
        self._directory.append_event("restart", who=self._spec.title(0), seconds=seconds)

    def recover(
        self, lost: LearnerLost, driver: Driver, say: Callable[[str], None]
    ) -> Checkpoint | None:
        """Ends all workers and restarts them from the newest checkpoint, which it returns.

        It is that of a step before `lost.before`, if its weights are bad.

        Raises:
            RunFailed: the learner was lost too often.
            CheckpointError: no checkpoint is intact, or none is from before.
        """
        assert self._actors is not None
        if lost.before is not None:
            self._end_writing()
        elif len(self._supervisor.members(self._spec.name)) == len(self._actors.all):
            # A call of it failed before its heartbeat did.
            self._directory.append_event("death", who=self._spec.title(0), why=str(lost))
        delay = self._supervisor.allow(self._spec.name, 0, str(lost))
        self._supervisor.dismiss_all(self._spec.name)
        checkpoint = self._directory.store.latest(say, before=lost.before)
        if checkpoint is None and lost.before is not None and lost.before > self._checkpoint_every:
            raise CheckpointError(
                f"{lost}. No checkpoint of a step before {lost.before} is kept: keep more of them "
                "(keep_last=), and begin another out="
            )
        step = checkpoint.step if checkpoint else 0
        say(f"{lost}. The {self._spec.title(0)} is restarted, from step {step}")
        driver.pause(delay)
        self._directory.rewind_metrics(step)
        self._directory.append_event("rewind", step=step)
        self.fill(checkpoint)
        return checkpoint

    def _end_writing(self) -> None:
        """Waits for the checkpoint that is being written, or it would be the newest one later."""
        with suppress(errors.RayError, CheckpointError):  # what it did not write is not there
            calls.get(self.leader.written.remote(True), timeout=_WRITING_S)
