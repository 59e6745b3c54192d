"""Exceptions that end a run before its last step, with their exit codes and messages.

Exit codes: 0 the command succeeded; 1 it failed; 2 bad input, nothing was started; 3 the handshake
was refused; 129 SIGHUP, 130 Ctrl-C and 143 SIGTERM, after a checkpoint.
"""

from __future__ import annotations

import signal
from pathlib import Path

from distill.errors import EngineError, IsothermError, NonFiniteError

_RESUMES = "same command resumes from the newest checkpoint, or starts again if there is none"


class RunFailed(RuntimeError):
    """The run ended early. The message names the part that failed.

    Attributes:
        remedy: a sentence that tells the user what to do.
    """

    remedy = f"The {_RESUMES}"


class Diverged(RunFailed):
    """A loss, a gradient or a weight is not finite."""

    remedy = (
        "The same command would fail in the same way: start another run, with another out= and "
        "a lower lr or max_grad_norm"
    )

    def offer(self, out: Path, step: int) -> None:
        """Add to the remedy how to start such a run from a checkpoint of this one."""
        self.remedy += (
            f". From the weights of step {step}: python -m cluster.train config={out} "
            f"fork_from={out}:{step} out=DIR lr=RATE"
        )


class OutOfMemory(RunFailed):
    """The learner's GPU has too little memory for a step."""

    remedy = (
        "Give the learner more room: a smaller learner.token_budget, "
        "learner.gradient_checkpointing=True, learner.offload_optimizer=True, or fewer "
        f"processes on that GPU. With that, the {_RESUMES}"
    )


class CallFailed(RunFailed):
    """An awaited call failed or timed out, although all actors may be alive."""


class ActorLost(RunFailed):
    """An actor died during work that can be repeated."""


class ActorHung(ActorLost):
    """An actor is alive, and a call of it made no progress for its deadline."""


class LearnerLost(ActorLost):
    """A learner worker died: the learner returns to its last checkpoint.

    Attributes:
        before: weights of this step and later are bad, so the learner returns to an earlier step.
            None: the weights are good.
    """

    before: int | None = None


class LearnerFailed(LearnerLost):
    """A learner worker is alive, and its work raised an error that no setting would fix.

    Handled like a death, but the second failure at the same step ends the run.
    """


class Interrupted(Exception):
    """The user (SIGINT), the scheduler (SIGTERM) or a lost terminal (SIGHUP) ends the run.

    Attributes:
        trained: True if the run has a step to keep.
        only_kept: True if such a step only kept groups.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum
        self.trained = True
        self.only_kept = False


class Ended(KeyboardInterrupt):
    """A signal ends a command that has nothing to save."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


class StoppedAtOnce(Ended):
    """A second signal: the run ends without a checkpoint."""


def exit_code(error: BaseException) -> int | None:
    """Exit code of a command that ends with this error; None for an internal error."""
    match error:
        case IsothermError() | Interrupted() | Ended():
            return error.exit_code
        case RunFailed() | EngineError() | NonFiniteError():
            return 1
        case KeyboardInterrupt():
            return 130
    return None


def outcome(error: BaseException) -> BaseException:
    """The error itself, or the KeyboardInterrupt that caused an internal error.

    An extension module raises ImportError if Ctrl-C interrupts its import.
    """
    behind: BaseException | None = error
    while behind is not None and exit_code(behind) is None:
        behind = behind.__cause__ or behind.__context__
    return behind if isinstance(behind, KeyboardInterrupt) else error


def error_text(error: BaseException) -> str:
    """Text of an error for users, with its remedy if the message does not contain it."""
    match error:
        case Interrupted(trained=False):
            return f"interrupted ({error}) before the first step; the same command starts again"
        case Interrupted():
            kept = "kept so far is in out/groups"
            safe = kept if error.only_kept else "trained so far is in a checkpoint"
            return f"interrupted ({error}); every step {safe}, and the same command resumes"
        case RunFailed():
            return f"{error}. {error.remedy}"
        case StoppedAtOnce():
            return f"stopped at once, without a checkpoint: the {_RESUMES}"
        case KeyboardInterrupt():
            return f"interrupted ({error if isinstance(error, Ended) else 'SIGINT'})"
    return str(error)
