"""The driver's waits for calls of actors, which poll signals and the life of every actor.

The run is sequential code that waits (`call`, `run`). Coroutines (`background`) advance while it
waits; they await `answer` in place of `call`. `cluster/run.py` lists the waits of a run and their
deadlines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from cluster.base.background import forget
from cluster.base.outcomes import (
    ActorHung,
    ActorLost,
    CallFailed,
    Diverged,
    Interrupted,
    LearnerFailed,
    LearnerLost,
    OutOfMemory,
    RunFailed,
    StoppedAtOnce,
)
from cluster.base.signals import handled
from cluster.handles import calls, errors
from cluster.placement.roles import LEARNER
from cluster.supervision.supervise import Member, State, Supervisor, WorkFailed
from distill.errors import EngineError, EngineLost, IsothermError, NonFiniteError
from distill.lookup import listed

# Seconds between two polls of signals and actors: in a wait, and while actors start.
_POLL_S, _PAUSE_S = 0.5, 0.05
# Time until a slow start first reports missing actors; it doubles up to the second value.
SAY_FIRST_S, _SAY_AT_MOST_S = 5.0, 60.0
# Two signals within this time are one: timeout(1) sends it to its child, then to the group.
_SAME_SIGNAL_S = 1.0
Value = TypeVar("Value")
_ENDING = (
    "the run ends with a checkpoint of the last complete step; a second signal ends it at once, "
    "without a checkpoint"
)


class Signals:
    """Records the first SIGINT, SIGTERM or SIGHUP; the driver checks for it between waits.

    `ending` is True during work that a first signal does not end.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.ending = False
        self._received_at = 0.0

    def installed(self) -> AbstractContextManager[None]:
        """Context with the handlers. A second signal ends the process immediately."""
        return handled(self._handle, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def check(self) -> None:
        """Raise Interrupted if a signal has come in, except while the run is `ending`."""
        if self.received is not None and not self.ending:
            raise Interrupted(self.received)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signum, now
            # Not print: a handler may run in the middle of one.
            with suppress(OSError):  # the terminal may be gone
                below_the_bar = "\n" if os.isatty(2) else ""
                name = signal.Signals(signum).name
                os.write(2, f"{below_the_bar}{name}: {_ENDING}\n".encode())
        elif now - self._received_at > _SAME_SIGNAL_S:
            raise StoppedAtOnce(signum)


def _starting(member: Member) -> str:
    """Name of a starting member, with the current activity of its start if known."""
    does = member.spec.start_is(member.index)
    if member.spec.lacking(member.index):
        does = "no node has room for it"
    return f"{member.name} ({does})" if does else member.name


class Driver:
    """Waits for actor calls while watching signals and every actor's life.

    Args:
        deadline_s: longest any one call may take.
    """

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        signals: Signals,
        deadline_s: float,
    ) -> None:
        self.supervisor, self._signals = supervisor, signals
        self.deadline_s = deadline_s
        self.background = supervisor.background

    @contextmanager
    def ending(self, deadline_s: float) -> Iterator[None]:
        """Context of calls after the first signal, each of which may take `deadline_s` at most."""
        usual, self.deadline_s = self.deadline_s, min(self.deadline_s, deadline_s)
        self._signals.ending = True
        try:
            yield
        finally:
            self.deadline_s, self._signals.ending = usual, False

    def _check(self) -> None:
        """Raise the error of a background coroutine that failed.

        If a learner worker's work failed while the others wait for it, raise the cause: an error
        that the user can act on, or the loss of the learner.
        """
        try:
            self.background.check()
        except WorkFailed as error:
            assert isinstance(error.__cause__, errors.RayError)
            raise self._explained("the learner's work", error.__cause__, LEARNER) from error

    def ask_learner(self, what: str, reference: Any) -> Any:
        """Value of a call of the learner, which may take any time while it makes progress.

        Raises: as `call`, and
            LearnerLost: a learner worker died or hangs. The work is repeated from a checkpoint.
            LearnerFailed: the work raised an error that no setting would fix; also repeated.
            CallFailed: no engine did its part (EngineError). Another learner would not help.
        """
        return self.wait_for(self.answer(what, reference, LEARNER))

    def call(self, what: str, reference: Any) -> Any:
        """Value of an actor call.

        Raises:
            Interrupted: a signal arrived during the wait. The call continues.
            ActorLost: the actor died; ActorHung: it hangs.
            LearnerLost: a learner worker died meanwhile.
            RunFailed: any other error. Errors that a user can act on (IsothermError) are not
                wrapped.
        """
        return self.wait_for(self.answer(what, reference))

    async def answer(self, what: str, reference: Any, worker: str | None = None) -> Any:
        """Value of an actor call, for coroutines; raises as `call` or `ask_learner`.

        Args:
            worker: role of the actor that executes the call. The call may exceed the deadline
                while that actor's heartbeat shows progress. None: it may not.
        """
        began = time.monotonic()
        ended = asyncio.ensure_future(calls.end_of(reference))
        try:
            while not (await asyncio.wait([ended], timeout=_POLL_S))[0]:
                if why := self._overdue(began, worker):
                    raise (LearnerLost if worker == LEARNER else ActorHung)(f"{what} {why}")
        finally:
            ended.cancel()
        return self.value(what, reference, worker=worker)

    def wait_for(self, coroutine: Coroutine[Any, Any, Value] | asyncio.Task[Value]) -> Value:
        """Value of a coroutine. If the wait fails, the coroutine is cancelled."""
        task = self.background.create_task(coroutine)
        try:
            while not self.waited_for(task):
                pass
            return task.result()
        finally:
            forget(task)

    def waited_for(self, task: asyncio.Task[Any]) -> bool:
        """Wait a short while for a task; True if it has ended.

        Raises Interrupted after a signal, and errors of background coroutines. If a death has
        failed the task, the death is raised in place of the task's error.
        """
        self._signals.check()
        self._check()
        ended = self.background.advance(task, _POLL_S)
        if ended and not task.cancelled() and task.exception() is not None:
            self._check()
        return ended

    def _overdue(self, began: float, worker: str | None) -> str | None:
        """Reason to stop waiting for a call that began at `began`, or None. See `answer`."""
        seconds = time.monotonic() - began
        if seconds <= self.deadline_s:
            return None
        if worker is None:
            return f"did not end within {self.deadline_s:.0f} s"
        if time.monotonic() - self.supervisor.last_progress(worker) <= self.deadline_s:
            return None
        return f"made no progress for {self.deadline_s:.0f} s"

    def wait_until_started(self, roles: Sequence[str]) -> None:
        """Wait until every actor of the roles has answered; report missing ones periodically.

        Raises:
            RunFailed: an actor cannot start, or not all started within the longest of
                `deadline_s` and their own deadlines.
        """
        since = printed_at = time.monotonic()
        pause = SAY_FIRST_S
        while missing := self._members(roles, State.STARTING):
            now = time.monotonic()
            if now - since > max([self.deadline_s, *(m.spec.start_deadline_s for m in missing)]):
                names = listed([member.name for member in missing])
                raise RunFailed(f"waited {now - since:.0f} s for {names} to start")
            if now - printed_at >= pause:
                printed_at, pause = now, min(2 * pause, _SAY_AT_MOST_S)
                everyone = len(self._members(roles))
                self.supervisor.print_line(
                    f"starting: {everyone - len(missing)} of {everyone} actors have answered after "
                    f"{now - since:.0f} s; waiting for {listed(list(map(_starting, missing)))}"
                )
            self.pause(_PAUSE_S)

    def _members(self, roles: Sequence[str], *states: State) -> list[Member]:
        return [m for role in roles for m in self.supervisor.members(role, *states)]

    def pause(self, seconds: float) -> None:
        """Sleep; raises as `call` does."""
        self.wait_for(asyncio.sleep(seconds))

    def run(self, what: str, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Value of a coroutine that awaits actor calls; raises as `call` does."""
        try:
            return self.wait_for(asyncio.wait_for(coroutine, self.deadline_s))
        except errors.RayError as error:
            raise self._explained(what, error) from error
        except TimeoutError as error:
            late = f"{what} did not end within {self.deadline_s:.0f} s"
            raise CallFailed(late) from error

    def value(
        self,
        what: str,
        reference: Any,
        timeout: float | None = None,
        worker: str | None = None,
    ) -> Any:
        """Value of a finished call; see `answer` for the errors."""
        try:
            return calls.get(reference, timeout=timeout)
        except errors.GetTimeoutError as error:
            raise RunFailed(f"{what} did not answer within {timeout:.0f} s") from error
        except errors.RayError as error:
            raise self._explained(what, error, worker) from error

    def _explained(self, what: str, error: errors.RayError, worker: str | None = None) -> Exception:
        """Error of a failed call, for the run; the only place that classifies such errors."""
        of_learner = worker == LEARNER
        if calls.is_death(error):
            lost, who = (LearnerLost, "the learner") if of_learner else (ActorLost, "its actor")
            return lost(f"{what} failed because {who} died ({calls.reason_of(error)})")
        cause = calls.root_cause(error)
        if isinstance(cause, IsothermError):
            return cause
        if isinstance(cause, NonFiniteError):
            return Diverged(f"{what} failed: {cause}")
        # A connection error is explained by the death of the actor at the other end.
        if dead := calls.dead_among(self.supervisor.critical()):
            return LearnerLost(f"{what} failed because {', '.join(dead)} died")
        if isinstance(cause, errors.RayError | EngineLost):
            return ActorLost(f"{what} failed because an actor died ({calls.reason_of(cause)})")
        # torch's class, which the driver does not import.
        if of_learner and type(cause).__name__ == "OutOfMemoryError":
            return OutOfMemory(f"{what} failed: {cause}")
        failed = LearnerFailed if of_learner and not isinstance(cause, EngineError) else CallFailed
        return failed(f"{what} failed: {type(cause).__name__}: {cause}")
