"""Many engines that join at once: one push and one handshake, and the one that is off is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.handles.local_actor import LocalActor
from cluster.hosts.engine_pool import EnginePool
from cluster.placement.roles import POLICY, REFERENCE
from cluster.runtime.admission import Admission
from cluster.runtime.driver import Driver, Signals
from cluster.supervision.supervise import (
    ActorSpec,
    Member,
    State,
    Supervisor,
    ready_call,
    whereabouts_call,
)
from distill.errors import EngineError
from distill.handshake.comparison import CalibrationReport, Comparison

AGREES = Comparison(
    party="engine", reference="learner", temperature=0.7, num_tokens=8, max_gap=1e-6, mean_gap=1e-7,
    tolerance=1e-3,
)  # fmt: skip


class Engine:
    """An engine that nobody asks anything: what is wrong with it is known to those who would."""


class Learner:
    """Takes note of each push, and fails those to `unreachable`."""

    def __init__(self, unreachable: str) -> None:
        self.pushes: list[list[str]] = []
        self.waits = 0  # for the push beside a step, which scorers are not examined in
        self._unreachable = unreachable

    def admit(self, engines: Mapping[str, Any]) -> None:
        self.pushes.append(list(engines))
        if self._unreachable in engines:
            raise EngineError("pushing weights failed: no answer")

    def pushed(self, wait: bool) -> None:
        assert wait
        self.waits += 1

    def told(self) -> tuple[list[list[str]], int]:
        return self.pushes, self.waits


class House:
    """Ready engines of one role, beside a policy engine that serves."""

    def __init__(
        self, role: str, number: int, *, disagrees: str = "", unreachable: str = ""
    ) -> None:
        self.said: list[str] = []
        self.examined: list[list[str]] = []
        self._disagrees = disagrees
        self.supervisor = Supervisor(
            say=self.said.append,
            record=lambda _event, **_fields: None,
            buried=lambda _member, _why: None,
            hang_after_s=60,
            max_restarts=9,
        )
        self.supervisor.under_way = True
        if role != POLICY:
            self._adopt(POLICY, 0, State.SERVING)
        self.members = [self._adopt(role, index, State.READY) for index in range(number)]
        self.learner = LocalActor(Learner, unreachable)
        self._admission = Admission(
            self.supervisor,
            Driver(supervisor=self.supervisor, signals=Signals(), deadline_s=60),
            roles=(POLICY, REFERENCE),
            learner=lambda: self.learner,
            examine=self._examine,
            require_handshake=True,
            say=self.said.append,
        )

    def _adopt(self, role: str, index: int, state: State) -> Member:
        spec = ActorSpec(
            name=role,
            title=lambda index: f"{role} {index}",
            create=lambda _index, _attempt: LocalActor(Engine),
            heartbeat=ready_call,
            introduction=whereabouts_call,
            gated=True,
            start_deadline_s=60,
        )
        member = self.supervisor.adopt(spec, index, LocalActor(Engine))
        member.state = state
        return member

    async def _examine(
        self, policies: Mapping[str, EnginePool], scorers: Mapping[str, EnginePool]
    ) -> CalibrationReport:
        names = list(scorers or policies)
        self.examined.append(names)
        off = replace(AGREES, max_gap=9.0, mean_gap=3.0)
        return CalibrationReport(comparisons=(off if self._disagrees in names else AGREES,))

    def admit(self) -> list[str]:
        """Names of those that serve then."""
        self._admission.admit_waiting()
        return [member.name for member in self.members if member.state is State.SERVING]

    @property
    def told(self) -> tuple[list[list[str]], int]:
        return self.learner.told.remote().future.result(60)

    def close(self) -> None:
        self.supervisor.end_all()
        self.learner.end()


@pytest.fixture
def house() -> Iterator[Any]:
    made: list[House] = []

    def new(*given: Any, **named: Any) -> House:
        made.append(House(*given, **named))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.mark.parametrize("role", [POLICY, REFERENCE])
def test_all_that_wait_join_by_one_push_and_one_handshake(house: Any, role: str) -> None:
    many = house(role, 32)
    everyone = [f"{role} {index}" for index in range(32)]
    assert many.admit() == everyone
    assert many.examined == [everyone]
    assert many.told == (([everyone], 0) if role == POLICY else ([], 1))
    assert many.said == [
        f"{role} 0, {role} 1, {role} 2, {role} 3 and 28 more join: their handshake agrees to "
        "1.0e-06 nats"
    ]
    assert many.admit() == everyone and len(many.examined) == 1


@pytest.mark.parametrize("wrong", ["disagrees", "unreachable"])
def test_one_that_fails_is_found_by_halves_and_keeps_nobody_out(house: Any, wrong: str) -> None:
    many = house(POLICY, 32, **{wrong: "policy 13"})
    assert many.admit() == [f"policy {index}" for index in range(32) if index != 13]
    assert any("policy 13 died (it was not admitted: " in line for line in many.said)
    assert len(many.told[0]) == 1 + 2 * 5
    if wrong == "unreachable":
        assert all("policy 13" not in names for names in many.examined)


def test_one_that_died_before_it_was_asked_is_buried_once(house: Any) -> None:
    few = house(POLICY, 4, unreachable="policy 2")
    few.members[2].handle.end()
    assert few.admit() == ["policy 0", "policy 1", "policy 3"]
    assert sum("policy 2 died" in line for line in few.said) == 1
