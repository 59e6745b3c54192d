"""Admission of engines: many join by one push and one handshake, and a wrong one is found."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.handles.engine_pool import EnginePool
from cluster.handles.local_actor import LocalActor
from cluster.placement.roles import POLICY, REFERENCE
from cluster.runtime.admission import Admission
from cluster.runtime.driver import Driver, Signals
from cluster.supervision.supervise import ActorSpec, Member, State, Supervisor, ready_call
from distill.errors import EngineError
from distill.handshake.comparison import CalibrationReport, Comparison
from tests.waiting import DEADLINE_S

AGREES = Comparison(
    party="engine", reference="learner", temperature=0.7, num_tokens=8, max_gap=1e-6, mean_gap=1e-7,
    tolerance=1e-3,
)  # fmt: skip


class Engine:
    """An engine that only reports its version."""

    version = 0

    async def info(self) -> Any:
        return SimpleNamespace(weight_version=self.version)

    async def hold(self, version: int) -> None:
        self.version = version


class Learner:
    """A learner that records pushes, and fails those to `unreachable`.

    With `copy` engines may join from its copy of the weights, during a step.
    """

    def __init__(self, unreachable: str, copy: bool, joined: list[list[str]]) -> None:
        self._joined = joined
        self.pushes: list[list[str]] = []
        self.waits = 0  # for the end of a push
        self._unreachable, self._copy = unreachable, copy
        self._served = threading.Event()

    def step(self) -> str:
        """Return after `end_step`."""
        assert self._served.wait(DEADLINE_S)
        return "trained"

    def end_step(self) -> None:
        self._served.set()

    def join(self, engines: Mapping[str, Any]) -> int | None:
        self._joined.append(list(engines))
        if self._unreachable in engines:
            raise EngineError("pushing weights failed: no answer")
        return 0 if self._copy else None

    def admit(self, engines: Mapping[str, Any]) -> None:
        self.pushes.append(list(engines))
        if self._unreachable in engines:
            raise EngineError("pushing weights failed: no answer")

    def pushed(self, wait: bool) -> None:
        assert wait
        self.waits += 1

    def calls(self) -> tuple[list[list[str]], int]:
        return self.pushes, self.waits


class House:
    """Ready engines of one role, beside a policy engine that serves."""

    def __init__(
        self,
        role: str,
        number: int,
        *,
        disagrees: str = "",
        unreachable: str = "",
        copy: bool = True,
        pushes: int = 0,
    ) -> None:
        """
        Args:
            pushes: number of pushes that fall into handshakes during a step, one into each.
        """
        self.lines: list[str] = []
        self.examined: list[list[str]] = []
        self.references: list[EnginePool] = []  # engines in the learner's place
        self._disagrees, self._pushes = disagrees, pushes
        self.supervisor = Supervisor(
            print_line=self.lines.append, record=lambda _event, **_fields: None,
            on_death=lambda _member, _why: None, hang_after_s=60, max_restarts=9,
        )  # fmt: skip
        self.supervisor.run_started = True
        # The reference of scorers, and of policy engines that join during a step.
        self.present = [self._adopt(POLICY, 99, State.SERVING)]
        self.members = [self._adopt(role, index, State.READY) for index in range(number)]
        self.joined: list[list[str]] = []  # during a step
        self.learner = LocalActor(Learner, unreachable, copy, self.joined)
        self.driver = Driver(supervisor=self.supervisor, signals=Signals(), deadline_s=60)
        self._admission = Admission(
            self,  # pyright: ignore[reportArgumentType] - what it needs of a fleet
            examine=self._examine,
            require_handshake=True,
        )

    def _adopt(self, role: str, index: int, state: State) -> Member:
        spec = ActorSpec(
            name=role, title=lambda index: f"{role} {index}",
            create=lambda _index, _attempt: LocalActor(Engine), heartbeat=ready_call, gated=True,
            start_deadline_s=60,
        )  # fmt: skip
        member = self.supervisor.adopt(spec, index, LocalActor(Engine))
        member.state = state
        return member

    async def _examine(
        self,
        policies: Mapping[str, EnginePool],
        scorers: Mapping[str, EnginePool],
        reference: EnginePool | None = None,
    ) -> CalibrationReport:
        names = list(scorers or policies)
        self.examined.append(names)
        if reference is not None:
            self.references.append(reference)
            if self._pushes:
                self._pushes -= 1
                for member in (*self.members, *self.present):
                    await member.handle.hold.remote(len(self.references))
        off = replace(AGREES, max_gap=9.0, mean_gap=3.0)
        return CalibrationReport(comparisons=(off if self._disagrees in names else AGREES,))

    def admit(self) -> list[str]:
        """Admit all that wait; return the names of engines that serve."""
        self._admission.admit_waiting()
        return [member.name for member in self.members if member.state is State.SERVING]

    @property
    def calls(self) -> tuple[list[list[str]], int]:
        return self.learner.calls.remote().future.result(60)

    def begin_joining(self) -> None:
        self._admission.begin_joining()
        while not self.joined:
            self.driver.pause(0.01)

    def with_another_learner(self) -> None:
        self._admission.end_joining()

    def step(self) -> None:
        """Run a learner's step that lasts until no engine is joining."""
        step = self.learner.step.remote()
        self.begin_joining()
        while self._admission.joining:
            self.driver.pause(0.05)
        assert not step.future.done()
        self.learner.end_step.options(concurrency_group="any").remote()
        assert self.driver.ask_learner("a step", step) == "trained"

    def close(self) -> None:
        self.driver.background.close()
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
def test_all_waiting_engines_join_by_one_push_and_one_handshake(house: Any, role: str) -> None:
    many = house(role, 32)
    everyone = [f"{role} {index}" for index in range(32)]
    assert many.admit() == everyone
    assert many.examined == [everyone]
    assert many.calls == (([everyone], 0) if role == POLICY else ([], 1))
    [line] = many.lines
    assert f"{role} 3 and 28 more" in line and "1.0e-06" in line
    assert many.admit() == everyone and len(many.examined) == 1


@pytest.mark.parametrize("wrong", ["disagrees", "unreachable"])
def test_a_failing_engine_is_found_by_bisection_and_the_others_join(house: Any, wrong: str) -> None:
    many = house(POLICY, 32, **{wrong: "policy 13"})
    assert many.admit() == [f"policy {index}" for index in range(32) if index != 13]
    assert sum("policy 13 died" in line for line in many.lines) == 1
    assert len(many.calls[0]) == 1 + 2 * 5
    if wrong == "unreachable":
        assert all("policy 13" not in names for names in many.examined)


def test_an_engine_that_died_before_its_push_is_reported_once(house: Any) -> None:
    few = house(POLICY, 4, unreachable="policy 2")
    few.members[2].handle.end()
    assert few.admit() == ["policy 0", "policy 1", "policy 3"]
    assert sum("policy 2 died" in line for line in few.lines) == 1


@pytest.mark.parametrize("pushes", [0, 1, 2])
def test_waiting_engines_join_during_a_step(house: Any, pushes: int) -> None:
    """Each is compared with an engine that serves, and again after each push meanwhile."""
    many = house(POLICY, 32, pushes=pushes)
    everyone = [f"{POLICY} {index}" for index in range(32)]
    many.step()
    assert [member.name for member in many.members if member.state is State.SERVING] == everyone
    assert many.examined == [everyone] * (1 + pushes)
    assert len(many.references) == 1 + pushes
    assert many.admit() == everyone and many.calls == ([], 0)  # the learner admitted none


@pytest.mark.parametrize(
    "trouble", [{"copy": False}, {"disagrees": "policy 2"}, {"unreachable": "policy 2"},
                {"pushes": 99}],
    ids=["no copy", "disagrees", "unreachable", "pushes"],
)  # fmt: skip
def test_engines_that_cannot_join_during_a_step_are_admitted_after_it(
    house: Any, trouble: dict[str, Any]
) -> None:
    few = house(POLICY, 4, **trouble)
    few.step()
    assert [member.state for member in few.members] == [State.READY] * 4
    good = [i for i in range(4) if f"policy {i}" not in trouble.values()]
    assert few.admit() == [f"policy {i}" for i in good]
    assert few.calls[0][0] == [f"policy {i}" for i in range(4)]


def test_engines_that_were_joining_are_admitted_by_another_learner(house: Any) -> None:
    few = house(POLICY, 2)
    few.members[0].handle.hold.remote(1)  # during a push
    few.begin_joining()
    assert few.admit() == []
    few.with_another_learner()
    assert few.admit() == ["policy 0", "policy 1"]
    assert few.calls[0] == [["policy 0", "policy 1"]]
