"""Admission of engines that start in the middle of a run: weights, handshake, then announcement.

during a step    policy engines load the copy of the last push, and are compared with an engine that
                 serves; the comparison is repeated if a push interrupts it
between steps    all others: the learner pushes to them, and is compared with them. This includes
                 engines that could not join during a step: no copy can be read, no other engine
                 serves, or they or their handshake failed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from cluster.base.outcomes import ActorLost, CallFailed, LearnerLost
from cluster.handles.calls import reason_of
from cluster.handles.engine_pool import EnginePool
from cluster.handshake.handshake import EnginesSilent
from cluster.placement.roles import EVALUATION, POLICY
from cluster.runtime.learner_alone import LearnerAlone
from cluster.supervision.supervise import JOIN_GROUP, Member, State
from distill.errors import EngineError
from distill.handshake.comparison import CalibrationReport
from distill.lookup import listed

logger = logging.getLogger(__name__)

# Longest wait of a ready engine for others that restart, seconds; a round takes longer.
_TOGETHER_S = 10.0
# Tries of a handshake that pushes interrupt, and seconds between looks for the end of a push and
# for engines that wait.
_TRIES = 3
_PUSH_PAUSE_S, _PAUSE_S = 0.2, 0.5
# Handshake of joining policies and scorers, by name; the report says whether they agree. A third
# argument is a policy engine that replaces the learner while the learner computes.
Examine = Callable[..., Coroutine[Any, Any, CalibrationReport]]


class Admission:
    """Admits ready engines: pushes the current weights, runs the handshake, lets them serve.

    Args:
        actors: actors of the run. A recovery replaces their learner.
        examine: handshake of some engines with the learner.
        following: role of the lagged or EMA teacher, which also receives weights from the learner.
        join: gets the first canary answers of scorers that passed the handshake; returns the
            reasons of refusals, by name.
        require_handshake: False admits engines whose handshake fails.

    Attributes:
        joining: engines that are joining during a step.
    """

    def __init__(
        self,
        actors: LearnerAlone,
        *,
        examine: Examine,
        require_handshake: bool,
        following: str | None = None,
        join: Callable[[Sequence[Member]], Mapping[str, str]] = lambda _members: {},
    ) -> None:
        self._supervisor, self._driver = actors.supervisor, actors.driver
        self._actors, self._examine = actors, examine
        self._require_handshake, self._join = require_handshake, join
        self._following = following
        self.joining: Sequence[Member] = ()
        self._join_task: asyncio.Task[None] | None = None

    def begin_joining(self) -> None:
        """Let policy engines join during the learner's steps from now on."""
        self._join_task = self._driver.background.start(self._join_all())

    def end_joining(self) -> None:
        """Stop joins because the learner is lost, and with it the weights that they load."""
        if self._join_task is not None:
            self._join_task.cancel()
        self.joining = ()

    async def _join_all(self) -> None:
        """Let all waiting engines join together, then those that have arrived meanwhile."""
        left: list[Member] = []  # to `admit_waiting`
        while True:
            waiting = [m for m in self._supervisor.waiting() if m.spec.name == POLICY]
            left = [member for member in left if member in waiting]
            new = [member for member in waiting if member not in left]
            if new and self._supervisor.serving(POLICY):
                self.joining = new
                try:
                    why = await self._joined({member.name: member.handle for member in new})
                except Exception as error:  # it recurs between steps, and is raised there
                    why = reason_of(error)
                if why is not None:
                    names = listed([member.name for member in new])
                    logger.info("%s: not admitted beside a step: %s", names, why)
                    left += new
                self.joining = ()
            await asyncio.sleep(_PAUSE_S)

    async def _joined(self, handles: Mapping[str, Any]) -> str | None:
        """Load, compare and serve; returns the reason of a failure, or None."""
        joins = self._actors.learner.join.options(concurrency_group=JOIN_GROUP)
        if await joins.remote(handles) is None:
            return "the last push left no copy of the weights for them"
        if not (serving := self._supervisor.serving(POLICY)):
            return "no engine serves"
        name, engine = next(iter(serving.items()))
        compared = self._compared(
            EnginePool(POLICY, handles).each(), EnginePool(POLICY, {name: engine})
        )
        report = await asyncio.wait_for(compared, self._driver.deadline_s)
        if report is None:
            return "pushes during their handshake"
        if not self._agree(report):
            return report.message()
        self._serve([m for m in self.joining if m in self._supervisor.waiting()], report)
        return None

    async def _compared(
        self, joining: Mapping[str, EnginePool], reference: EnginePool
    ) -> CalibrationReport | None:
        """Handshake at one weight version of all engines; None if pushes interrupted all tries."""
        everyone = [*joining.values(), reference]

        async def versions() -> set[int]:
            infos = await asyncio.gather(*(engine.info() for engine in everyone))
            return {info.weight_version for info in infos}

        for _ in range(_TRIES):
            while len(before := await versions()) > 1:
                await asyncio.sleep(_PUSH_PAUSE_S)
            report = await self._examine(joining, {}, reference)
            if await versions() == before:
                return report
        return None

    def admit_waiting(self) -> None:
        """Admit waiting engines, and terminate those that fail; call it while the learner is idle.

        Engines that died together come back one after the other. The first ones wait briefly for
        the last, since each round delays training. Evaluation engines are admitted by
        `push_to_evaluators`.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        waiting = [
            m
            for m in self._supervisor.waiting()
            if m.spec.name != EVALUATION and m not in self.joining
        ]
        self._admit(self._together([m for m in waiting if m.spec.name == POLICY]))
        if self._supervisor.serving(POLICY):  # otherwise there are no samples to score
            self._admit(self._together([m for m in waiting if m.spec.name != POLICY]))

    def _together(self, members: Sequence[Member]) -> Sequence[Member]:
        """Return the members, or none while others of their roles are about to be ready."""
        roles = {member.spec.name for member in members}
        if any(self._supervisor.is_restarting(role) for role in roles):
            first = min(member.ready for member in members)
            if time.monotonic() - first < _TOGETHER_S:
                return []
        return members

    def push_to_evaluators(self) -> tuple[int, dict[str, Any]] | None:
        """Push the current weights to evaluation engines; call it while the learner is idle.

        Engines that have started since run the handshake. An engine that fails is terminated.
        Returns the version of the weights, and the engines that hold it until the next call, by
        name; None if no evaluation engine is up.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        members = self._supervisor.members(EVALUATION, State.READY, State.SERVING)
        if not members:
            return None
        handles = {member.name: member.handle for member in members}
        version, failures = self._driver.ask_learner(
            "pushing weights to evaluation engines", self._actors.learner.lend.remote(handles)
        )
        for member in members:
            if (why := failures.get(member.name)) is not None:
                self._refuse(member, why)
        self._admit(members)
        serving = self._supervisor.serving(EVALUATION)
        pinned = {name: handle for name, handle in serving.items() if handles.get(name) == handle}
        return (version, pinned) if pinned else None

    def _admit(self, members: Sequence[Member]) -> None:
        """Admit all that wait together; if that fails, each half separately, to isolate the cause.

        Engines that do not answer are identified by name; the others are admitted without them.
        Members that serve, or were terminated meanwhile, are skipped.
        """
        present = self._supervisor.waiting()
        if not (members := [member for member in members if member in present]):
            return
        try:
            report = self._examined(members)
            agrees = self._agree(report)
            refused = self._join(members) if agrees else {}
        except LearnerLost:
            raise
        except EnginesSilent as silent:
            self._admit_without(members, silent)
            return
        except (CallFailed, ActorLost, EngineError) as error:
            why = str(error)
        else:
            if agrees:
                for member in members:
                    if member.name in refused:
                        self._refuse(member, refused[member.name])
                self._serve([m for m in members if m.name not in refused], report)
                return
            why = report.message()
        if len(members) == 1:
            self._refuse(members[0], why)
            return
        self._admit(members[: len(members) // 2])
        self._admit(members[len(members) // 2 :])

    def _admit_without(self, members: Sequence[Member], silent: EnginesSilent) -> None:
        known = [*members, *self._supervisor.members(POLICY)]  # one of them calls the scorers
        for member in {m.name: m for m in known if m.name in silent.names}.values():
            self._refuse(member, str(silent))
        left = [member for member in members if member.name not in silent.names]
        if len(left) < len(members):  # otherwise they are tried again with another policy engine
            self._admit(left)

    def _agree(self, report: CalibrationReport) -> bool:
        return report.agrees or not self._require_handshake

    def _serve(self, members: Sequence[Member], report: CalibrationReport) -> None:
        if not members:
            return
        for member in members:
            self._supervisor.admit(member)
        names = listed([member.name for member in members])
        verb, whose = ("joins", "its") if len(members) == 1 else ("join", "their")
        self._supervisor.print_line(
            f"{names} {verb}: {whose} handshake agrees to {report.largest_gap:.1e} nats"
        )

    def _examined(self, members: Sequence[Member]) -> CalibrationReport:
        """Handshake of the members. Policy engines get the learner's current weights first.

        Args:
            members: policy engines, engines of evaluations, or scorers.
        """
        joining = {member.name: member.handle for member in members}
        pool = EnginePool(members[0].spec.name, joining).each()
        names = listed(list(joining))
        if members[0].spec.name in (POLICY, EVALUATION):
            if members[0].spec.name == POLICY:
                admitted = self._actors.learner.admit.remote(joining)
                self._driver.ask_learner(f"pushing weights to {names}", admitted)
            examined = self._examine(pool, {})
        else:
            self._driver.ask_learner("the push", self._actors.learner.pushed.remote(True))
            if members[0].spec.name == self._following:
                admitted = self._actors.learner.admit_teachers.remote(joining)
                self._driver.ask_learner(f"pushing weights to {names}", admitted)
            name, policy = next(iter(self._supervisor.serving(POLICY).items()))
            examined = self._examine(EnginePool(POLICY, {name: policy}).each(), pool)
        return self._driver.run(f"the handshake of {names}", examined)

    def _refuse(self, member: Member, why: str) -> None:
        self._driver.pause(0)  # raises if the learner died
        if member in self._supervisor.members(member.spec.name):
            self._supervisor.terminate(member, f"it was not admitted: {why}")
