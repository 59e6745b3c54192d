"""Groups per second through the queue on real Ray: lease -> put -> take -> publish.

Workers are simulated: each is an asyncio task with its own `WorkerEnd`, which puts the same
prepared group on every lease. All else is as in a run, including the journal on disk. All workers
share one producer process, so rows of the table differ in the number of workers only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from cluster.inspect.audit import audit
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.ledger_types import LedgerSettings
from distill.columns import checked
from distill.objective.sums import meta_of
from distill.records import Lease, TrainedGroups
from distill.types import TrajectoryGroup
from tests.queues import queue_on_ray
from tests.samples import segment, trajectory

MEMBERS, PROMPT, RESPONSE = 8, 128, 384
WORKERS = (1, 4, 16, 64)
# As in a run of 64 prompts a step with one step ahead.
PER_STEP, MAX_STALENESS = 64, 1
STEPS, WARMUP_STEPS = 30, 4
DEADLINE_S = 300.0


def made_group(group_id: int = 0) -> TrajectoryGroup:
    """8 trajectories of 512 tokens, with a teacher's log-probs at T and at 1."""
    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(
            trajectory(segment(PROMPT, RESPONSE, seed=g), reward=float(g % 2))
            for g in range(MEMBERS)
        ),
    )


class Producer:
    """Simulated rollout workers, which share the slots as those of a run do."""

    def __init__(self, queue: GroupQueue, workers: int) -> None:
        self._ends = [WorkerEnd(queue, f"worker {i}") for i in range(workers)]
        window = PER_STEP * (MAX_STALENESS + 1)
        self._each = -(-window // workers)
        self._group = made_group()

    async def run(self) -> int:
        """Run the producer; returns the number of groups."""
        return sum(await asyncio.gather(*map(self._work, self._ends)))

    async def _work(self, end: WorkerEnd) -> int:
        made = 0
        while leases := await end.lease(self._each):
            await asyncio.gather(*(self._put(end, lease) for lease in leases))
            made += len(leases)
        return made

    async def _put(self, end: WorkerEnd, lease: Lease) -> None:
        columns = checked(self._group)
        meta = meta_of(replace(self._group, group_id=lease.group_id), columns)
        await end.put(lease, meta, columns)

    def cpu_seconds(self) -> float:
        return cpu_seconds()


def cpu_seconds(_: object = None) -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_queue(scratch: Path) -> dict[str, Any]:
    """`workers`: `measure_workers` by their number; `payload_bytes` of one group; and `pack_us`,
    `unpack_us`, `pickle_us`, `unpickle_us` of it.
    """
    group = made_group()
    columns, pickled = checked(group), pickle.dumps(group, protocol=5)
    directory = Path(tempfile.mkdtemp(prefix="queue-", dir=scratch))
    with _ray():
        workers = {
            str(n): measure_workers(n, str(directory / f"ledger-{n}.jsonl")) for n in WORKERS
        }
    return {
        "payload_bytes": columns.nbytes,
        "pack_us": 1e6 * _median_seconds(lambda: meta_of(group, checked(group))),
        "unpack_us": 1e6 * _median_seconds(columns.trajectories),
        "pickle_us": 1e6 * _median_seconds(lambda: pickle.dumps(group, protocol=5)),
        "unpickle_us": 1e6 * _median_seconds(lambda: pickle.loads(pickled)),
        "workers": workers,
    }


def measure_workers(workers: int, journal: str) -> dict[str, float]:
    """`groups_per_s`, and CPU microseconds per group in each process.

    The latter are `worker_us`, `queue_us` and `learner_us`, without Ray's own processes. Asserts
    that no group was lost.
    """
    settings = LedgerSettings(
        groups_per_step=PER_STEP,
        max_staleness=MAX_STALENESS,
        total_groups=(WARMUP_STEPS + STEPS) * PER_STEP,
        lease_s=DEADLINE_S,
    )
    queue = queue_on_ray(settings, journal, timeout_s=DEADLINE_S)
    producer: Any = ray.remote(Producer).options(num_cpus=0).remote(queue, workers)
    running = producer.run.remote()
    trained = TrainedGroups()

    def used() -> list[float]:
        return [
            ray.get(producer.cpu_seconds.remote()),
            ray.get(queue.actor.__ray_call__.remote(cpu_seconds)),
            cpu_seconds(),
        ]

    before, started = used(), time.perf_counter()
    for step in range(1, WARMUP_STEPS + STEPS + 1):
        if step == WARMUP_STEPS + 1:
            before, started = used(), time.perf_counter()
        taken = queue.take(trained)
        trained = taken.after(trained)
        queue.publish(step, trained)
    seconds = time.perf_counter() - started
    spent = [1e6 * (b - a) for a, b in zip(before, used(), strict=True)]
    ray.get(queue.actor.close.remote())
    assert ray.get(running, timeout=DEADLINE_S) == (WARMUP_STEPS + STEPS) * PER_STEP
    for actor in (producer, queue.actor):
        ray.kill(actor)
    assert not audit(journal, steps=WARMUP_STEPS + STEPS).problems
    groups = STEPS * PER_STEP
    names = ("worker_us", "queue_us", "learner_us")
    return {"groups_per_s": groups / seconds} | {
        name: microseconds / groups for name, microseconds in zip(names, spent, strict=True)
    }


def _median_seconds(run: Any) -> float:
    seconds = []
    for _ in range(200):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


@contextmanager
def _ray() -> Iterator[None]:
    already = ray.is_initialized()
    if not already:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


def queue_table(report: dict[str, Any]) -> Table:
    """Console table of `measure_queue`."""
    table = Table(
        title=f"the queue: groups of {MEMBERS} x {PROMPT + RESPONSE} tokens, "
        f"{report['payload_bytes'] / 1e3:.0f} kB, {PER_STEP} a step",
        caption=f"packing {report['pack_us']:.0f} us (a pickle {report['pickle_us']:.0f}), "
        f"unpacking {report['unpack_us']:.0f} us ({report['unpickle_us']:.0f}) a group; all "
        f"processes share {os.cpu_count()} cores",
    )
    table.add_column("workers", justify="right")
    for header in ("groups/s", "us a group", "us of worker's CPU", "of queue's", "of learner's"):
        table.add_column(header, justify="right")
    for workers, row in report["workers"].items():
        table.add_row(
            workers,
            f"{row['groups_per_s']:.0f}",
            f"{1e6 / row['groups_per_s']:.0f}",
            *(f"{row[name]:.0f}" for name in ("worker_us", "queue_us", "learner_us")),
        )
    return table


if __name__ == "__main__":
    found = measure_queue(Path(sys.argv[1]))
    print(json.dumps(found))
    Console(width=120).print(queue_table(found))
