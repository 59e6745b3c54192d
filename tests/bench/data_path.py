"""What crosses which process between rollout workers and learner: bytes, and seconds of each.

A worker (an actor) puts groups of long answers, with K of the teacher's likeliest tokens at each of
their tokens or without; the leader (this process) takes them and orders a step of itself and of a
second learner worker (another actor), which is done once both hold the rows that they train. Queue,
journal, codec, process group and dealing are those of a run; models are left out.

    python -m tests.bench.data_path DIR [groups] [tokens]
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from cluster.queue.codec import pack
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.ledger import LedgerSettings
from cluster.queue.parcels import fetch_from
from distill.delivery import TrainedGroups
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.types import TopLogprobs, TrajectoryGroup
from learner.process_group import LOOPBACK, Membership, Order, WorkerGroup, open_store
from tests.bench.queue import _ray, cpu_seconds
from tests.queues import queue_on_ray
from tests.samples import segment, trajectory

# An eighth of the groups and a quarter of the length of a step of 64 x 16 x 8k tokens, which takes
# 4 GB at K = 64.
GROUPS, MEMBERS, PROMPT, TOKENS = 8, 16, 128, 2048
TOP_K = (0, 64)
DEADLINE_S = 600.0


def made_group(group_id: int, tokens: int, k: int) -> TrajectoryGroup:
    """16 answers to one prompt, scored."""
    rng = np.random.default_rng(group_id)

    def top() -> TopLogprobs | None:
        if not k:
            return None
        ids_NK = rng.integers(0, 1000, (tokens, 1), np.int32) + np.arange(k, dtype=np.int32)
        return TopLogprobs(
            ids_NK=ids_NK,
            logprobs_NK=np.log(rng.dirichlet(np.ones(k), tokens)).astype(np.float32) - 0.01,
        )

    return TrajectoryGroup(
        group_id=group_id,
        trajectories_G=tuple(
            trajectory(
                segment(PROMPT, tokens, seed=100 * group_id + g, teacher_top=top()),
                reward=float(g % 2),
            )
            for g in range(MEMBERS)
        ),
    )


def message_bytes(value: Any) -> int:
    """Size of a value as Ray sends it; references count by themselves, not by what they name."""
    from ray._private.worker import global_worker  # cannot be pickled with a function of __main__

    return global_worker.get_serialization_context().serialize(value).total_bytes


class Worker:
    """A rollout worker whose groups are made before the clock starts."""

    def __init__(self, queue: GroupQueue, groups: int, tokens: int, k: int) -> None:
        self._end = WorkerEnd(queue, "worker 0")
        self._groups = [made_group(i, tokens, k) for i in range(groups)]

    def sizes(self) -> tuple[int, int]:
        """Bytes of all groups, and of those without the likeliest tokens."""
        packed = [pack(group) for group in self._groups]
        return sum(p.nbytes for p in packed), sum(p.columns.nbytes for p in packed)

    async def run(self) -> dict[str, float]:
        """Puts them all, one after the other."""
        leases = await self._end.lease(len(self._groups))
        started, cpu = time.perf_counter(), cpu_seconds()
        for lease in leases:
            await self._end.put(lease, self._groups[lease.group_id])
        return {"s": time.perf_counter() - started, "cpu": cpu_seconds() - cpu}


class Follower:
    """The second learner worker."""

    def __init__(self, membership: Membership, queue: GroupQueue) -> None:
        fetch_from(queue)
        self._group = WorkerGroup(membership, "cpu")

    def serve(self) -> None:
        """Receives the rows of a step, reads them, answers."""
        order = self._group.receive()
        self._group.answer(touched(order.argument))


def touched(rows: Any) -> int:
    """Bytes of the rows' arrays, each of which has been read."""
    total = 0
    for row in rows:
        arrays = [row.tokens_T, row.loss_mask_T, row.advantages_T, row.behaviour_logprobs_T]
        if row.teacher_top is not None:
            arrays += [row.teacher_top.ids_NK, row.teacher_top.logprobs_NK]
        for array in arrays:
            array.sum()
            total += array.nbytes
    return total


def measure_data_path(
    scratch: Path, groups: int = GROUPS, tokens: int = TOKENS
) -> dict[str, dict[str, float]]:
    """By K: megabytes of `payload`, of what the queue holds (`queue_mb`) and of what passes through
    the leader besides its own share (`leader_mb`); seconds of `take` and `order` (until every
    worker has read its rows); and CPU seconds of worker, queue and leader."""
    directory = Path(tempfile.mkdtemp(prefix="data-", dir=scratch))
    with _ray():
        return {str(k): _measure(directory, groups, tokens, k) for k in TOP_K}


def _measure(directory: Path, groups: int, tokens: int, k: int) -> dict[str, float]:
    settings = LedgerSettings(
        groups_per_step=groups, max_staleness=0, total_groups=groups, lease_s=DEADLINE_S
    )
    queue = queue_on_ray(settings, str(directory / f"ledger-{k}.jsonl"), timeout_s=DEADLINE_S)
    remote: Any = ray.remote(num_cpus=0)
    worker = remote(Worker).remote(queue, groups, tokens, k)
    payload, columns = ray.get(worker.sizes.remote())
    store = open_store(LOOPBACK, DEADLINE_S)
    member = {"address": LOOPBACK, "port": store.port, "size": 2, "timeout_s": DEADLINE_S}
    follower = remote(Follower).remote(Membership(rank=1, **member), queue)
    group = WorkerGroup(Membership(rank=0, **member), "cpu")
    serving = follower.serve.remote()
    before = ray.get(queue.actor.__ray_call__.remote(cpu_seconds))
    made = ray.get(worker.run.remote())
    queue_cpu = ray.get(queue.actor.__ray_call__.remote(cpu_seconds)) - before
    held = ray.get(queue.actor.__ray_call__.remote(lambda plain: message_bytes(plain._parcels)))
    before = ray.get(queue.actor.__ray_call__.remote(cpu_seconds))

    cpu, started = cpu_seconds(), time.perf_counter()
    taken = queue.take(TrainedGroups())
    took = time.perf_counter()
    how = {"estimator": "top_k", "teacher_top_k": k} if k else {"estimator": "sampled"}
    rows = policy_rows(taken.groups_P, ObjectiveConfig(kl_coef=1.0, reward_coef=0.0, **how))
    half = len(rows) // 2
    orders = [Order("step", rows[:half]), Order("step", rows[half:])]
    dealt = time.perf_counter()
    group.send(orders)
    sent_cpu = cpu_seconds()
    trained = group.collect(touched(rows[:half]))
    ended = time.perf_counter()
    ray.get(serving)
    queue_cpu += ray.get(queue.actor.__ray_call__.remote(cpu_seconds)) - before
    for actor in (worker, follower, queue.actor):
        ray.kill(actor)
    dist.destroy_process_group()
    return {
        "payload_mb": payload / 1e6,
        "trained_mb": sum(trained) / 1e6,
        "queue_mb": held / 1e6,
        "leader_mb": (held + columns + len(pickle.dumps(orders[1]))) / 1e6,
        "put_s": made["s"],
        "take_s": took - started,
        "order_s": ended - dealt,
        "worker_cpu_s": made["cpu"],
        "queue_cpu_s": queue_cpu,
        "leader_cpu_s": sent_cpu - cpu,
    }


def data_path_table(report: dict[str, dict[str, float]]) -> Table:
    """`measure_data_path` for people."""
    table = Table(
        title=f"from worker to learner: {GROUPS} groups of {MEMBERS} x {TOKENS} tokens, 2 learner "
        "workers",
        caption="the leader's bytes are those beside its own share of the likeliest tokens; CPU "
        "seconds of each process",
    )
    table.add_column("K", justify="right")
    for header in ("payload MB", "queue MB", "leader MB", "worker s", "queue s", "leader s"):
        table.add_column(header, justify="right")
    names = ("payload_mb", "queue_mb", "leader_mb", "worker_cpu_s", "queue_cpu_s", "leader_cpu_s")
    for k, row in report.items():
        table.add_row(k, *(f"{row[name]:.3f}" for name in names))
    return table


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[2:]]
    found = measure_data_path(Path(sys.argv[1]), *given)
    print(json.dumps(found))
    Console(width=120).print(data_path_table(found))
