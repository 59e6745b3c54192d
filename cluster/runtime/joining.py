"""Policy engines that join while the learner computes.

    load      the copy of the last push                  waits for: a push in progress
    examine   the handshake with an engine that serves   repeated, if a push interrupts it
    serve     like engines that are admitted between steps

An engine that cannot join this way (it can read no copy, no other engine serves, it fails, or its
handshake fails) is left to `Admission`, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.handles.engine_pool import EnginePool
from cluster.handles.failures import reason_of
from cluster.placement.roles import POLICY
from cluster.runtime.driver import Driver, forget
from cluster.supervision.supervise import JOIN_GROUP, Member, Supervisor
from distill.handshake.comparison import CalibrationReport

logger = logging.getLogger(__name__)

# Tries of a handshake that pushes interrupt, and seconds between checks for the end of a push.
_TRIES = 3
_PAUSE_S = 0.2


class Joining:
    """Joins policy engines in groups, one at a time: all engines that wait when it begins.

    Args:
        learner: returns the leader of the current learner.
        examine: the handshake of some engines with one that holds the learner's weights.
        serve: lets engines serve if their handshake agrees; returns False if it does not.
        deadline_s: longest that a handshake may take.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        driver: Driver,
        *,
        learner: Callable[[], Any],
        examine: Callable[..., Any],
        serve: Callable[[Sequence[Member], CalibrationReport], bool],
        deadline_s: float,
    ) -> None:
        self._supervisor, self._driver, self._learner = supervisor, driver, learner
        self._examine, self._serve, self._deadline_s = examine, serve, deadline_s
        self._members: list[Member] = []
        self._left: list[Member] = []  # left to `Admission`
        self._task: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """Reset after the learner was replaced: weights of the old one are invalid."""
        if self._task is not None:
            forget(self._task)
        self._members, self._left, self._task = [], [], None

    @property
    def members(self) -> Sequence[Member]:
        """Engines that are joining."""
        return self._members

    def poll(self) -> None:
        """Begin to join engines that wait, if none are joining."""
        if self._task is not None and not self._task.done():
            return
        waiting = [m for m in self._supervisor.waiting() if m.spec.name == POLICY]
        self._left = [m for m in self._left if m in waiting]
        new = [m for m in waiting if m not in self._left]
        if new and self._supervisor.serving(POLICY):
            self._members = new
            self._task = self._driver.beside(self._join(new))

    async def _join(self, members: list[Member]) -> None:
        try:
            why = await self._joined({member.name: member.handle for member in members})
        except Exception as error:  # any: it recurs between steps, and is raised there
            why = reason_of(error)
        if why is not None:
            names = ", ".join(member.name for member in members)
            logger.info("%s: not admitted beside a step: %s", names, why)
            self._left += members
        self._members = []

    async def _joined(self, handles: Mapping[str, Any]) -> str | None:
        """Load, examine and serve; returns why not, or None."""
        joins = self._learner().join.options(concurrency_group=JOIN_GROUP)
        if await joins.remote(handles) is None:
            return "the last push left no copy that they can read"
        if not (serving := self._supervisor.serving(POLICY)):
            return "no engine serves"
        name, engine = next(iter(serving.items()))
        examined = self._examined(
            EnginePool(POLICY, handles).each(), EnginePool(POLICY, {name: engine})
        )
        report = await asyncio.wait_for(examined, self._deadline_s)
        if report is None:
            return "pushes fell into their handshake"
        alive = [m for m in self._members if m in self._supervisor.waiting()]
        return None if self._serve(alive, report) else report.complaint()

    async def _examined(
        self, joining: Mapping[str, EnginePool], reference: EnginePool
    ) -> CalibrationReport | None:
        """Handshake at one weight version of all engines; None if pushes interrupted all tries."""
        everyone = [*joining.values(), reference]

        async def versions() -> set[int]:
            infos = await asyncio.gather(*(engine.info() for engine in everyone))
            return {info.weight_version for info in infos}

        for _ in range(_TRIES):
            while len(before := await versions()) > 1:
                await asyncio.sleep(_PAUSE_S)
            report = await self._examine(joining, {}, reference)
            if await versions() == before:
                return report
        return None
