"""Calls of the evaluator, with retries, and the cause of its deaths.

an engine dies during the call           the call is retried, up to 5 times
the evaluator dies                       the call is retried on its replacement
neither it nor engines that it waits     it is terminated and replaced, and the call is retried
    for make progress for deadline_s
... in an environment or a reward        the second time ends the run, with the problems' names
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cluster.base.outcomes import ActorHung, ActorLost, RunFailed
from cluster.handles.calls import dead_among
from cluster.placement.roles import EVALUATOR
from cluster.runtime.driver import Driver
from cluster.supervision.supervise import Member, State

_TRIES = 5
# Tries if the evaluator ended in user code: once may be chance.
_TRIES_INSIDE = 2
_PAUSE_S = 1.0


class EvaluatorCalls:
    """Calls the evaluator that currently serves, with retries.

    The driver's deadline is also the longest wait for a serving evaluator.
    """

    def __init__(self, driver: Driver) -> None:
        self._supervisor, self._driver = driver.supervisor, driver

    async def ask(self, what: str, make: Callable[[Any], Any]) -> Any:
        """Value of the call that `make` makes with the evaluator's handle.

        Raises:
            RunFailed: the call did not end, or the evaluator died, too often.
        """
        tried: dict[Member, None] = {}
        for left in reversed(range(_TRIES)):
            tried[member := await self._serving(what)] = None
            try:
                return await self._driver.answer(what, make(member.handle), worker=EVALUATOR)
            except ActorLost as lost:
                self._replace(member, lost)
                inside = [each.death_details for each in tried if each.death_details]
                if len(inside) >= _TRIES_INSIDE:
                    raise RunFailed(self._explain(what, inside)) from lost
                if not left:
                    raise RunFailed(str(lost)) from lost
                self._supervisor.print_line(f"{lost}; trying again")
            await asyncio.sleep(_PAUSE_S)

    async def _serving(self, what: str) -> Member:
        began, deadline_s = time.monotonic(), self._driver.deadline_s
        while not (members := self._supervisor.members(EVALUATOR, State.SERVING)):
            if time.monotonic() - began > deadline_s:
                raise RunFailed(f"waited {deadline_s:.0f} s for the evaluator, for {what}")
            await asyncio.sleep(_PAUSE_S)
        return members[0]

    def _replace(self, member: Member, lost: ActorLost) -> None:
        """Restart the evaluator if it died or hangs."""
        if member not in self._supervisor.members(EVALUATOR):
            return
        if isinstance(lost, ActorHung) or dead_among({member.name: member.handle}):
            self._supervisor.terminate(member, str(lost))

    def _explain(self, what: str, ends: list[str]) -> str:
        return (
            f"{what} failed: its actor died or hung {len(ends)} times{ends[-1]}. Make that code "
            "end, and raise an exception instead of ending or blocking its process, or remove "
            f"the problem; an evaluation fails after deadline_s={self._driver.deadline_s:g} "
            "without progress"
        )
