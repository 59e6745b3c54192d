"""What crosses which process between rollout workers and learner: bytes, and seconds of each.

A worker (an actor) puts groups of long answers, with K of the teacher's likeliest tokens at each of
their tokens or without; the leader (this process) takes their outlines and deals their rows to
itself and to other learner workers (actors), and a step is done once all of them have fetched their
trajectories and read the rows that they made of them. Queue, journal, codec, process group, dealing
and the making of rows are those of a run; models are left out.

    python -m tests.bench.data_path DIR [groups] [tokens]
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
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
from distill.delivery import TrainedGroups
from distill.objective.batching import deal, split_by_token_budget
from distill.objective.settings import ObjectiveConfig
from distill.outlines import RowPlace, TrajectorySource
from distill.types import Segment, TopLogprobs, TrajectoryGroup
from learner.learner import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import LOOPBACK, Membership, Order, WorkerGroup, open_store
from learner.rollout_share import Built, RolloutShare, Shares, TrajectoryShare
from learner.rollouts import Rollouts
from tests.bench.queue import _ray, cpu_seconds
from tests.queues import queue_on_ray
from tests.samples import segment, trajectory

# An eighth of the groups and a quarter of the length of a step of 64 x 16 x 8k tokens, which takes
# 4 GB at K = 64.
GROUPS, MEMBERS, PROMPT, TOKENS = 8, 16, 128, 2048
TOP_K = (0, 64)
LEARNER_WORKERS = (2, 4)
TOKEN_BUDGET = 16_384
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


def objective(k: int) -> ObjectiveConfig:
    how = {"estimator": "top_k", "teacher_top_k": k} if k else {"estimator": "sampled"}
    return ObjectiveConfig(kl_coef=1.0, reward_coef=0.0, **how)


def message_bytes(value: Any) -> int:
    """Size of a value as Ray sends it; references count by themselves, not by what they name."""
    from ray._private.worker import global_worker  # cannot be pickled with a function of __main__

    return global_worker.get_serialization_context().serialize(value).total_bytes


class Worker:
    """A rollout worker whose groups are made before the clock starts."""

    def __init__(self, queue: GroupQueue, groups: int, tokens: int, k: int) -> None:
        self._end = WorkerEnd(queue, "worker 0")
        self._groups = [made_group(i, tokens, k) for i in range(groups)]

    def payload(self) -> int:
        """Bytes of all groups."""
        return sum(pack(group).nbytes for group in self._groups)

    async def run(self) -> dict[str, float]:
        """Puts them all, one after the other."""
        leases = await self._end.lease(len(self._groups))
        started, cpu = time.perf_counter(), cpu_seconds()
        for lease in leases:
            await self._end.put(lease, self._groups[lease.group_id])
        return {"s": time.perf_counter() - started, "cpu": cpu_seconds() - cpu}


class LearnerWorker:
    """A learner's worker without a model: it fetches, makes its rows, and reads them."""

    def __init__(self, source: TrajectorySource, k: int, group: WorkerGroup) -> None:
        self._share = RolloutShare(source, objective(k), (), group)

    def hold_rollouts(self, step: Shares) -> Any:
        return self._share.hold(step)

    def build_rows(self, _: None) -> Built:
        return self._share.build()

    def step(self, places: Sequence[RowPlace]) -> int:
        """Bytes of its rows' arrays, each of which has been read."""
        total = 0
        for row in map(self._share.row, places):
            arrays = [row.tokens_T, row.loss_mask_T, row.advantages_T, row.behaviour_logprobs_T]
            if row.teacher_top is not None:
                arrays += [row.teacher_top.ids_NK, row.teacher_top.logprobs_NK]
            for array in arrays:
                array.sum()
                total += array.nbytes
        return total


class Follower:
    """The actor of one that does not lead."""

    def __init__(self, membership: Membership, queue: GroupQueue, k: int) -> None:
        self._group = WorkerGroup(membership, "cpu")
        self._worker = LearnerWorker(queue, k, self._group)

    def serve(self) -> None:
        """Carries out the three orders of a step."""
        for _ in range(3):
            order = self._group.receive()
            self._group.answer(getattr(self._worker, order.method)(order.argument))


class Leader:
    """What `Rollouts` asks of a learner, in the process that leads; counts what it sends and gets.

    Attributes:
        bytes: of orders to others, and of their answers.
    """

    def __init__(self, source: TrajectorySource, k: int, group: WorkerGroup) -> None:
        self._group, self.workers, self.bytes = group, group.size, 0
        self._worker = LearnerWorker(source, k, group)

    def take_rollouts_from(self, source: TrajectorySource, loss: PolicyObjectiveLoss) -> None:
        """It has been told."""

    def dealt(self, part: Part) -> Part:
        batches = list(split_by_token_budget(part.rows_D, TOKEN_BUDGET))
        return replace(part, dealt=deal(batches, self.workers))

    def on_all(self, method: str, argument: Any = None) -> list[Any]:
        return self.on_each(method, [argument] * self.workers)

    def on_each(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        orders = [Order(method, argument) for argument in arguments]
        self._group.send(orders)
        answers = self._group.collect(getattr(self._worker, method)(arguments[0]))
        self.bytes += sum(len(pickle.dumps(value)) for value in (*orders[1:], *answers[1:]))
        return answers


def measure_data_path(
    scratch: Path, groups: int = GROUPS, tokens: int = TOKENS
) -> list[dict[str, float]]:
    """For each `k` and number of `learner_workers`: megabytes of `payload`, of what the queue holds
    (`queue_mb`), of what passes through the leader besides its own share (`leader_mb`) and of what
    a node of its own would fetch besides (`pulled_mb`: parts hold more than one answer); seconds
    of `take` and `step` (until every worker has read its rows); and CPU seconds of worker, queue
    and leader."""
    directory = Path(tempfile.mkdtemp(prefix="data-", dir=scratch))
    with _ray():
        return [
            _measure(directory, groups, tokens, k, workers)
            for k in TOP_K
            for workers in LEARNER_WORKERS
        ]


def _measure(directory: Path, groups: int, tokens: int, k: int, workers: int) -> dict[str, float]:
    settings = LedgerSettings(
        groups_per_step=groups, max_staleness=0, total_groups=groups, lease_s=DEADLINE_S
    )
    journal = str(directory / f"ledger-{k}-{workers}.jsonl")
    queue = queue_on_ray(settings, journal, timeout_s=DEADLINE_S)
    remote: Any = ray.remote(num_cpus=0)
    worker = remote(Worker).remote(queue, groups, tokens, k)
    payload = ray.get(worker.payload.remote())
    store = open_store(LOOPBACK, DEADLINE_S)
    member = {"address": LOOPBACK, "port": store.port, "size": workers, "timeout_s": DEADLINE_S}
    followers = [
        remote(Follower).remote(Membership(rank=rank, **member), queue, k)
        for rank in range(1, workers)
    ]
    group = WorkerGroup(Membership(rank=0, **member), "cpu")
    leader: Any = Leader(queue, k, group)
    serving = [follower.serve.remote() for follower in followers]
    before = ray.get(queue.actor.__ray_call__.remote(cpu_seconds))
    made = ray.get(worker.run.remote())
    held = ray.get(queue.actor.__ray_call__.remote(lambda plain: message_bytes(plain._parcels)))

    cpu, started = cpu_seconds(), time.perf_counter()
    taken = queue.take(TrainedGroups())
    took = time.perf_counter()
    rollouts = Rollouts(leader, queue, PolicyObjectiveLoss(objective=objective(k)))
    plan = rollouts.plan(taken.groups_P)
    assert not rollouts.hold(plan)
    rollouts.build(plan)
    [[part]] = plan.updates
    assert part.dealt is not None
    places = [[row.place for rows_B, _ in mine for row in rows_B] for mine in part.dealt]
    trained = leader.on_each("step", places)
    ended, spent = time.perf_counter(), cpu_seconds() - cpu
    ray.get(serving)
    queue_cpu = ray.get(queue.actor.__ray_call__.remote(cpu_seconds)) - before
    through = message_bytes(taken) + leader.bytes + _idle_bytes(queue, plan.shares[0])
    own = sum(_nbytes(queue, [share]) for share in plan.shares[0])
    pulled = _part_bytes(queue, plan.shares[0]) - own
    for actor in (worker, *followers, queue.actor):
        ray.kill(actor)
    dist.destroy_process_group()
    return {
        "k": k,
        "learner_workers": workers,
        "payload_mb": payload / 1e6,
        "trained_mb": sum(trained) / 1e6,
        "queue_mb": held / 1e6,
        "leader_mb": through / 1e6,
        "pulled_mb": pulled / 1e6,
        "put_s": made["s"],
        "take_s": took - started,
        "step_s": ended - started,
        "worker_cpu_s": made["cpu"],
        "queue_cpu_s": queue_cpu,
        "leader_cpu_s": spent,
    }


def _idle_bytes(queue: GroupQueue, shares: Sequence[TrajectoryShare]) -> int:
    """Of trajectories that are run to keep step with other workers, and trained by one of them."""
    return _nbytes(queue, [share for share in shares if not share.trained])


def _nbytes(queue: GroupQueue, shares: Sequence[TrajectoryShare]) -> int:
    found, _ = queue.trajectories([share.place for share in shares])
    return sum(_size(segment) for each in found.values() for segment in each.segments)


def _size(segment: Segment) -> int:
    values = [getattr(segment, field.name) for field in fields(Segment)]
    top = segment.teacher_top
    values += [] if top is None else [top.ids_NK, top.logprobs_NK]
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _part_bytes(queue: GroupQueue, shares: Sequence[TrajectoryShare]) -> int:
    """Of the parts that have these trajectories."""
    answer = ray.get(queue.actor.parts.remote([share.place for share in shares]))
    parts = [ray.get(part) for part in answer.parts.values()]
    values = [value for part in parts for _, value in part.segments.values()]
    tops = [top for part in parts for top in part.segments["teacher_top"][1] if top is not None]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    return sum(a.nbytes for a in arrays) + sum(t.ids_NK.nbytes + t.logprobs_NK.nbytes for t in tops)


def data_path_table(report: Sequence[dict[str, float]]) -> Table:
    """`measure_data_path` for people."""
    table = Table(
        title=f"from worker to learner: {GROUPS} groups of {MEMBERS} x {TOKENS} tokens",
        caption="the leader's bytes are those beside its own share; CPU seconds of each process, "
        "wall seconds from take until every learner worker has read its rows",
    )
    headers = ("K", "learner workers", "payload MB", "queue", "leader", "leader's node", "worker s")
    for header in (*headers, "queue s", "leader s", "wall s"):
        table.add_column(header, justify="right")
    for row in report:
        shares = [row[name] / row["payload_mb"] for name in ("queue_mb", "leader_mb", "pulled_mb")]
        names = ("worker_cpu_s", "queue_cpu_s", "leader_cpu_s", "step_s")
        table.add_row(
            f"{row['k']:.0f}",
            f"{row['learner_workers']:.0f}",
            f"{row['payload_mb']:.1f}",
            *(f"{share:.2%}" for share in shares),
            *(f"{row[name]:.3f}" for name in names),
        )
    return table


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[2:]]
    found = measure_data_path(Path(sys.argv[1]), *given)
    print(json.dumps(found))
    Console(width=140).print(data_path_table(found))
