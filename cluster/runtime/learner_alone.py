"""The learner of a run: its start, its return to a checkpoint, and its end.

A run without engines (sft, dpo, reward_model, train_from=) has no other actors. `Fleet` adds
engines, rollout workers and the queue; methods that concern those are no-ops here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cluster.base.outcomes import LearnerLost
from cluster.config.common import CommonConfig
from cluster.handles.engine_pool import EnginePool
from cluster.hosts.learners import LearnerActors, learner_spec
from cluster.placement.places import Places
from cluster.placement.roles import LEARNER
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Driver, Signals
from cluster.supervision.supervise import Member, Supervisor
from distill.errors import CheckpointError
from learner.checkpoint import Checkpoint


class LearnerAlone:
    """Lifecycle of a learner; the loss of one of its workers is the loss of all.

    Args:
        make: creates the workers, from a checkpoint to load and the number of starts before.
    """

    def __init__(
        self,
        config: CommonConfig,
        places: Places,
        make: Callable[[Checkpoint | None, int], LearnerActors],
        directory: RunDirectory,
        signals: Signals,
        print_line: Callable[[str], None],
    ) -> None:
        self._make, self._placement = make, places
        self._directory, self._print_line = directory, print_line
        self._checkpoint_every = config.checkpoint.every
        self._learner_spec = learner_spec(config, places)
        self._attempt = 0
        self._learners: LearnerActors | None = None
        self.supervisor = Supervisor(
            print_line=print_line, record=directory.append_event, on_death=self._on_death
        )
        self.driver = Driver(
            supervisor=self.supervisor,
            signals=signals,
            deadline_s=config.cluster.no_progress_s,
        )

    @property
    def learner(self) -> Any:
        """Leader of the current learner workers."""
        assert self._learners is not None
        return self._learners.leader

    def pool(self, role: str, patience_s: float = 0) -> EnginePool:
        """Serving engines of a role; none without a fleet."""
        return EnginePool(role, self.supervisor.serving(role), patience_s)

    def start(self, resume_from: Checkpoint | None) -> None:
        """Create all actors, and wait until all have answered.

        Raises:
            RunFailed: an actor did not start.
        """
        self._create_learner(resume_from)
        self.driver.wait_until_started([LEARNER])
        self.supervisor.run_started = True

    def recover(self, lost: LearnerLost) -> int:
        """Restart all workers from the newest checkpoint; returns the checkpoint's step, or 0.

        The checkpoint is of a step before `lost.before`, if the weights from then on are bad.

        Raises:
            LearnerLost: the new learner died meanwhile.
            RunFailed: the learner was lost too often.
            CheckpointError: no checkpoint is intact, or none is from before.
        """
        since = time.monotonic()
        checkpoint = self._restart(lost)
        self.driver.wait_until_started([LEARNER])
        self._rejoin(checkpoint, lost)
        title, seconds = self._learner_spec.title(0), time.monotonic() - since
        self._directory.append_event("restart", who=title, seconds=seconds)
        return checkpoint.step if checkpoint else 0

    def close(self) -> None:
        """End all actors."""
        self.supervisor.end_all()
        self.supervisor.background.close()

    def _create_learner(self, checkpoint: Checkpoint | None) -> None:
        """Create the learner's workers, without waiting for their start."""
        self._learners = self._make(checkpoint, self._attempt)
        for index, actor in enumerate(self._learners.all):
            self.supervisor.adopt(self._learner_spec, index, actor, self._attempt)
        self._attempt += 1

    def _restart(self, lost: LearnerLost) -> Checkpoint | None:
        """Terminate all workers and create new ones; returns the checkpoint that they load."""
        assert self._learners is not None
        title = self._learner_spec.title(0)
        if lost.before is None and len(self.supervisor.members(LEARNER)) == len(self._learners.all):
            # A call of it failed before its heartbeat did.
            self._directory.append_event("death", who=title, why=str(lost))
        delay = self.supervisor.allow(LEARNER, 0, str(lost))
        self.supervisor.remove_all(LEARNER)
        self._learners = None
        checkpoint = self._directory.store.latest(self._print_line, before=lost.before)
        if checkpoint is None and lost.before is not None and lost.before > self._checkpoint_every:
            raise CheckpointError(
                f"{lost}. No checkpoint of a step before {lost.before} is kept: keep more of them "
                "(keep_last=), and begin another out="
            )
        step = checkpoint.step if checkpoint else 0
        self._print_line(f"{lost}. The {title} is restarted, from step {step}")
        self.driver.pause(delay)
        self._directory.rewind_metrics(step)
        self._directory.append_event("rewind", step=step)
        self._create_learner(checkpoint)
        return checkpoint

    # methods for engines, scorers and queue, which `Fleet` overrides

    def _on_death(self, member: Member, why: str) -> None:
        """Pass on the death of an actor; see `Supervisor`."""

    def _rejoin(self, checkpoint: Checkpoint | None, lost: LearnerLost) -> None:
        """Bring all other actors back to the weights of a restarted learner."""

    def compare_all(self, resume_from: Checkpoint | None) -> None:
        """Push the first weights to every engine, compare all parties (the handshake), and get the
        first canary answers of all scorers.

        Raises:
            CalibrationError: parties disagree, unless `handshake=False`.
        """

    def work(self) -> None:
        """Begin rollouts."""

    def wait_for_groups(self) -> float:
        """Wait until the next step's groups are available; returns the seconds waited.

        Raises:
            RunFailed: too many groups were set aside, or none arrived for too long.
        """
        return 0.0

    def turns(self) -> dict[str, float]:
        """Metrics `turns/*` since the last call; empty if no engines take turns on GPUs."""
        return {}

    def cancel_waits(self) -> None:
        """End the learner's wait for groups."""

    def ask_canaries(self, step: int) -> None:
        """Send canaries that are due after `step`; after the last step, wait for the answers."""

    def ask_learner_canaries(self, step: int) -> None:
        """Check the learner's frozen models before a checkpoint of `step`.

        Raises:
            ScoredWrongly: the weights contain scores of a model that has drifted.
        """

    def ask_last_canaries(self, step: int) -> None:
        """Send last canaries to every scorer after a signal, so that the last groups are proven."""

    def commit(self, checkpoint: Checkpoint) -> None:
        """Pass to the queue the groups of a checkpoint that is complete on disk."""

    def settle(self) -> None:
        """Finish the checks of the last push."""

    def set_aside(self, checkpoint: Checkpoint) -> Counter[str]:
        """Numbers of groups that failed for good, by kind, up to a checkpoint."""
        return Counter()
