"""Runs of a learner without engines, on existing data; a lost learner is restarted."""

from __future__ import annotations

import time
from typing import Any

from cluster.base.outcomes import LearnerLost
from cluster.config.common import CommonConfig
from cluster.hosts.learners import learner_spec
from cluster.placement.roles import LEARNER
from cluster.recipes.common import RunSession
from cluster.runtime.driver import Driver
from cluster.runtime.learner_lifecycle import LearnerLifecycle, MakeLearners
from cluster.runtime.steps import drive
from cluster.supervision.supervise import Supervisor
from distill.errors import CheckpointError
from learner.checkpoint import Checkpoint


class LearnerAlone:
    """One run of a learner without engines. `drive` runs its steps."""

    def __init__(self, config: CommonConfig, running: RunSession, make: MakeLearners) -> None:
        self._config, self._running = config, running
        self._supervisor = Supervisor(
            say=running.progress.note,
            record=running.directory.append_event,
            buried=lambda _member, _why: None,
        )
        self._driver = Driver(
            supervisor=self._supervisor,
            signals=running.signals,
            deadline_s=config.no_progress_s,
        )
        spec = learner_spec(config)
        self._lifecycle = LearnerLifecycle(
            make, spec, self._supervisor, running.directory, config.checkpoint.every
        )

    @property
    def learner(self) -> Any:
        return self._lifecycle.leader

    def to_the_end(self) -> None:
        """Start the learner, make every step, export `final/`; the learner is always ended."""
        try:
            self._lifecycle.fill(self._running.resume_from)
            self._driver.until_started([LEARNER], self._running.progress.note)
            self._supervisor.under_way = True
            self.before_steps()
            checkpoint = drive(
                self,
                self._driver,
                first_step=self._running.first_step,
                steps=self._config.steps,
                checkpoint_every=self._config.checkpoint.every,
                wanted=lambda: self._running.best.due,
            )
            self.after_steps(checkpoint)
            self._running.complete(checkpoint)
        finally:
            self._supervisor.end_all()

    def before_steps(self) -> None:
        """Hook for subclasses that measure something before the first step."""

    def after_steps(self, checkpoint: Checkpoint) -> None:
        """Hook for subclasses that measure something on the last checkpoint."""

    # calls of `drive`

    def before_step(self) -> float:
        return 0.0

    def on_step(self, metrics: dict[str, float]) -> None:
        self._running.record(metrics)

    def on_saving(self, step: int) -> None:
        self._running.best.saving(step)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._running.best.saved({checkpoint.step})

    def on_unsaved(self, error: CheckpointError, *, again: bool) -> None:
        self._running.unsaved(error, again=again)

    def recover(self, lost: LearnerLost) -> int:
        since = time.monotonic()
        checkpoint = self._lifecycle.recover(lost, self._driver, self._running.progress.note)
        self._running.rewound()
        self._driver.until_started([LEARNER], self._running.progress.note)
        self._lifecycle.recovered(time.monotonic() - since)
        return checkpoint.step if checkpoint else 0

    def end_waits(self) -> None:
        """No-op: the learner waits for no groups."""
