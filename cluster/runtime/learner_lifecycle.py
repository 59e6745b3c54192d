"""(Re)starts the learner's workers from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.hosts.build import LearnerActors
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Driver
from cluster.supervision.supervise import ActorSpec, LearnerLost, Supervisor
from learner.checkpoint import Checkpoint

# Makes the learner's workers from a checkpoint, or from the run's start; how often it did before.
MakeLearners = Callable[[Checkpoint | None, int], LearnerActors]


class LearnerLifecycle:
    """The present learner's workers; the loss of one is the loss of all."""

    def __init__(
        self, make: MakeLearners, spec: ActorSpec, supervisor: Supervisor, directory: RunDirectory
    ) -> None:
        self._make, self._spec = make, spec
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

        Raises:
            RunFailed: the learner was lost too often.
            CheckpointError: no checkpoint is intact.
        """
        assert self._actors is not None
        if len(self._supervisor.members(self._spec.name)) == len(self._actors.all):
            # A call of it failed before its heartbeat did.
            self._directory.append_event("death", who=self._spec.title(0), why=str(lost))
        delay = self._supervisor.allow(self._spec.name, 0, str(lost))
        self._supervisor.dismiss_all(self._spec.name)
        checkpoint = self._directory.store.latest(say)
        step = checkpoint.step if checkpoint else 0
        say(f"{lost}. The learner is restarted, from step {step}")
        driver.pause(delay)
        self._directory.rewind_metrics(step)
        self._directory.append_event("rewind", step=step)
        self.fill(checkpoint)
        return checkpoint
