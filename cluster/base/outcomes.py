"""Exceptions that end a run before its last step, their exit codes, and their text for people.

0 the command did what it was asked; 1 it failed; 2 bad input, nothing was started; 3 the handshake
refused; 129 SIGHUP, 130 Ctrl-C and 143 SIGTERM, after a checkpoint.
"""

from __future__ import annotations

import signal
from pathlib import Path

from distill.errors import EngineError, IsothermError, NonFiniteError

_RESUMES = "same command resumes from the newest checkpoint, or starts again if there is none"


class RunFailed(RuntimeError):
    """The run ended early. The message says which part failed.

    Attributes:
        remedy: what to do about it, a sentence.
    """

    remedy = f"The {_RESUMES}"


class Diverged(RunFailed):
    """A loss, a gradient or a weight is not finite."""

    remedy = (
        "The same command would come to the same place: begin another run, with an out= of its "
        "own and a lower lr or max_grad_norm"
    )

    def offer(self, out: Path, step: int) -> None:
        """Add to the remedy how such a run begins from a checkpoint of this one."""
        self.remedy += (
            f". From the weights of step {step}: python -m cluster.train config={out} "
            f"fork_from={out}:{step} out=DIR lr=RATE"
        )


class OutOfMemory(RunFailed):
    """The learner's GPU had no room for a step."""

    remedy = (
        "Give the learner more room: a smaller learner.token_budget, "
        "learner.gradient_checkpointing=True, learner.offload_optimizer=True, or fewer others on "
        f"that GPU. With that, the {_RESUMES}"
    )


class CallFailed(RunFailed):
    """An awaited call failed or took too long, although all actors may be alive."""


class ActorLost(RunFailed):
    """An actor died during work that can be repeated."""


class ActorHung(ActorLost):
    """An actor is alive, and a call of it made no progress for its deadline."""


class LearnerLost(ActorLost):
    """A learner worker died: the learner goes back to its last checkpoint.

    Attributes:
        before: its weights of this step and later are bad: it goes back to one of an earlier step.
            None: it has died.
    """

    before: int | None = None


class LearnerFailed(LearnerLost):
    """A learner worker lives, and its work raised an error that no setting mends.

    As if it had died; but the second time at the same step the run ends.
    """


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


def exit_code(error: BaseException) -> int | None:
    """Exit code of a command that ends with this error; None for an error in the code."""
    match error:
        case IsothermError() | Interrupted() | StoppedAtOnce():
            return error.exit_code
        case RunFailed() | EngineError() | NonFiniteError():
            return 1
        case KeyboardInterrupt():
            return 130
    return None


def outcome(error: BaseException) -> BaseException:
    """The error itself, or the Ctrl-C behind an error in the code.

    An extension module that is interrupted while it is imported raises ImportError from it.
    """
    behind: BaseException | None = error
    while behind is not None and exit_code(behind) is None:
        behind = behind.__cause__ or behind.__context__
    return behind if isinstance(behind, KeyboardInterrupt) else error


def complaint(error: BaseException) -> str:
    """The text of an error for people, with its remedy if it has one apart from the message."""
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
            return "interrupted (SIGINT)"
    return str(error)
