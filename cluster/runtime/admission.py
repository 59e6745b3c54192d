"""Admission of engines that start in the middle of a run: weights, handshake, then announcement."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.base.outcomes import ActorLost, CallFailed, LearnerLost
from cluster.handles.engine_pool import EnginePool
from cluster.handshake.handshake import EnginesSilent
from cluster.placement.roles import EVALUATION, POLICY
from cluster.runtime.driver import Driver
from cluster.runtime.joining import Joining
from cluster.supervision.supervise import Member, State, Supervisor
from distill.errors import EngineError
from distill.handshake.comparison import CalibrationReport
from distill.lookup import listed

# Longest wait of a ready engine for others that restart, seconds; a round takes longer.
_TOGETHER_S = 10.0
# Handshake of joining policies and scorers, by name; the report says whether they agree. A third
# argument is a policy engine that replaces the learner while the learner computes.
Examine = Callable[..., Coroutine[Any, Any, CalibrationReport]]


@dataclass(frozen=True, slots=True)
class Pinned:
    """Engines that hold one version of the weights until they are pinned again, by name."""

    version: int
    engines: Mapping[str, Any]


class Admission:
    """Admits ready engines: pushes the current weights, runs the handshake, lets them serve.

    Args:
        roles: roles of the engines that are admitted; other actors serve without admission.
        learner: returns the leader of the current learner.
        examine: the handshake of some engines with the learner.
        following: role of the lagged or EMA teacher, which receives weights from the learner, too.
        join: gets the first canary answers of scorers that passed the handshake; returns the
            reasons of refusals, by name.
        require_handshake: False admits engines whose handshake fails.
        deadline_s: longest that a handshake during a step may take.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        driver: Driver,
        *,
        roles: Sequence[str],
        learner: Callable[[], Any],
        examine: Examine,
        require_handshake: bool,
        say: Callable[[str], None],
        deadline_s: float,
        following: str | None = None,
        join: Callable[[Sequence[Member]], Mapping[str, str]] = lambda _members: {},
    ) -> None:
        self._supervisor, self._driver, self._roles = supervisor, driver, roles
        self._learner, self._examine, self._say = learner, examine, say
        self._require_handshake, self._join = require_handshake, join
        self._following = following
        self.joining = Joining(
            supervisor,
            driver,
            learner=learner,
            examine=examine,
            serve=self._serve_if_they_agree,
            deadline_s=deadline_s,
        )

    def admit_waiting(self) -> None:
        """Admit waiting engines, and terminate those that fail; call it while the learner is idle.

        Engines that died together come back one after the other. The first ones wait briefly for
        the last, since each round delays training.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        waiting = [
            m
            for m in self._supervisor.waiting()
            if m.spec.name in self._roles and m not in self.joining.members
        ]
        self._admit(self._together([m for m in waiting if m.spec.name == POLICY]))
        if self._supervisor.serving(POLICY):  # else there are no samples to score
            self._admit(self._together([m for m in waiting if m.spec.name != POLICY]))

    def _together(self, members: Sequence[Member]) -> Sequence[Member]:
        """Return the members, or none while others of their roles are about to be ready."""
        roles = {member.spec.name for member in members}
        if any(self._supervisor.coming_back(role) for role in roles):
            first = min(member.ready for member in members)
            if time.monotonic() - first < _TOGETHER_S:
                return []
        return members

    def pin(self) -> Pinned | None:
        """Push the current weights to evaluation engines; call it while the learner is idle.

        Engines that have started since run the handshake. An engine that fails is terminated.
        Returns None if no evaluation engine is up.

        Raises:
            LearnerLost: the learner died meanwhile.
        """
        members = self._supervisor.members(EVALUATION, State.READY, State.SERVING)
        if not members:
            return None
        handles = {member.name: member.handle for member in members}
        version, failures = self._driver.ask_learner(
            "pushing weights to evaluation engines", self._learner().lend.remote(handles)
        )
        for member in members:
            if (why := failures.get(member.name)) is not None:
                self._refuse(member, why)
        self._admit([m for m in members if m.state is State.READY and m.name not in failures])
        serving = self._supervisor.serving(EVALUATION)
        pinned = {name: handle for name, handle in serving.items() if handles.get(name) == handle}
        return Pinned(version, pinned) if pinned else None

    def _admit(self, members: Sequence[Member]) -> None:
        """Admit all members together; if that fails, each half separately, to isolate the cause.

        Engines that do not answer are known by name; the others are admitted without them.
        """
        if not members:
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
                self._say_admitted([m for m in members if m.name not in refused], report)
                return
            why = report.complaint()
        if len(members) == 1:
            self._refuse(members[0], why)
            return
        present = self._supervisor.waiting()  # one may have been terminated meanwhile
        for half in (members[: len(members) // 2], members[len(members) // 2 :]):
            self._admit([member for member in half if member in present])

    def _admit_without(self, members: Sequence[Member], silent: EnginesSilent) -> None:
        known = [*members, *self._supervisor.members(POLICY)]  # one of them calls the scorers
        for member in {m.name: m for m in known if m.name in silent.names}.values():
            self._refuse(member, str(silent))
        left = [member for member in members if member.name not in silent.names]
        if len(left) < len(members):  # else they are tried again with another policy engine
            present = self._supervisor.waiting()
            self._admit([member for member in left if member in present])

    def _serve_if_they_agree(self, members: Sequence[Member], report: CalibrationReport) -> bool:
        """Let policy engines that joined during a step serve; False if they do not agree."""
        if self._agree(report):
            self._say_admitted(members, report)
        return self._agree(report)

    def _agree(self, report: CalibrationReport) -> bool:
        return report.agrees or not self._require_handshake

    def _say_admitted(self, members: Sequence[Member], report: CalibrationReport) -> None:
        if not members:
            return
        for member in members:
            self._supervisor.admit(member)
        names = listed([member.name for member in members])
        verb, whose = ("joins", "its") if len(members) == 1 else ("join", "their")
        self._say(f"{names} {verb}: {whose} handshake agrees to {report.largest_gap:.1e} nats")

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
                admitted = self._learner().admit.remote(joining)
                self._driver.ask_learner(f"pushing weights to {names}", admitted)
            examined = self._examine(pool, {})
        else:
            self._driver.ask_learner("the push", self._learner().pushed.remote(True))
            if members[0].spec.name == self._following:
                admitted = self._learner().admit_teachers.remote(joining)
                self._driver.ask_learner(f"pushing weights to {names}", admitted)
            name, policy = next(iter(self._supervisor.serving(POLICY).items()))
            examined = self._examine(EnginePool(POLICY, {name: policy}).each(), pool)
        return self._driver.run(f"the handshake of {names}", examined)

    def _refuse(self, member: Member, why: str) -> None:
        self._supervisor.tick()  # it may be the learner that died
        if member in self._supervisor.members(member.spec.name):
            self._supervisor.bury(member, f"it was not admitted: {why}")
