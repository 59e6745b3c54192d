"""Cost of the driver with a thousand actors: heartbeats, statuses, announcements.

    python -m benchmarks.driver [actors=10,100,1000] [seconds=20]

Supervisor, `Workers`, stall detection and the calls on Ray are real. The actors are simulated by
eight processes. Half of the members are engines and half are workers; each worker has four groups
of four samples at four engines.

    cpu       cores that the driver's process uses while it waits for a step
    announce  CPU seconds until every worker has been sent the list of serving engines
    known     seconds until every worker has received it
    change    CPU seconds until every worker has been sent the restart of one engine
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import chz
import ray
from rich.console import Console
from rich.table import Table

from cluster.command import run_command
from cluster.hosts.rollout_actor import GroupProgress, RosterChange, WorkerStatus
from cluster.placement.connect import connect
from cluster.placement.roles import POLICY, ROLLOUT
from cluster.queue.ledger_types import QueueStatus
from cluster.runtime.driver import Driver, Signals
from cluster.runtime.watchdog import quiet_s
from cluster.runtime.workers import Workers
from cluster.supervision.supervise import ActorSpec, Member, State, Supervisor
from distill.errors import ConfigError

PROCESSES = 8
GROUPS = 4
_SETTLING_S = 5.0


@chz.chz
class DriverConfig:
    """The driver's share of a core by the number of actors."""

    actors: str = chz.field(default="10,100,1000", doc="numbers of actors, with commas")
    seconds: float = chz.field(default=20.0, doc="measured seconds for each")


class StandIn:
    """Actor that answers as engines and workers do."""

    def __init__(self) -> None:
        self._progress = 0

    async def health(self) -> int:
        self._progress += 1
        return self._progress

    async def status(self) -> WorkerStatus:
        groups = tuple(GroupProgress(i, "sampling", 60.0) for i in range(GROUPS))
        requests = {f"{POLICY} {i}": 4 for i in range(GROUPS)}
        return WorkerStatus(groups=groups, requests=requests)

    async def queue_status(self, workers: int) -> QueueStatus:
        leased = {i: (f"{ROLLOUT} {i // GROUPS}", 0, 60.0) for i in range(workers * GROUPS)}
        return QueueStatus(
            depth=0, leased=leased, pending=[], missing=list(leased)[:8], credit=0, set_aside=0,
            delivered=0, consecutive_set_aside=0, last_reason="", exhausted=False, epoch=1,
            starved_s=0.0, age_s=60.0,
        )  # fmt: skip

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def update(self, change: RosterChange, max_groups: int, epoch: int) -> None:
        change.applied({})


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCost:
    """Columns of the table, see the module."""

    actors: int
    cpu: float
    announce: float
    known: float
    change: float


class Watched:
    """Simulated members over a few real actors, their supervisor, and the pollers."""

    def __init__(self, handles: list[Any], number: int) -> None:
        self.supervisor = Supervisor(
            print_line=print,
            record=lambda _event, **_fields: None,
            on_death=lambda member, why: print(member.name, why),
            hang_after_s=300,
            max_restarts=0,
        )
        self.supervisor.run_started = True
        for index in range(number):
            role = POLICY if index % 2 else ROLLOUT
            spec = ActorSpec(
                name=role,
                title=lambda index, role=role: f"{role} {index}",
                create=None,
                heartbeat=lambda actor: actor.health.remote(),
                start_deadline_s=300,
            )
            self.supervisor.adopt(spec, index, handles[index % len(handles)])
        self.driver = Driver(supervisor=self.supervisor, signals=Signals(), deadline_s=300)
        self._workers = Workers(self.supervisor, self.driver, drained=print)
        self.driver.background.start(self._follow_queue(handles[0], number // 2))

    async def _follow_queue(self, queue: Any, workers: int) -> None:
        """Poll the queue as the fleet does."""
        while True:
            status = await queue.queue_status.remote(workers)
            quiet_s(status, self._workers.statuses, self.supervisor.since_progress_s())
            await asyncio.sleep(1)

    def wait(self, seconds: float) -> float:
        """Cores used while waiting as for a learner's step."""
        began = time.process_time()
        self.driver.pause(seconds)
        return (time.process_time() - began) / seconds

    def announce(self, **restarted: Any) -> tuple[float, float]:
        """CPU seconds of the driver, and seconds until all workers have the announcement.

        Args:
            restarted: handles of engines that differ from those announced before, by name.
        """
        workers = self.members(ROLLOUT)
        cpu, began = time.process_time(), time.monotonic()
        roster = {POLICY: self.supervisor.serving(POLICY) | restarted}
        self._workers.announce(roster, GROUPS, 0, {})
        sent = time.process_time() - cpu
        # Calls of one actor begin in their order.
        ray.get([member.handle.health.remote() for member in workers], timeout=300)
        return sent, time.monotonic() - began

    def members(self, role: str) -> list[Member]:
        return self.supervisor.members(role, State.SERVING)


@contextmanager
def stand_ins() -> Iterator[list[Any]]:
    """Eight actors on a Ray instance of their own."""
    with connect("bench", PROCESSES):
        remote: Any = ray.remote
        actors = [remote(StandIn).options(num_cpus=0).remote() for _ in range(PROCESSES)]
        ray.get([actor.health.remote() for actor in actors], timeout=300)
        yield actors


def measure_driver(numbers: list[int], seconds: float) -> list[dict[str, float]]:
    found = []
    with stand_ins() as actors:
        for number in numbers:
            watched = Watched(actors, number)
            watched.wait(_SETTLING_S)  # all are asked, and admitted
            announce, known = watched.announce()
            cpu = watched.wait(seconds)
            change, _ = watched.announce(**{f"{POLICY} 1": actors[0]})
            cost = DriverCost(actors=number, cpu=cpu, announce=announce, known=known, change=change)
            found.append(asdict(cost))
    return found


def driver_table(found: list[dict[str, float]]) -> Table:
    table = Table(title="the driver")
    for column in ("actors", "cpu", "announce s", "known s", "change s"):
        table.add_column(column, justify="right")
    for cost in found:
        table.add_row(
            f"{cost['actors']:.0f}", f"{cost['cpu']:.3f}", f"{cost['announce']:.3f}",
            f"{cost['known']:.3f}", f"{cost['change']:.3f}",
        )  # fmt: skip
    return table


def print_table(config: DriverConfig, console: Console) -> None:
    try:
        numbers = [int(number) for number in config.actors.split(",")]
    except ValueError:
        raise ConfigError(f"actors={config.actors} must be numbers with commas") from None
    console.print(driver_table(measure_driver(numbers, config.seconds)))


if __name__ == "__main__":
    raise SystemExit(run_command(DriverConfig, print_table, None))
