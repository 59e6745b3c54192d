"""A stall: what is said, who is suspected, and what is done when."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.ledger import QueueStatus
from cluster.rollout_actor import GroupUnderWay, WorkerStatus
from cluster.supervise import RunFailed
from cluster.watchdog import Watchdog, suspects, who_waits


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
    assert who_waits(status(), workers("sampling"), 120).splitlines() == [
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
    assert suspects(status(), workers(stage), 100) == expected
    assert suspects(status(), workers(stage, seconds=5), 100) == set()


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
        self.dog = Watchdog(self.hospital, self.said.append, 100, 350, clock=self.clock)

    def look(self, times: range, **changes: Any) -> None:
        for self.clock.now in times:
            self.dog.look(status(**changes), workers("sampling"))


def test_it_tells_then_acts_then_gives_up() -> None:
    patient = Patient()
    patient.look(range(0, 100, 20))
    assert not patient.said and not patient.hospital.done
    patient.look(range(100, 200, 20))
    assert len(patient.said) == 1 and patient.hospital.done == [[3]]
    patient.look(range(200, 300, 20))
    assert len(patient.said) == 2 and patient.hospital.done == [[3], "policy engine 0", [3]]
    with pytest.raises(RunFailed, match=r"no prompt group arrived for 360 s; the learner waits"):
        patient.look(range(300, 400, 20))


def test_a_group_that_arrives_and_a_learner_at_work_start_the_clock_again() -> None:
    patient = Patient()
    for first in range(0, 300, 60):
        patient.look(range(first, first + 60, 20), delivered=first)
    patient.look(range(400, 700, 100))  # steps took a while
    assert not patient.said and not patient.hospital.done
