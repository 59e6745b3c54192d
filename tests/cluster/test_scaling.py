"""Scaling of pools: windows from statuses, and members from decisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.rollout.worker import Stage
from cluster.hosts.rollout_actor import GroupProgress, WorkerStatus
from cluster.queue.group_queue import WorkerEnd
from cluster.queue.journal import read_journal
from cluster.queue.ledger_types import QueueStatus
from cluster.runtime.scaling import Scaling
from cluster.supervision.supervise import ActorSpec, Member, State
from distill.records import TrainedGroups
from tests.queues import NewQueue
from tests.samples import group, packed


@dataclass
class Crew:
    """A fleet whose members come and go at once, unless they are `slow` to start."""

    bounds: Mapping[str, tuple[int, int]]
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    slow: bool = False
    _members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        for role, (smallest, _) in self.bounds.items():
            for _ in range(smallest):
                self._add(role, State.SERVING)

    @property
    def supervisor(self) -> Crew:
        return self

    def members(self, role: str, *states: State) -> list[Member]:
        return [
            member
            for member in self._members
            if member.spec.name == role and (not states or member.state in states)
        ]

    def serving(self, role: str) -> dict[str, Any]:
        return {member.name: None for member in self.members(role, State.SERVING)}

    def expected(self, role: str) -> int:
        return len(self.members(role, State.STARTING, State.READY, State.SERVING))

    def grow(self, role: str) -> None:
        self._add(role, State.STARTING if self.slow else State.SERVING)

    def shrink(self, role: str) -> None:
        self.members(role, State.SERVING)[-1].state = State.DRAINING

    def _add(self, role: str, state: State) -> None:
        kind = ActorSpec(
            name=role, title=lambda index: f"{role} engine {index}", create=None,
            heartbeat=lambda _: None, start_deadline_s=1,
        )  # fmt: skip
        index = len(self.members(role))
        self._members.append(Member(spec=kind, index=index, handle=None, attempt=0, state=state))


def queue(depth: int, starved_s: float, age_s: float) -> QueueStatus:
    return QueueStatus(
        depth=depth, leased={}, pending=[], missing=[], credit=0, set_aside=0, delivered=0,
        consecutive_set_aside=0, last_reason="", exhausted=False, epoch=0, starved_s=starved_s,
        age_s=age_s,
    )  # fmt: skip


def worker(*stages: Stage, **requests: int) -> WorkerStatus:
    return WorkerStatus(
        groups=tuple(GroupProgress(i, stage, 0.0) for i, stage in enumerate(stages)),
        requests={name.replace("_", " "): count for name, count in requests.items()},
    )


class Run:
    """Steps of a learner over a `Scaling`, on a simulated clock."""

    def __init__(self, tmp_path: Path, steps_in_flight: int = 1, **bounds: tuple[int, int]) -> None:
        self.now = 1000.0
        self.starved_s = 0.0
        self.out = tmp_path / "out"
        self.out.mkdir()
        self.lines: list[str] = []
        self.crew = Crew(
            {"policy": (1, 1), "rollout": (1, 1)}
            | {name.replace("_", " "): limits for name, limits in bounds.items()}
        )
        self.scaling = Scaling(
            self.crew,  # pyright: ignore[reportArgumentType] - what it needs of a fleet
            self,  # pyright: ignore[reportArgumentType] - what it needs of a directory
            self.lines.append,
            up_after_s=20,
            down_after_s=40,
            steps_in_flight=steps_in_flight,
            clock=lambda: self.now,
        )
        self.events: list[dict[str, Any]] = []

    def append_event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **json.loads(json.dumps(fields))})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def until(self, done: Callable[[], object], *step: Any) -> None:
        """Repeat a step until it has had its effect."""
        for _ in range(500):
            if done():
                return
            self.step(*step)
        raise AssertionError(f"no effect: {self.events[-5:]}")

    def step(self, waits_s: float, learns_s: float, depth: int = 0, starved: float = 0) -> None:
        """Wait and learn, with one status of the queue in each.

        `starved` is the share of the time in which workers lack credit.
        """
        self.look(waits_s, depth, starved)
        self.scaling.waited(waits_s)
        self.look(learns_s, depth, starved)

    def look(self, seconds: float, depth: int = 0, starved: float = 0) -> None:
        self.now += seconds
        self.starved_s += starved * seconds
        self.scaling.update(queue(depth, self.starved_s, self.now - 1000))


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, bool]]]:
    """The nodes of the cluster as Ray lists them."""
    alive = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    yield alive


def test_a_window_is_made_of_whole_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(100, 3)  # no window before the first groups: the pipeline fills
    for _ in range(6):
        run.step(1, 3)
    # A window has two steps of 3 + 1 s, the first multiple of a step above 5 s.
    assert [window["learner_wait"] for window in run.of("window")] == [0.25, 0.25, 0.25]
    run.step(57, 3)
    assert run.of("window")[-1]["learner_wait"] == pytest.approx(57 / 60)


def test_groups_are_means_over_the_window(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1, 5)
    run.crew.statuses["rollout worker 0"] = worker("environment", "environment", "sampling")
    run.look(1)
    run.crew.statuses["rollout worker 0"] = worker("scoring", "delivery")
    run.look(1)
    run.look(1)
    run.crew.statuses["rollout worker 1"] = worker("environment")
    run.step(1, 1, depth=2)
    [window] = run.of("window")
    # Seven samples: the one of the first wait is not counted.
    assert window["sampling"] == pytest.approx(1 / 7)
    assert window["environment"] == pytest.approx(4 / 7)
    assert window["scoring"] == pytest.approx(4 / 7)
    assert window["queue_depth"] == 2


def test_starvation_is_a_share_of_the_window(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(50, 5, starved=1)  # no window contains the first wait
    for starved in (0.25, 0.75):
        for _ in range(4):
            run.step(1, 4, starved=starved)
    shares = [window["credit_starved"] for window in run.of("window")]
    assert shares[1:4] == pytest.approx([0.25] * 3) and shares[5:] == pytest.approx([0.75] * 3)
    run.starved_s = 0.0  # the queue died
    run.step(1, 4)
    assert run.of("window")[-1]["credit_starved"] == 0.0


def test_a_pool_grows_where_the_groups_are_and_its_sizes_are_recorded(
    tmp_path: Path, nodes: list[dict[str, bool]]
) -> None:
    run = Run(tmp_path, rollout=(1, 3))
    run.crew.slow = True
    run.crew.statuses["rollout worker 0"] = worker("environment", "environment")
    run.until(lambda: run.of("scale"), 9, 1)
    [grown] = run.of("scale")
    assert (grown["pool"], grown["from"], grown["to"]) == ("rollout", 1, 2)
    assert grown["reason"] in run.lines[0]
    assert [window["learner_wait"] for window in run.of("window")] == [0.9, 0.9]  # 20 s
    nodes.append({"Alive": True})
    run.step(9, 1)
    assert [(e["pool"], e["ready"], e["starting"]) for e in run.of("size")] == [
        ("policy", 1, 0), ("rollout", 1, 0), ("rollout", 1, 1),
    ]  # fmt: skip
    assert [event["alive"] for event in run.of("nodes")] == [1, 2]


def test_a_growth_is_judged_by_groups_of_the_new_member(tmp_path: Path) -> None:
    """With two steps in flight, the new worker's first groups are trained in the third step."""
    run = Run(tmp_path, steps_in_flight=2, rollout=(1, 3))
    run.crew.statuses["rollout worker 0"] = worker("environment", "environment")
    run.until(lambda: run.of("scale"), 9, 1)
    for _ in range(2):
        run.step(9, 1)  # groups of the first worker alone
    for _ in range(4):
        run.step(4, 1)
        run.step(4, 1)
    assert [(e["from"], e["to"]) for e in run.of("scale")] == [(1, 2), (2, 3)]


def test_a_pool_shrinks_while_credit_is_lacking(tmp_path: Path) -> None:
    run = Run(tmp_path, rollout=(1, 3))
    for _ in range(2):
        run.crew.grow("rollout")
    run.until(lambda: len(run.of("scale")) == 2, 0.01, 5, 8, 0.9)
    assert [(e["from"], e["to"]) for e in run.of("scale")] == [(3, 2), (2, 1)]
    for _ in range(100):
        run.step(0.01, 5, 8, 0.9)
    assert run.of("size")[-1]["draining"] == 2
    assert len(run.of("scale")) == 2  # the smallest size


def test_the_busiest_teacher_grows_and_the_idlest_shrinks(tmp_path: Path) -> None:
    run = Run(tmp_path, teacher_maths=(1, 2), teacher_code=(1, 2))
    run.crew.statuses["rollout worker 0"] = worker(
        "scoring", "scoring", teacher_maths_engine_0=1, teacher_code_engine_0=5
    )
    run.until(lambda: run.of("scale"), 3, 7)
    assert run.of("scale")[0]["pool"] == "teacher"
    assert (run.crew.expected("teacher maths"), run.crew.expected("teacher code")) == (1, 2)
    run.until(lambda: run.crew.members("teacher code", State.DRAINING), 0.01, 5, 8, 0.9)
    assert run.crew.expected("teacher maths") == 1  # its smallest size


def test_a_run_of_fixed_pools_records_windows_and_never_scales(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.crew.statuses["rollout worker 0"] = worker("environment")
    for _ in range(50):
        run.step(9, 1)
    assert len(run.of("window")) == 49 and not run.of("scale")


def test_groups_leased_to_a_cancelled_call_are_leased_again_at_once(
    new_queue: NewQueue, tmp_path: Path
) -> None:
    queue = new_queue(on_ray=True, max_staleness=0, total_groups=4)

    async def leave() -> list[int]:
        stays, leaves = WorkerEnd(queue, "stays"), WorkerEnd(queue, "leaves")
        leases = await stays.lease(2)
        waiting = asyncio.create_task(leaves.lease(2))
        await asyncio.sleep(0.5)  # its call is in the queue, without credit
        waiting.cancel()
        await asyncio.gather(*(stays.put(one, *packed(group(one.group_id))) for one in leases))
        # Leases 2 and 3 to the one that left.
        await queue.actor.publish.remote(1, TrainedGroups(2), None)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return [lease.group_id for lease in await stays.lease(2)]

    assert asyncio.run(leave()) == [2, 3]
    assert any(event["event"] == "expire" for event in read_journal(tmp_path / "ledger.jsonl"))
