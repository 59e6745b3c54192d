"""Waiting for actors to start and for their answers, with a supervisor that is made up."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

import cluster.runtime.driver
from cluster.base.background import Background
from cluster.base.outcomes import ActorLost, CallFailed, LearnerFailed, LearnerLost, RunFailed
from cluster.handles.local_actor import LocalActor
from cluster.runtime.driver import Driver, Signals
from cluster.supervision.supervise import State
from distill.errors import EngineError


class Starting:
    """Members of two roles, of which so many have answered; another one does at every line that is
    said.

    Nodes have room for the first `room` of each role.
    """

    def __init__(self, answered: int = 0, start_deadline_s: float = 0.0, room: int = 3) -> None:
        self.said: list[str] = []
        self.background = Background()
        spec = SimpleNamespace(
            start_deadline_s=start_deadline_s,
            start_is=lambda _: "",
            lacking=lambda index: "" if index < room else "1 GPU",
        )
        self._members = [
            SimpleNamespace(name=f"{role} {i}", index=i, role=role, state=State.STARTING, spec=spec)
            for role in ("engine", "worker")
            for i in range(3)
        ]
        for _ in range(answered):
            self._answer()

    def print_line(self, line: str) -> None:
        self.said.append(line)
        self._answer()

    def members(self, role: str, *states: State) -> list[Any]:
        return [m for m in self._members if m.role == role and (not states or m.state in states)]

    def critical(self) -> dict[str, Any]:
        return {}

    def _answer(self) -> None:
        next(m for m in self._members if m.state is State.STARTING).state = State.SERVING


def driver(supervisor: Any, deadline_s: float) -> Driver:
    return Driver(supervisor=supervisor, signals=Signals(), deadline_s=deadline_s)


def test_a_start_that_takes_long_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.runtime.driver, "SAY_FIRST_S", 0.0)
    supervisor = Starting()
    driver(supervisor, 60).wait_until_started(["engine", "worker"])
    said = supervisor.said
    assert said[0].startswith("starting: 0 of 6 actors have answered")
    assert said[0].endswith("waiting for engine 0, engine 1, engine 2, worker 0 and 2 more")
    assert said[-1].startswith("starting: 5 of 6") and said[-1].endswith("waiting for worker 2")


def test_a_start_that_waits_for_a_node_is_told_from_one_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.runtime.driver, "SAY_FIRST_S", 0.0)
    supervisor = Starting(room=2)
    driver(supervisor, 60).wait_until_started(["engine", "worker"])
    *_, worker_1, worker_2 = supervisor.said
    assert "worker 1," in worker_1 and "worker 2 (no node" in worker_2


def test_who_does_not_start_in_time_is_named() -> None:
    with pytest.raises(RunFailed):
        driver(Starting(answered=4), 0.3).wait_until_started(["engine", "worker"])


def test_one_whose_model_takes_longer_to_load_is_waited_for() -> None:
    supervisor = Starting(answered=4, start_deadline_s=0.5)
    began = time.monotonic()
    with pytest.raises(RunFailed):
        driver(supervisor, 0.1).wait_until_started(["engine", "worker"])
    assert time.monotonic() - began >= 0.5


def test_an_error_of_another_actor_s_call_is_not_the_learner_s() -> None:
    supervisor = Starting()
    error = RayTaskError("poll", "a traceback", ValueError("a bug"))

    async def asks_the_queue() -> None:
        raise error

    supervisor.background.start(asks_the_queue())
    with pytest.raises(RayTaskError):
        driver(supervisor, 60).pause(60)


def test_a_death_is_raised_in_place_of_the_call_that_it_failed() -> None:
    """The call of a terminated worker fails before the driver looks at its supervisor again."""
    supervisor, terminated = Starting(), asyncio.Event()

    async def watch() -> None:
        await asyncio.sleep(0.05)
        terminated.set()
        raise LearnerLost("learner worker 1 died")

    async def answer() -> None:
        await terminated.wait()
        raise ActorLost("the canaries failed because an actor died")

    supervisor.background.start(watch())
    with pytest.raises(LearnerLost):
        driver(supervisor, 60).wait_for(answer())


def test_an_error_of_the_learner_s_own_is_not_that_of_an_engine() -> None:
    """The work can be done again; engines that take no weights would not take them then either."""
    supervisor = Starting()

    def of(error: Exception) -> type[Exception]:
        def step() -> None:
            raise error

        actor = LocalActor(SimpleNamespace, step=step)
        with pytest.raises(RunFailed) as raised:
            driver(supervisor, 60).ask_learner("a step", actor.step.remote())
        actor.end()
        return raised.type

    assert of(OSError("a broken disk")) is LearnerFailed
    assert of(EngineError("no engine took the weights")) is CallFailed
