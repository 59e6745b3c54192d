"""Supervision of real Ray actors: deaths, hangs, restarts and budgets."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from cluster.base.outcomes import LearnerLost, RunFailed
from cluster.handles import calls
from cluster.supervision.supervise import (
    ActorSpec,
    Budget,
    Member,
    State,
    Supervisor,
    location_call,
)
from distill.errors import CheckpointError
from tests.waiting import DEADLINE_S


def test_delays_of_restarts_grow_until_the_budget_is_spent() -> None:
    budget = Budget(max_restarts=9)
    assert [budget.delay(now) for now in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert budget.delay(9) is None


def test_deaths_long_ago_are_forgiven() -> None:
    budget = Budget(max_restarts=2)
    assert [budget.delay(now) for now in (0, 200, 3700, 3900, 4000)] == [0.5, 0.5, 0.5, 0.5, None]
    assert Budget(max_restarts=0).delay(0) is None


class Plain:
    """An actor that answers, and can be made to block."""

    def __init__(self, wrong: str = "") -> None:
        if wrong == "config":
            raise CheckpointError("no such checkpoint")

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)


class House:
    """A supervisor over actors of one role, with its output and events."""

    def __init__(self, *, max_restarts: int = 5, hang_after_s: float = 60, **role: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.terminated: list[str] = []
        self.lines: list[str] = []
        self.made: list[tuple[int, int]] = []
        self.wrong = ""
        self.supervisor = Supervisor(
            print_line=self.lines.append,
            record=lambda event, **fields: self.events.append((event, fields)),
            on_death=lambda member, _why: self.terminated.append(member.name),
            hang_after_s=hang_after_s,
            max_restarts=max_restarts,
        )
        settings: dict[str, Any] = {
            "name": "helper", "title": lambda index: f"helper {index}", "create": self.create,
            "heartbeat": location_call,
            "start_deadline_s": DEADLINE_S,
        } | role  # fmt: skip
        self.spec = ActorSpec(**settings)

    def create(self, index: int, attempt: int) -> Any:
        self.made.append((index, attempt))
        return ray.remote(Plain).options(num_cpus=0).remote(self.wrong)

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline, self.events
            self.supervisor.background.check()
            self.supervisor.background.advance(
                self.supervisor.background.create_task(asyncio.sleep(0.02)), seconds=1
            )

    def serving(self, *indices: int) -> bool:
        return list(self.supervisor.serving("helper")) == [f"helper {i}" for i in indices]

    def pid(self, index: int = 0) -> int:
        return self.recorded("start", f"helper {index}")[-1]["pid"]

    def recorded(self, event: str, who: str) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.events if kind == event and fields["who"] == who]

    def started(self, *indices: int) -> None:
        for index in indices:
            self.supervisor.add(self.spec, index)
        self.until(lambda: self.serving(*indices))
        self.until(lambda: all(self.recorded("start", f"helper {i}") for i in indices))
        self.supervisor.run_started = True


@pytest.fixture
def new_house(ray_cluster: None) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def new(**changes: Any) -> House:
        made.append(House(**changes))
        return made[-1]

    yield new
    for house in made:
        house.supervisor.end_all()
        house.supervisor.background.close()


def test_a_killed_actor_is_restarted_in_its_place(new_house: Callable[..., House]) -> None:
    house = new_house()
    house.started(0, 1)
    changes = house.supervisor.changes
    os.kill(house.pid(1), signal.SIGKILL)
    house.until(lambda: house.terminated == ["helper 1"])
    assert house.serving(0) and house.supervisor.expected("helper") == 2
    house.until(lambda: house.serving(0, 1))
    assert house.made == [(0, 0), (1, 0), (1, 1)] and house.supervisor.changes >= changes + 2
    [death], [restart] = house.recorded("death", "helper 1"), house.recorded("restart", "helper 1")
    assert "SIGKILL" in death["why"] or "died" in death["why"]
    assert restart["seconds"] > 0


@pytest.mark.parametrize("how", ["frozen", pytest.param("blocked", marks=pytest.mark.slow)])
def test_an_actor_without_heartbeats_is_terminated(
    new_house: Callable[..., House], how: str
) -> None:
    house = new_house(hang_after_s=15)  # above the latency of a busy machine
    house.started(0)
    old = house.pid()
    [member] = house.supervisor.members("helper")
    if how == "frozen":
        os.kill(old, signal.SIGSTOP)
    else:
        member.handle.block.remote(3600)
    house.until(lambda: bool(house.recorded("restart", "helper 0")))
    [death] = house.recorded("death", "helper 0")
    assert "15 s" in death["why"]
    house.until(lambda: len(house.recorded("start", "helper 0")) == 2)
    assert house.pid() != old


class Follower:
    """An actor that serves until it is killed."""

    async def serve(self) -> None:
        await asyncio.sleep(3600)


def test_the_loss_of_a_follower_restarts_all(new_house: Callable[..., House]) -> None:
    """As of a server over several nodes, whose other parts are terminated too."""
    followers: list[list[Any]] = []

    def follow(index: int, attempt: int, _handle: Any) -> dict[Any, Any]:
        made: list[Any] = [ray.remote(Follower).options(num_cpus=0).remote() for _ in range(2)]
        followers.append(made)
        assert (index, attempt) == (0, len(followers) - 1)
        return {follower.serve.remote(): follower for follower in made}

    house = new_house(follow=follow)
    house.started(0)
    pids = ray.get([location_call(follower) for follower in followers[0]])
    os.kill(pids[1][0], signal.SIGKILL)
    house.until(lambda: house.terminated == ["helper 0"])
    [death] = house.recorded("death", "helper 0")
    assert death["why"].startswith("on another of its nodes: ")
    old = house.pid()
    house.until(lambda: len(house.recorded("start", "helper 0")) == 2)
    assert house.pid() != old and house.made == [(0, 0), (0, 1)] and len(followers) == 2
    for pid in (old, pids[0][0]):
        house.until(lambda pid=pid: not psutil.pid_exists(pid))
    [pid, _] = [pid for pid, _ in ray.get([location_call(f) for f in followers[1]])]
    [member] = house.supervisor.members("helper")
    house.supervisor.remove(member)
    house.until(lambda: not psutil.pid_exists(pid))


def test_an_actor_that_is_not_needed_is_not_restarted(new_house: Callable[..., House]) -> None:
    house = new_house()
    house.started(0, 1)
    assert house.supervisor.cancel_restart("helper") is None
    os.kill(house.pid(1), signal.SIGKILL)
    house.until(lambda: house.terminated == ["helper 1"])
    assert house.supervisor.cancel_restart("helper") == 1
    assert house.supervisor.expected("helper") == 1
    end_of_delay = time.monotonic() + 1
    house.until(lambda: time.monotonic() > end_of_delay)
    assert house.made == [(0, 0), (1, 0)]


def test_an_actor_that_dies_while_it_drains_is_not_restarted(
    new_house: Callable[..., House],
) -> None:
    house = new_house()
    house.started(0, 1)
    house.supervisor.drain(house.supervisor.members("helper")[1])
    os.kill(house.pid(1), signal.SIGKILL)
    house.until(lambda: house.terminated == ["helper 1"])
    assert house.supervisor.expected("helper") == 1 and house.serving(0)


def test_more_deaths_than_allowed_fail_the_run(new_house: Callable[..., House]) -> None:
    house = new_house(max_restarts=1)
    house.started(0)
    os.kill(house.pid(), signal.SIGKILL)
    house.until(lambda: len(house.recorded("start", "helper 0")) == 2)
    os.kill(house.pid(), signal.SIGKILL)
    with pytest.raises(RunFailed):
        house.until(lambda: False)


def test_an_actor_that_cannot_start_fails_the_run_only_at_its_beginning(
    new_house: Callable[..., House],
) -> None:
    house = new_house()
    house.wrong = "config"
    house.supervisor.add(house.spec, 0)
    with pytest.raises(RunFailed):
        house.until(lambda: False)
    house = new_house()
    house.started(0)
    house.wrong = "config"
    house.supervisor.add(house.spec, 1)
    house.until(lambda: house.terminated == ["helper 1"])
    house.wrong = ""
    house.until(lambda: house.serving(0, 1))


def test_the_loss_of_a_critical_actor_is_a_lost_learner(new_house: Callable[..., House]) -> None:
    house = new_house(critical=True)
    house.started(0)
    os.kill(house.pid(), signal.SIGKILL)
    with pytest.raises(LearnerLost):
        house.until(lambda: False)
    assert house.supervisor.critical() == {} and house.made == [(0, 0)]


def test_actors_that_are_replaced_together_keep_their_budget(
    new_house: Callable[..., House],
) -> None:
    """As the learner's workers, of which all but one are alive when one has died."""
    house = new_house(critical=True, max_restarts=2)
    for attempt in range(2):
        house.supervisor.adopt(house.spec, 0, house.create(0, attempt), attempt)
        house.supervisor.allow("helper", 0, "another worker died")
        house.supervisor.remove_all("helper")
    with pytest.raises(RunFailed):
        house.supervisor.allow("helper", 0, "another worker died")


def test_a_gated_actor_serves_once_it_is_admitted(new_house: Callable[..., House]) -> None:
    house = new_house(gated=True)
    house.supervisor.add(house.spec, 0)
    house.until(lambda: bool(house.supervisor.waiting()))
    [member] = house.supervisor.waiting()
    assert house.supervisor.serving("helper") == {}
    house.supervisor.admit(member)
    assert house.serving(0) and house.supervisor.waiting() == []
    house.supervisor.drain(member)
    assert house.supervisor.serving("helper") == {} and house.supervisor.expected("helper") == 0
    assert house.supervisor.members("helper", State.DRAINING) == [member]
    house.supervisor.remove(member)
    assert house.supervisor.members("helper") == []


def test_the_deadline_of_a_start_begins_with_a_place(new_house: Callable[..., House]) -> None:
    there = False
    asked: list[Any] = []

    def heartbeat(actor: Any) -> Any:
        asked.append(actor)
        return location_call(actor)

    house = new_house(
        lacking=lambda _index: "" if there else "1 GPU", start_deadline_s=1, heartbeat=heartbeat
    )
    house.supervisor.add(house.spec, 0)
    end_of_wait = time.monotonic() + 2
    house.until(lambda: time.monotonic() > end_of_wait)
    assert len(house.supervisor.members("helper", State.STARTING)) == 1
    assert not asked and house.terminated == [] and house.lines == []
    there = True
    house.until(lambda: bool(asked))


def test_an_actor_without_its_node_reports_the_missing_resources_once(
    new_house: Callable[..., House],
) -> None:
    there = True
    house = new_house(lacking=lambda index: "" if there else f"{index + 1} GPU")
    house.started(0)
    there = False
    os.kill(house.pid(), signal.SIGKILL)
    house.until(lambda: any("waits for 1 GPU" in line for line in house.lines))
    there = True
    house.until(lambda: house.serving(0))
    assert sum("waits for 1 GPU" in line for line in house.lines) == 1


@pytest.mark.slow
def test_an_actor_that_ray_restarts_keeps_its_place(new_house: Callable[..., House]) -> None:
    house = new_house(hang_after_s=15, restarted_by_ray=True)
    handle = ray.remote(Plain).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    member: Member = house.supervisor.adopt(house.spec, 0, handle)
    house.until(lambda: bool(house.recorded("start", "helper 0")))
    os.kill(house.pid(), signal.SIGKILL)
    house.until(lambda: len(house.recorded("start", "helper 0")) == 2)
    os.kill(house.pid(), signal.SIGSTOP)
    house.until(lambda: len(house.recorded("start", "helper 0")) == 3)
    assert (
        len(house.recorded("death", "helper 0")) == len(house.recorded("restart", "helper 0")) == 2
    )
    assert house.supervisor.members("helper") == [member] and house.terminated == []
    calls.kill(handle)
