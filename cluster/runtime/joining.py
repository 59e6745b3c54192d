"""Policy engines that join while the learner computes.

    load      the copy of the last push                  waits for: a push in progress
    examine   the handshake with an engine that serves   repeated, if a push interrupts it
    serve     like engines that are admitted between steps

The driver polls; nothing here blocks. An engine that cannot join this way (it can read no copy, no
other engine serves, it fails, or its handshake fails) is left to `Admission`, between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from cluster.handles import calls
from cluster.hosts.engine_pool import EnginePool
from cluster.placement.roles import POLICY
from cluster.supervision.failures import reason_of
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
        *,
        learner: Callable[[], Any],
        examine: Callable[..., Any],
        serve: Callable[[Sequence[Member], CalibrationReport], bool],
        deadline_s: float,
    ) -> None:
        self._supervisor, self._learner = supervisor, learner
        self._examine, self._serve, self._deadline_s = examine, serve, deadline_s
        self.forget()

    def forget(self) -> None:
        """Reset after the learner was replaced: weights of the old one are invalid."""
        self._members: list[Member] = []
        self._left: list[Member] = []  # left to `Admission`
        self._loading: Any = None
        self._examining: Future[CalibrationReport | None] | None = None

    @property
    def members(self) -> Sequence[Member]:
        """Engines that are joining."""
        return self._members

    def poll(self) -> None:
        """Continue without blocking. Raises nothing."""
        try:
            if self._loading is not None:
                self._after_load()
            elif self._examining is not None:
                self._after_handshake(self._examining)
            else:
                self._begin()
        except Exception as error:  # any: it recurs between steps, and is raised there
            self._leave(reason_of(error))

    def _begin(self) -> None:
        waiting = [m for m in self._supervisor.waiting() if m.spec.name == POLICY]
        self._left = [m for m in self._left if m in waiting]
        new = [m for m in waiting if m not in self._left]
        if new and self._supervisor.serving(POLICY):
            self._members = new
            joins = self._learner().join.options(concurrency_group=JOIN_GROUP)
            self._loading = joins.remote({m.name: m.handle for m in new})

    def _after_load(self) -> None:
        if not calls.ended([self._loading]):
            return
        loading, self._loading = self._loading, None
        if calls.get(loading) is None:
            self._leave("the last push left no copy that they can read")
            return
        if not (serving := self._supervisor.serving(POLICY)):
            self._leave("no engine serves")
            return
        pool = EnginePool(POLICY, {m.name: m.handle for m in self._members}).each()
        name, engine = next(iter(serving.items()))
        reference = EnginePool(POLICY, {name: engine})
        examined = asyncio.wait_for(self._examined(pool, reference), self._deadline_s)
        self._examining = calls.in_thread(lambda: asyncio.run(examined), "handshake")

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

    def _after_handshake(self, examining: Future[CalibrationReport | None]) -> None:
        if not examining.done():
            return
        self._examining = None
        report = examining.result()
        alive = [m for m in self._members if m in self._supervisor.waiting()]
        if report is None:
            self._leave("pushes fell into their handshake")
        elif not self._serve(alive, report):
            self._leave(report.complaint())
        else:
            self._members = []

    def _leave(self, why: str) -> None:
        """Leave the members to be admitted between steps."""
        names = ", ".join(member.name for member in self._members)
        logger.info("%s: not admitted beside a step: %s", names, why)
        self._left += self._members
        self._members, self._loading, self._examining = [], None, None
