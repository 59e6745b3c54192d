"""Calls of the evaluator, with retries, and the cause of its deaths.

an engine dies meanwhile              the call is tried again, up to 5 times
the evaluator dies                    the same, of the one that is made in its place
it does not end within deadline_s     it is ended and replaced, and the same
... in an environment or a reward     the second time ends the run, with the problems' names
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.placement.roles import EVALUATOR
from cluster.runtime.driver import Driver
from cluster.supervision.failures import dead_among
from cluster.supervision.supervise import (
    ActorLost,
    LearnerLost,
    Member,
    Overdue,
    RunFailed,
    State,
    Supervisor,
)

_TRIES = 5
# Of evaluators that ended in somebody's code: once may be chance.
_TRIES_INSIDE = 2
_PAUSE_S = 1.0


class EvaluatorCalls:
    """Asks the evaluator, whichever serves at the time.

    Args:
        prepare: is called before each try.
        deadline_s: longest it waits for one that serves; a call is the driver's to end.
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
        """An evaluator has ended; its successor has not begun."""
        if words := member.spec.last_words():
            self._last_words.append(words)

    def persist(self, what: str, ask: Callable[[], Any]) -> Any:
        """The value of the call that `ask` makes.

        Raises:
            RunFailed: it did not end, or its actor died, too often.
        """
        self._last_words.clear()
        for left in reversed(range(_TRIES)):
            self._prepare()
            member = self._serving(what)
            try:
                return self._driver.call(what, ask())
            except LearnerLost:
                raise
            except ActorLost as lost:
                self._replace(member, lost)
                if len(self._last_words) >= _TRIES_INSIDE:
                    raise RunFailed(self._explain(what)) from lost
                if not left:
                    raise
                self._say(f"{lost}; trying again")
                self._driver.pause(_PAUSE_S)

    def _serving(self, what: str) -> Member:
        def serving() -> list[Member]:
            return self._supervisor.members(EVALUATOR, State.SERVING)

        self._driver.until(f"the evaluator, for {what}", lambda: bool(serving()), self._deadline_s)
        return serving()[0]

    def _replace(self, member: Member, lost: ActorLost) -> None:
        """Restarts the evaluator if it was the one that died, or hangs."""
        if member not in self._supervisor.members(EVALUATOR):
            return
        if isinstance(lost, Overdue) or dead_among({member.name: member.handle}):
            self._supervisor.bury(member, str(lost))

    def _explain(self, what: str) -> str:
        return (
            f"{what} failed: its actor died or hung {len(self._last_words)} times"
            f"{self._last_words[-1]}. Make that code end, and raise instead of ending or holding "
            f"up its process, or take the problem out; deadline_s={self._deadline_s:g} is the "
            "longest an evaluation may take"
        )
