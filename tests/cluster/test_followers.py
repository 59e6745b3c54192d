"""The leader's calls of the other learner workers, on Ray."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import ray

from cluster.handles import errors
from cluster.handles.failures import root_cause
from cluster.hosts.followers import FOLLOWER_GROUPS, ActorFollowers
from distill.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Follower:
    """An actor that is called as a `LearnerFollower` is."""

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


def end(made: ActorFollowers) -> None:
    for actor in made.actors:
        ray.kill(actor)


def test_each_gets_its_argument_and_results_are_by_rank() -> None:
    made = followers()
    assert made("step", ["a", "b"], "main")() == [(1, "a"), (2, "b")]
    end(made)


def test_lanes_run_side_by_side() -> None:
    made = followers()
    waits = made("wait", [60, 60], "main")
    made("tell", [None, None], "ahead")()
    assert waits() == [True, True]
    end(made)


def test_what_a_follower_raises_reaches_the_leader() -> None:
    made = followers()
    with pytest.raises(CheckpointError) as raised:
        made("fail", ["", "raises"], "main")()
    assert str(root_cause(raised.value)) == "worker 2 cannot read it"
    assert made("step", ["a", "b"], "main")() == [(1, "a"), (2, "b")]
    end(made)


def test_a_follower_that_dies_is_no_silence() -> None:
    made = followers()
    with pytest.raises(errors.RayActorError):
        made("fail", ["dies", ""], "main")()
    end(made)


def test_a_follower_that_does_not_end_is_waited_for_no_longer_than_agreed() -> None:
    made = followers(timeout_s=1.0)
    with pytest.raises(TimeoutError, match="wait"):
        made("wait", [60, 0], "main")()
    end(made)
