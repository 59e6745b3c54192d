"""Stalls: the report, the suspects, and the sequence of actions."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.base.outcomes import RunFailed
from cluster.hosts.rollout_actor import GroupProgress, WorkerStatus
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import LedgerSettings, QueueStatus
from cluster.runtime.watchdog import Watchdog, quiet_s, suspects, wait_graph
from distill.records import TrainedGroups


def status(**changes: Any) -> QueueStatus:
    settings: dict[str, Any] = {
        "depth": 1, "leased": {3: ("rollout worker 0", 2, 130.0)}, "pending": [5],
        "missing": [3, 5],
        "credit": 0, "set_aside": 0, "delivered": 7,
        "consecutive_set_aside": 0, "last_reason": "its lease ran out",
        "exhausted": False, "epoch": 1, "starved_s": 0.0, "age_s": 60.0,
    } | changes  # fmt: skip
    return QueueStatus(**settings)


def workers(stage: Any, seconds: float = 125) -> dict[str, WorkerStatus]:
    requests = {"policy engine 0": 1, "policy engine 1": 0, "teacher engine 0": 2}
    groups = (GroupProgress(3, stage, seconds), GroupProgress(4, "scoring", 1))
    return {"rollout worker 0": WorkerStatus(groups=groups, requests=requests)}


def test_the_report_names_groups_workers_and_engines() -> None:
    groups, third, fifth, worker, queue = wait_graph(
        status(), workers("sampling"), 120
    ).splitlines()
    assert "120 s" in groups and "[3, 5]" in groups
    assert "group 3: rollout worker 0, attempt 2, 130 s: sampling for 125 s" in third
    assert "group 5" in fifth and "rollout worker" not in fifth
    assert "1 sampling, 1 scoring" in worker
    assert "policy engine 0 (1), teacher engine 0 (2)" in worker
    assert "its lease ran out" in queue


@pytest.mark.parametrize(
    "stage, expected",
    [
        ("sampling", {"policy engine 0"}),
        ("scoring", {"teacher engine 0"}),
        ("environment", {"rollout worker 0"}),
    ],
)
def test_the_part_that_holds_a_late_group_is_suspected(stage: str, expected: set[str]) -> None:
    assert suspects(status(), workers(stage), {}, 100) == expected
    assert suspects(status(), workers(stage, seconds=5), {}, 100) == set()
    moving: dict[str, float] = {"policy engine 0": 3.0, "teacher engine 0": 3.0}
    assert suspects(status(), workers(stage), moving, 100) == expected - moving.keys()


def test_a_reward_model_is_suspected_in_place_of_its_worker() -> None:
    [asking], [scored] = (workers(stage).values() for stage in ("environment", "scoring"))
    asks = {"rollout worker 0": replace(asking, requests={**asking.requests, "reward model": 1})}
    assert suspects(status(), asks, {"reward model": 200.0}, 100) == {"reward model"}
    assert suspects(status(), asks, {"reward model": 3.0}, 100) == set()
    assert quiet_s(status(), asks, {"reward model": 3.0})[3] == 3.0
    scoring = {"rollout worker 0": replace(asks["rollout worker 0"], groups=scored.groups)}
    assert suspects(status(), scoring, {}, 100) == {"teacher engine 0"}


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stall:
    """A watchdog over groups that do not move, with its actions, reports and clock."""

    def __init__(self) -> None:
        self.clock, self.actions, self.lines = Clock(), list[Any](), list[str]()
        self.dog = Watchdog(
            lambda ids, _reason: self.actions.append(ids),
            lambda name, _why: self.actions.append(name),
            self.lines.append, 350, stall_after_s=100, clock=self.clock,
        )  # fmt: skip

    def look(self, times: range, **changes: Any) -> None:
        for self.clock.now in times:
            self.dog.check(status(**changes), workers("sampling", self.clock.now + 125), {})


def test_a_stall_is_reported_then_acted_on_then_fails_the_run() -> None:
    stall = Stall()
    stall.look(range(0, 100, 20))
    assert not stall.lines and not stall.actions
    stall.look(range(100, 200, 20))
    assert len(stall.lines) == 1 and stall.actions == [[3]]
    stall.look(range(200, 300, 20))
    assert len(stall.lines) == 2 and stall.actions == [[3], "policy engine 0", [3]]
    with pytest.raises(RunFailed):
        stall.look(range(300, 400, 20))


def test_arriving_groups_and_a_busy_learner_restart_the_clock() -> None:
    stall = Stall()
    for first in range(0, 300, 60):
        stall.look(range(first, first + 60, 20), delivered=first)
    stall.look(range(400, 700, 100))  # the learner was busy between looks
    assert not stall.lines and not stall.actions


class SlowRun:
    """The real ledger and watchdog, with one worker whose groups wait for engines of a pool."""

    def __init__(self, groups: int, engines: Mapping[str, Callable[[float], float]]) -> None:
        """
        Args:
            engines: by name, the time of each engine's last progress as a function of the time.
        """
        self.clock, self.lines = Clock(), list[str]()
        self.terminated = list[tuple[float, str]]()
        self.sampled = Counter[int]()
        self._engines = engines
        settings = LedgerSettings(
            groups_per_step=groups, max_staleness=0, total_groups=groups, lease_s=900
        )
        self.ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=self.clock)
        self._dog = Watchdog(
            self.re_lease,
            lambda name, _why: self.terminated.append((self.clock.now, name)),
            self.lines.append, 1800, clock=self.clock,
        )  # fmt: skip
        self._lease()

    def re_lease(self, ids: list[int], reason: str) -> None:
        self.ledger.release(ids, reason)

    def _lease(self) -> None:
        for lease in self.ledger.lease(WORKER, 8, request=str(self.clock.now)):
            self.sampled[lease.group_id] += 1

    def run(self, until: int) -> None:
        """Check and renew leases every ten seconds, as the driver does."""
        for now in range(0, until, 10):
            self.clock.now = now
            since_progress_s = {name: now - moved(now) for name, moved in self._engines.items()}
            in_progress = self.ledger.status().leased
            groups = tuple(GroupProgress(i, "sampling", now) for i in in_progress)
            asked = dict.fromkeys(self._engines, len(groups))
            worker = {WORKER: WorkerStatus(groups=groups, requests=asked)}
            quiet = quiet_s(self.ledger.status(), worker, since_progress_s)
            self.ledger.renew(i for i, seconds in quiet.items() if seconds < 450)
            self.ledger.expire(now)
            self._dog.check(self.ledger.status(), worker, since_progress_s)
            self._lease()


WORKER = "rollout worker 0"


def test_an_engine_without_progress_is_found_although_it_answers_heartbeats() -> None:
    """One counter does not move from 100 s on; among two, only that engine is suspected."""
    run = SlowRun(2, {"policy engine 0": lambda now: min(now, 100)})
    run.run(until=1000)
    assert run.terminated[0] == (700, "policy engine 0"), "not twice 300 s after its last progress"
    assert run.lines and max(run.sampled.values()) > 1

    both = SlowRun(2, {"policy engine 0": lambda now: min(now, 100), "policy engine 1": float})
    worker = WorkerStatus(
        groups=(GroupProgress(0, "sampling", 800),),
        requests={"policy engine 0": 1, "policy engine 1": 1},
    )  # fmt: skip
    since_progress_s = {"policy engine 0": 700.0, "policy engine 1": 0.0}
    assert suspects(both.ledger.status(), {WORKER: worker}, since_progress_s, 300) == {
        "policy engine 0"
    }
