"""Exceptions that end a run before its last step; each becomes an exit code."""

from __future__ import annotations

import signal
from pathlib import Path


class RunFailed(RuntimeError):
    """The run ended early. The message says which part failed.

    Attributes:
        remedy: what to do about it, a sentence.
    """

    remedy = "The same command resumes from the newest checkpoint"


class Diverged(RunFailed):
    """A loss, a gradient or a weight is not finite."""

    remedy = (
        "The same command would come to the same place: begin another run, with an out= of its "
        "own and a lower lr or max_grad_norm"
    )

    def offer(self, out: Path, step: int) -> None:
        """Says how such a run begins from a checkpoint of this one."""
        self.remedy += (
            f". From the weights of step {step}: python -m cluster.train config={out} "
            f"fork_from={out}:{step} out=DIR lr=RATE"
        )


class Interrupted(Exception):
    """The user (SIGINT), the scheduler (SIGTERM) or a lost terminal (SIGHUP) ends the run.

    Attributes:
        trained: whether the run has a step to keep.
        only_kept: such a step is groups that were kept, and nothing else.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        self.trained = True
        self.only_kept = False


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal: the run ends without a checkpoint."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
