"""Calls of the evaluator, with retries, and the cause of its deaths.

an engine dies during the call        the call is retried, up to 5 times
the evaluator dies                    the call is retried on its replacement
it makes no progress for deadline_s,  it is terminated and replaced, and the call is retried
    nor do engines that it waits for,
    and it gets no answer
... in an environment or a reward     the second time ends the run, with the problems' names
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.base.outcomes import ActorHung, ActorLost, LearnerLost, RunFailed
from cluster.handles import calls
from cluster.placement.roles import EVALUATOR
from cluster.runtime.driver import Driver
from cluster.supervision.failures import dead_among
from cluster.supervision.supervise import Member, State, Supervisor

_TRIES = 5
# Tries if the evaluator ended in user code: once may be chance.
_TRIES_INSIDE = 2
_PAUSE_S = 1.0

PENDING = object()


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of the evaluator: its name in messages, and a function that begins it."""

    what: str
    make: Callable[[], Any]


class EvaluatorCalls:
    """Calls the evaluator that currently serves, with retries.

    Args:
        prepare: called before each try.
        deadline_s: longest wait for a serving evaluator; the driver limits the time of a call.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        driver: Driver,
        *,
        say: Callable[[str], None],
        prepare: Callable[[], None],
        deadline_s: float,
    ) -> None:
        self._supervisor, self._driver = supervisor, driver
        self._say, self._prepare, self._deadline_s = say, prepare, deadline_s
        self._last_words: list[str] = []

    def buried(self, member: Member) -> None:
        """Record the problems in whose code an evaluator ended, before its successor begins."""
        if words := member.spec.last_words():
            self._last_words.append(words)

    def begun(self, ask: Ask) -> Ask:
        """Begin the call now if an evaluator serves; returns it for `persist`.

        Retries begin a new call.
        """
        tries = [ask.make()] if self._members() else []
        return Ask(ask.what, lambda: tries.pop() if tries else ask.make())

    def persist(self, ask: Ask) -> Any:
        """Value of the call that `ask` makes.

        Raises:
            RunFailed: it did not end, or its actor died, too often.
        """
        self._last_words.clear()
        for left in reversed(range(_TRIES)):
            self._prepare()
            member = self._serving(ask.what)
            try:
                return self._driver.call(ask.what, ask.make(), worker=EVALUATOR)
            except LearnerLost:
                raise
            except ActorLost as lost:
                self._failed(ask.what, member, lost, left)
                self._driver.pause(_PAUSE_S)

    def begin(self, ask: Ask) -> PendingCall:
        """Begin a call that runs concurrently with others, and advances when it is polled."""
        self._last_words.clear()
        return PendingCall(ask, self._members, self._value, self._failed)

    def _value(self, ask: Ask, reference: Any, began: float) -> Any:
        if not calls.ended([reference]):
            if why := self._driver.overdue(began, EVALUATOR):
                raise ActorHung(f"{ask.what} {why}")
            return PENDING
        try:
            return self._driver.value(ask.what, reference)
        except LearnerLost as lost:  # the supervisor reports a dead learner
            raise ActorLost(str(lost)) from lost

    def _failed(self, what: str, member: Member, lost: ActorLost, left: int) -> None:
        """Prepare a retry, on a new evaluator if necessary; raises if there is no retry left."""
        self._replace(member, lost)
        if len(self._last_words) >= _TRIES_INSIDE:
            raise RunFailed(self._explain(what)) from lost
        if not left:
            raise lost
        self._say(f"{lost}; trying again")

    def _members(self) -> list[Member]:
        return self._supervisor.members(EVALUATOR, State.SERVING)

    def _serving(self, what: str) -> Member:
        self._driver.until(
            f"the evaluator, for {what}", lambda: bool(self._members()), self._deadline_s
        )
        return self._members()[0]

    def _replace(self, member: Member, lost: ActorLost) -> None:
        """Restart the evaluator if it died or hangs."""
        if member not in self._supervisor.members(EVALUATOR):
            return
        if isinstance(lost, ActorHung) or dead_among({member.name: member.handle}):
            self._supervisor.bury(member, str(lost))

    def _explain(self, what: str) -> str:
        return (
            f"{what} failed: its actor died or hung {len(self._last_words)} times"
            f"{self._last_words[-1]}. Make that code end, and raise instead of ending or holding "
            f"up its process, or take the problem out; deadline_s={self._deadline_s:g} is the "
            "longest that an evaluation may not get on"
        )


class PendingCall:
    """One non-blocking call of the evaluator that currently serves.

    Args:
        members: returns the evaluators that serve.
        value: returns a call's value, from its reference and start time, or `PENDING`.
        failed: called with a try that was lost and the number left; raises if it was the last.
    """

    def __init__(
        self,
        ask: Ask,
        members: Callable[[], list[Member]],
        value: Callable[[Ask, Any, float], Any],
        failed: Callable[[str, Member, ActorLost, int], None],
    ) -> None:
        self._ask, self._members, self._value, self._failed = ask, members, value, failed
        self._left = _TRIES
        self._running: tuple[Member, Any, float] | None = None
        self._not_before = 0.0

    def poll(self) -> Any:
        """Return the call's value, or `PENDING`; raises as `EvaluatorCalls.persist` does."""
        now = time.monotonic()
        if self._running is None:
            if now < self._not_before or not (members := self._members()):
                return PENDING
            self._left -= 1
            self._running = members[0], self._ask.make(), now
        member, reference, began = self._running
        try:
            return self._value(self._ask, reference, began)
        except ActorLost as lost:
            self._running, self._not_before = None, now + _PAUSE_S
            self._failed(self._ask.what, member, lost, self._left)
            return PENDING
