"""The driver's waits for starts and answers, with a simulated supervisor."""

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
    """Members of two roles, of which one more answers at every line of output.

    Nodes have room for the first `room` of each role.
    """

    def __init__(self, answered: int = 0, start_deadline_s: float = 0.0, room: int = 3) -> None:
        self.lines: list[str] = []
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
        self.lines.append(line)
        self._answer()

    def members(self, role: str, *states: State) -> list[Any]:
        return [m for m in self._members if m.role == role and (not states or m.state in states)]

    def critical(self) -> dict[str, Any]:
        return {}

    def _answer(self) -> None:
        next(m for m in self._members if m.state is State.STARTING).state = State.SERVING


def driver(supervisor: Any, deadline_s: float) -> Driver:
    return Driver(supervisor=supervisor, signals=Signals(), deadline_s=deadline_s)


def test_a_long_start_names_the_missing_actors_and_those_without_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.runtime.driver, "SAY_FIRST_S", 0.0)
    supervisor = Starting(room=2)
    driver(supervisor, 60).wait_until_started(["engine", "worker"])
    first, *_, worker_1, worker_2 = supervisor.lines
    assert "0 of 6" in first and "worker 0 and 2 more" in first and "5 of 6" in worker_2
    assert "worker 1," in worker_1 and "worker 2 (no node" in worker_2


def test_a_start_fails_at_the_longest_deadline_of_its_actors() -> None:
    with pytest.raises(RunFailed):
        driver(Starting(answered=4), 0.3).wait_until_started(["engine", "worker"])
    supervisor = Starting(answered=4, start_deadline_s=0.5)
    began = time.monotonic()
    with pytest.raises(RunFailed):
        driver(supervisor, 0.1).wait_until_started(["engine", "worker"])
    assert time.monotonic() - began >= 0.5


def test_an_error_of_another_actor_s_call_is_raised_unchanged() -> None:
    supervisor = Starting()
    error = RayTaskError("poll", "a traceback", ValueError("a bug"))

    async def asks_the_queue() -> None:
        raise error

    supervisor.background.start(asks_the_queue())
    with pytest.raises(RayTaskError):
        driver(supervisor, 60).pause(60)


def test_a_death_is_raised_in_place_of_the_failed_call() -> None:
    """A dead worker's call fails before the driver checks its supervisor again."""
    supervisor, died = Starting(), asyncio.Event()

    async def watch() -> None:
        await asyncio.sleep(0.05)
        died.set()
        raise LearnerLost("learner worker 1 died")

    async def answer() -> None:
        await died.wait()
        raise ActorLost("the canaries failed because an actor died")

    supervisor.background.start(watch())
    with pytest.raises(LearnerLost):
        driver(supervisor, 60).wait_for(answer())


def test_errors_of_the_learner_and_of_its_engines_are_different_classes() -> None:
    """The learner's work can be repeated; engines would fail again."""
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
