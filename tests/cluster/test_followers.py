"""Calls of the leader to other learner workers, on Ray."""

import os
import threading
from typing import Any

import pytest
import ray

from cluster.handles import errors
from cluster.handles.calls import root_cause
from cluster.hosts.followers import FOLLOWER_GROUPS, ActorFollowers
from distill.errors import CheckpointError
from learner.process_group import Lane

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Follower:
    """An actor with the interface of `LearnerFollower`."""

    def __init__(self, rank: int) -> None:
        self._rank, self._told = rank, threading.Event()

    def execute(self, method: str, argument: Any) -> Any:
        if method == "wait":
            return self._told.wait(argument)
        if method == "tell":
            self._told.set()
        elif method == "fail" and argument == "raises":
            raise CheckpointError(f"worker {self._rank} cannot read it")
        elif method == "fail" and argument == "dies":
            os._exit(1)
        return self._rank, argument


def followers(timeout_s: float = 60.0) -> ActorFollowers:
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": FOLLOWER_GROUPS}
    kind = ray.remote(**options)(Follower)
    actors = [kind.remote(rank) for rank in (1, 2)]
    return ActorFollowers(actors=actors, timeout_s=timeout_s)


def results(made: ActorFollowers, method: str, arguments: list[Any]) -> list[Any]:
    with made(method, arguments, "main") as answers:
        return answers()


def end(made: ActorFollowers) -> None:
    for actor in made.actors:
        ray.kill(actor)


def test_lanes_run_concurrently() -> None:
    made = followers()
    with made("wait", [60, 60], "main") as waits:
        with made("tell", [None, None], "ahead") as call:
            call()
        assert waits() == [True, True]
    end(made)


def test_an_error_of_a_follower_is_raised_at_the_leader() -> None:
    made = followers()
    with pytest.raises(CheckpointError) as raised:
        results(made, "fail", ["", "raises"])
    assert str(root_cause(raised.value)) == "worker 2 cannot read it"
    assert results(made, "step", ["a", "b"]) == [(1, "a"), (2, "b")]
    end(made)


def test_two_heartbeats_report_a_failed_follower_while_the_leader_works() -> None:
    made = followers()
    with made("fail", ["", "raises"], "main") as answers:
        with pytest.raises(CheckpointError):  # both have ended
            answers()
        made.check()
        with pytest.raises(CheckpointError) as raised:
            made.check()
        assert str(root_cause(raised.value)) == "worker 2 cannot read it"
    made.check()  # the leader has raised the error
    with made("step", ["a", "b"], "main") as answers:
        answers()
        made.check()
        made.check()
    end(made)


@pytest.mark.parametrize(
    ("ends", "lane", "error"),
    [(["", "raises"], "ahead", CheckpointError), (["dies", ""], "main", errors.RayActorError)],
)
def test_the_leader_s_heartbeat_ignores_a_failed_prefetch_and_a_dead_follower(
    ends: list[str], lane: Lane, error: type[Exception]
) -> None:
    made = followers()
    with made("fail", ends, lane) as answers:
        with pytest.raises(error):
            answers()
        made.check()
        made.check()
    end(made)


def test_the_wait_for_a_follower_ends_at_its_deadline() -> None:
    made = followers(timeout_s=1.0)
    with pytest.raises(TimeoutError):
        results(made, "wait", [60, 0])
    end(made)
