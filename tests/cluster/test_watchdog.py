"""A stall: what is said, who is suspected, and what is done when."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.base.outcomes import RunFailed
from cluster.hosts.rollout_actor import GroupUnderWay, WorkerStatus
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_answers import QueueStatus
from cluster.queue.ledger_settings import LedgerSettings
from cluster.runtime.watchdog import Watchdog, quiet_s, suspects, wait_graph
from distill.records import TrainedGroups


def status(**changes: Any) -> QueueStatus:
    settings: dict[str, Any] = {
        "depth": 1, "leased": {3: ("rollout worker 0", 2, 130.0)}, "pending": [5],
        "missing": [3, 5],
        "credit": 0, "set_aside": 0, "re_leases": 1, "delivered": 7, "duplicates": 0,
        "consecutive_set_aside": 0, "last_reason": "its lease ran out", "published": 3,
        "exhausted": False, "epoch": 1, "starved_s": 0.0, "age_s": 60.0,
    } | changes  # fmt: skip
    return QueueStatus(**settings)


def workers(stage: Any, seconds: float = 125) -> dict[str, WorkerStatus]:
    requests = {"policy engine 0": 1, "policy engine 1": 0, "teacher engine 0": 2}
    groups = (GroupUnderWay(3, stage, seconds), GroupUnderWay(4, "scoring", 1))
    return {"rollout worker 0": WorkerStatus(groups=groups, requests=requests, max_groups=4)}


class Hospital:
    def __init__(self) -> None:
        self.done: list[Any] = []

    def re_lease(self, ids: list[int], reason: str) -> None:
        self.done.append(ids)

    def bury(self, name: str, why: str) -> None:
        self.done.append(name)


def test_the_report_names_everyone() -> None:
    assert wait_graph(status(), workers("sampling"), 120).splitlines() == [
        "no prompt group arrived for 120 s; the learner waits for [3, 5]",
        "  group 3: rollout worker 0, attempt 2, 130 s: sampling for 125 s",
        "  group 5: waits for a worker with room",
        "  rollout worker 0: 1 sampling, 1 scoring; waits for policy engine 0 (1), "
        "teacher engine 0 (2)",
        "  queue: 1 groups, credit for 0 more, 1 to be leased again; "
        "last trouble: its lease ran out",
    ]


@pytest.mark.parametrize(
    "stage, expected",
    [
        ("sampling", {"policy engine 0"}),
        ("scoring", {"teacher engine 0"}),
        ("environment", {"rollout worker 0"}),
    ],
)
def test_who_holds_a_late_group_is_suspected(stage: str, expected: set[str]) -> None:
    assert suspects(status(), workers(stage), {}, 100) == expected
    assert suspects(status(), workers(stage, seconds=5), {}, 100) == set()
    moving: dict[str, float] = {"policy engine 0": 3.0, "teacher engine 0": 3.0}
    assert suspects(status(), workers(stage), moving, 100) == expected - moving.keys()


def test_a_reward_model_is_suspected_in_place_of_the_worker_that_asks_it() -> None:
    [asking], [scored] = (workers(stage).values() for stage in ("environment", "scoring"))
    asks = {"rollout worker 0": replace(asking, requests={**asking.requests, "reward model": 1})}
    assert suspects(status(), asks, {"reward model": 200.0}, 100) == {"reward model"}
    assert suspects(status(), asks, {"reward model": 3.0}, 100) == set()
    assert quiet_s(status(), asks, {"reward model": 3.0})[3] == 3.0
    scoring = {"rollout worker 0": replace(asks["rollout worker 0"], groups=scored.groups)}
    assert suspects(status(), scoring, {}, 100) == {"teacher engine 0"}


class Clock:
    """Seconds, as the test says them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Patient:
    """A watchdog, what it said, and a clock."""

    def __init__(self) -> None:
        self.clock, self.hospital, self.said = Clock(), Hospital(), list[str]()
        re_lease, bury = self.hospital.re_lease, self.hospital.bury
        self.dog = Watchdog(
            re_lease, bury, self.said.append, 350, stall_after_s=100, clock=self.clock
        )

    def look(self, times: range, **changes: Any) -> None:
        for self.clock.now in times:
            self.dog.check(status(**changes), workers("sampling", self.clock.now + 125), {})


def test_it_tells_then_acts_then_gives_up() -> None:
    patient = Patient()
    patient.look(range(0, 100, 20))
    assert not patient.said and not patient.hospital.done
    patient.look(range(100, 200, 20))
    assert len(patient.said) == 1 and patient.hospital.done == [[3]]
    patient.look(range(200, 300, 20))
    assert len(patient.said) == 2 and patient.hospital.done == [[3], "policy engine 0", [3]]
    with pytest.raises(RunFailed):
        patient.look(range(300, 400, 20))


def test_a_group_that_arrives_and_a_learner_at_work_start_the_clock_again() -> None:
    patient = Patient()
    for first in range(0, 300, 60):
        patient.look(range(first, first + 60, 20), delivered=first)
    patient.look(range(400, 700, 100))  # steps took a while
    assert not patient.said and not patient.hospital.done


class SlowRun:
    """The real ledger and watchdog of one worker, whose groups wait for engines of a pool."""

    def __init__(self, groups: int, engines: Mapping[str, Callable[[float], float]]) -> None:
        """
        Args:
            engines: by name, when each last got on with its work, by the present time.
        """
        self.clock, self.said, self.buried = Clock(), list[str](), list[tuple[float, str]]()
        self.sampled = Counter[int]()
        self._engines = engines
        settings = LedgerSettings(
            groups_per_step=groups, max_staleness=0, total_groups=groups, lease_s=900
        )
        self.ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=self.clock)
        self._dog = Watchdog(self.re_lease, self.bury, self.said.append, 1800, clock=self.clock)
        self._lease()

    def re_lease(self, ids: list[int], reason: str) -> None:
        self.ledger.release(ids, reason)

    def bury(self, name: str, why: str) -> None:
        self.buried.append((self.clock.now, name))

    def _lease(self) -> None:
        for lease in self.ledger.lease(WORKER, 8, request=str(self.clock.now)):
            self.sampled[lease.group_id] += 1

    def run(self, until: int) -> None:
        """As the driver does: looks at all, renews leases, every ten seconds."""
        for now in range(0, until, 10):
            self.clock.now = now
            still_s = {name: now - moved(now) for name, moved in self._engines.items()}
            under_way = self.ledger.status().leased
            groups = tuple(GroupUnderWay(i, "sampling", now) for i in under_way)
            asked = dict.fromkeys(self._engines, len(groups))
            worker = {WORKER: WorkerStatus(groups=groups, requests=asked, max_groups=8)}
            quiet = quiet_s(self.ledger.status(), worker, still_s)
            self.ledger.renew(i for i, seconds in quiet.items() if seconds < 450)
            self.ledger.expire(now)
            self._dog.check(self.ledger.status(), worker, still_s)
            self._lease()


WORKER = "rollout worker 0"


def test_an_engine_that_stands_still_is_found_among_those_that_work() -> None:
    """It answers its heartbeats; its counter does not move from 100 s on."""
    run = SlowRun(2, {"policy engine 0": lambda now: min(now, 100)})
    run.run(until=1000)
    assert run.buried[0] == (700, "policy engine 0"), "twice 300 s after its last sign of work"
    assert "waits for" in run.said[0] and max(run.sampled.values()) > 1

    both = SlowRun(2, {"policy engine 0": lambda now: min(now, 100), "policy engine 1": float})
    worker = WorkerStatus(
        groups=(GroupUnderWay(0, "sampling", 800),),
        requests={"policy engine 0": 1, "policy engine 1": 1}, max_groups=8,
    )  # fmt: skip
    still_s = {"policy engine 0": 700.0, "policy engine 1": 0.0}
    assert suspects(both.ledger.status(), {WORKER: worker}, still_s, 300) == {"policy engine 0"}
