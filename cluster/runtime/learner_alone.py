"""The actors of a run without engines: a learner alone, on data that is there already."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from cluster.base.outcomes import LearnerLost
from cluster.config.common import CommonConfig
from cluster.hosts.learners import learner_spec
from cluster.placement.roles import LEARNER
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Driver, Signals
from cluster.runtime.learner_lifecycle import LearnerLifecycle, MakeLearners
from cluster.supervision.supervise import Supervisor
from learner.checkpoint import Checkpoint


class LearnerAlone:
    """Lifecycle of a learner without engines: sft, dpo, reward_model, and train_from=.

    `cluster.run` calls it as it calls a `Fleet`. What concerns engines, scorers and the queue does
    nothing here.
    """

    def __init__(
        self,
        config: CommonConfig,
        make: MakeLearners,
        directory: RunDirectory,
        signals: Signals,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._supervisor = Supervisor(
            say=say, record=directory.append_event, buried=lambda _member, _why: None
        )
        self.driver = Driver(
            supervisor=self._supervisor, signals=signals, deadline_s=config.no_progress_s
        )
        self._lifecycle = LearnerLifecycle(
            make, learner_spec(config), self._supervisor, directory, config.checkpoint.every
        )

    @property
    def learner(self) -> Any:
        return self._lifecycle.leader

    def start(self, resume_from: Checkpoint | None) -> None:
        """Create the learner, and wait until it has answered."""
        self._lifecycle.fill(resume_from)
        self.driver.until_started([LEARNER], self._say)
        self._supervisor.under_way = True

    def recover(self, lost: LearnerLost) -> int:
        """Start a new learner from the newest checkpoint; returns the checkpoint's step, or 0."""
        since = time.monotonic()
        checkpoint = self._lifecycle.recover(lost, self.driver, self._say)
        self.driver.until_started([LEARNER], self._say)
        self._lifecycle.recovered(time.monotonic() - since)
        return checkpoint.step if checkpoint else 0

    def close(self) -> None:
        """End the learner."""
        self._supervisor.end_all()
        self.driver.close()

    # engines, scorers and queue: there are none

    def push_and_compare(self, resume_from: Checkpoint | None) -> None: ...

    def introduce_scorers(self) -> None: ...

    def work(self) -> None: ...

    def wait_for_groups(self) -> float:
        return 0.0

    def end_waits(self) -> None: ...

    def ask_canaries(self, step: int) -> None: ...

    def ask_learner_canaries(self, step: int) -> None: ...

    def ask_last_canaries(self, step: int) -> None: ...

    def commit(self, checkpoint: Checkpoint) -> None: ...

    def settle(self) -> None: ...

    def set_aside(self, checkpoint: Checkpoint) -> Counter[str]:
        return Counter()

    def certificate(self) -> None: ...
