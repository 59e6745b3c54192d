"""Bytes and seconds of rollouts on their way from rollout workers to learner workers.

A rollout worker (an actor) puts groups of long answers, with or without K of the teacher's
likeliest tokens at each token. The leader (this process) takes their metadata and deals their rows
to itself and to other learner workers (actors). A step is done once all learner workers have
fetched their trajectories and read the rows that they built from them. Queue, journal, columns,
process group, dealing and row building are those of a run; there are no models.

An earlier design is measured alternately in the same processes: groups pickled whole, sent as bytes
through queue and leader, which builds all rows and scatters them.

    python -m benchmarks.data_path DIR [groups] [tokens]
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.queue import _ray, cpu_seconds
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.ledger_types import LedgerSettings
from distill.columns import GroupColumns, checked, pack
from distill.objective.batching import TrainingRow
from distill.objective.rows import policy_rows
from distill.objective.settings import ObjectiveConfig
from distill.objective.sums import meta_of
from distill.records import RowPlace, TrainedGroups, TrajectorySource
from distill.types import FloatArray, Segment, TopLogprobs, TrajectoryGroup
from learner.plan import Dealing, Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.process_group import LOOPBACK, Membership, WorkerGroup, open_store
from learner.rollout_share import RolloutShare, TrajectoryShare
from learner.rollouts import Rollouts
from tests.queues import queue_on_ray
from tests.samples import segment, trajectory

# An eighth of the groups and a quarter of the length of a step of 64 x 16 x 8k tokens, which takes
# 4 GB at K = 64.
GROUPS, MEMBERS, PROMPT, TOKENS = 8, 16, 128, 2048
TOP_K = (0, 64)
LEARNER_WORKERS = (1, 2, 4)
TOKEN_BUDGET = 16_384
# The first, in processes that have not run one, does not count.
STEPS = 4
DEADLINE_S = 600.0


def made_group(group_id: int, tokens: int, k: int) -> TrajectoryGroup:
    """16 scored answers to one prompt."""
    rng = np.random.default_rng(group_id)

    def top() -> TopLogprobs | None:
        if not k:
            return None
        ids_NK = rng.integers(0, 1000, (tokens, 1), np.int32) + np.arange(k, dtype=np.int32)
        weights_NK = rng.random((tokens, k), np.float32) + np.float32(1e-3)
        return TopLogprobs(
            ids_NK=ids_NK,
            logprobs_NK=np.log(weights_NK / (1.01 * weights_NK.sum(axis=1, keepdims=True))),
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
    how: dict[str, Any] = {"estimator": "sampled"}
    if k:
        how = {"estimator": "top_k", "teacher_top_k": k}
    return ObjectiveConfig(kl_coef=1.0, reward_coef=0.0, **how)


def message_bytes(value: Any) -> int:
    """Size of a value as Ray sends it. References count by themselves, without their objects."""
    from ray._private.worker import global_worker  # cannot be pickled with a function of __main__

    return global_worker.get_serialization_context().serialize(value).total_bytes


class Worker:
    """Rollout worker whose groups are built before the measurement starts."""

    def __init__(
        self, queue: GroupQueue, groups: int, tokens: int, k: int, learner_workers: int
    ) -> None:
        self._end = WorkerEnd(queue, "worker 0", whole=learner_workers == 1)
        self._groups = [made_group(i, tokens, k) for i in range(groups)]

    def payload(self) -> int:
        """Bytes of all groups."""
        return sum(pack(group.trajectories_G).nbytes for group in self._groups)

    async def put(self) -> None:
        """Put the groups of a step, one after the other."""
        leases = await self._end.lease(len(self._groups))
        for lease, group in zip(leases, self._groups, strict=True):
            columns = checked(group)
            meta = meta_of(replace(group, group_id=lease.group_id), columns)
            await self._end.put(lease, meta, columns)

    async def put_bytes(self, queue: Any) -> None:
        """Put the groups of a step as bytes, in a `ByteQueue`."""
        for group in self._groups:
            part = pack(group.trajectories_G)
            await queue.deliver.remote(pickle.dumps((group.group_id, part), protocol=5))


class ByteQueue:
    """Queue actor of the earlier design, without a ledger."""

    def __init__(self) -> None:
        self._payloads: list[bytes] = []

    async def deliver(self, payload: bytes) -> None:
        self._payloads.append(payload)

    async def take(self) -> list[bytes]:
        taken, self._payloads = self._payloads, []
        return taken


def _scores_none(_rows: Sequence[TrainingRow]) -> list[FloatArray]:
    raise AssertionError("this objective scores no rows")


class LearnerWorker:
    """Learner worker without a model: it fetches trajectories, builds rows, and reads them."""

    def __init__(self, source: TrajectorySource, k: int, group: WorkerGroup) -> None:
        self.rollouts = RolloutShare(
            source, objective(k), (), group, score=_scores_none, score_by_reference=_scores_none
        )

    def take_rollouts_from(self, _source: TrajectorySource, _loss: PolicyObjectiveLoss) -> None:
        """Accepted without effect: the source is known already."""

    def step(self, places: Sequence[RowPlace]) -> int:
        """See `read`."""
        return self.read([self.rollouts.row(place) for place in places])

    def read(self, rows: Sequence[TrainingRow]) -> int:
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


class Follower:
    """Actor of a learner worker that is not the leader."""

    def __init__(self, membership: Membership, queue: GroupQueue, k: int) -> None:
        self._worker = LearnerWorker(queue, k, WorkerGroup(membership, "cpu"))

    def execute(self, method: str, argument: Any) -> Any:
        return attrgetter(method)(self._worker)(argument)


class Leader:
    """Stand-in for the learner that `Rollouts` uses in the leading process; counts sent bytes."""

    def __init__(
        self, source: TrajectorySource, k: int, group: WorkerGroup, followers: Sequence[Any]
    ) -> None:
        self._followers, self.workers = followers, group.size
        self._sent: dict[str, list[Any]] = {}
        self.worker = LearnerWorker(source, k, group)
        self.dealing = Dealing(
            workers=group.size, token_budget=TOKEN_BUDGET, most_mask=0, packs=False
        )

    def on_all(self, method: str, argument: Any = None) -> list[Any]:
        return self.on_each(method, [argument] * self.workers)

    def on_each(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        calls = list(zip(self._followers, arguments[1:], strict=True))
        begun = [follower.execute.remote(method, argument) for follower, argument in calls]
        own = attrgetter(method)(self.worker)(arguments[0])
        results = ray.get(begun)
        self._sent[method] = [*((method, argument) for _, argument in calls), *results]
        return [own, *results]

    def sent_bytes(self) -> int:
        """Bytes of followers' calls and results since the last call of this method."""
        sent, self._sent = self._sent, {}
        return sum(len(pickle.dumps(value)) for values in sent.values() for value in values)


class CurrentStep:
    """A step of the current design, from take until every learner worker has read its rows."""

    def __init__(self, queue: GroupQueue, leader: Any, k: int) -> None:
        self._queue, self._leader = queue, leader
        self._rollouts = Rollouts(leader, queue, PolicyObjectiveLoss(objective=objective(k)))
        self._trained, self._version = TrainedGroups(), 0

    def put(self, worker: Any) -> Any:
        return worker.put.remote()

    def train(self) -> None:
        taken = self._queue.take(self._trained)
        self._plan = plan = self._rollouts.plan(taken.groups_P)
        assert not self._rollouts.hold(plan)
        self._rollouts.build(plan)
        [[part]] = plan.updates
        assert part.dealt is not None
        places = [[row.place for rows_B, _ in mine for row in rows_B] for mine in part.dealt]
        self._leader.on_each("step", places)
        self._taken = taken

    def done(self) -> dict[str, float]:
        """Make the queue drop the groups.

        Returns the bytes that it held, those that passed the leader besides its own share, and
        those that a separate node would fetch besides (parts hold more than one answer).
        """
        queue, shares = self._queue, self._plan.shares[0]
        held: Any = ray.get(
            queue.actor.__ray_call__.remote(lambda plain: message_bytes(plain._delivered))
        )
        own = sum(_nbytes(queue, [share]) for share in shares)
        through = message_bytes(self._taken) + self._leader.sent_bytes()
        passed = through + _idle_bytes(queue, shares)
        pulled = _part_bytes(queue, shares) - own
        self._version, self._trained = self._version + 1, self._taken.after(self._trained)
        queue.publish(self._version, self._trained)
        return {
            "queue_mb": held / 1e6,
            "leader_mb": passed / 1e6,
            "pulled_mb": pulled / 1e6,
        }


class EarlierStep:
    """A step of the earlier design."""

    def __init__(self, queue: Any, leader: Any, k: int) -> None:
        self._queue, self._leader, self._objective = queue, leader, objective(k)
        self._taken = 0

    def put(self, worker: Any) -> Any:
        return worker.put_bytes.remote(self._queue)

    def train(self) -> None:
        payloads: list[bytes] = ray.get(self._queue.take.remote())
        groups_P = [self._group(payload) for payload in payloads]
        for group in groups_P:
            meta_of(group)  # the step's metrics
        rows_D = policy_rows(groups_P, self._objective)
        part = Part(rows_D=rows_D, loss=PolicyObjectiveLoss(objective=self._objective))
        dealt = self._leader.dealing.dealt(part).dealt
        self._leader.on_each("read", [[r for rows_B, _ in mine for r in rows_B] for mine in dealt])
        self._taken = sum(map(len, payloads))

    def _group(self, payload: bytes) -> TrajectoryGroup:
        group_id, part = pickle.loads(payload)
        assert isinstance(part, GroupColumns)
        return TrajectoryGroup(group_id=group_id, trajectories_G=tuple(part.trajectories()))

    def done(self) -> dict[str, float]:
        through = self._taken + self._leader.sent_bytes()
        return {"queue_mb": self._taken / 1e6, "leader_mb": through / 1e6, "pulled_mb": 0.0}


def measure_data_path(
    scratch: Path, groups: int = GROUPS, tokens: int = TOKENS
) -> list[dict[str, Any]]:
    """One row for each `way`, `k` and number of `learner_workers`.

    A row has the megabytes of `payload` and those of `CurrentStep.done`; medians over steps of the
    seconds of `put` and `train`; and CPU seconds, puts included, of worker, queue, leader and all
    `other` learner workers together.
    """
    directory = Path(tempfile.mkdtemp(prefix="data-", dir=scratch))
    with _ray():
        return [
            row
            for k in TOP_K
            for workers in LEARNER_WORKERS
            for row in _measure(directory, groups, tokens, k, workers)
        ]


def _measure(
    directory: Path, groups: int, tokens: int, k: int, workers: int
) -> list[dict[str, Any]]:
    settings = LedgerSettings(
        groups_per_step=groups, max_staleness=0, total_groups=groups * STEPS, lease_s=DEADLINE_S
    )
    journal = str(directory / f"ledger-{k}-{workers}.jsonl")
    queue = queue_on_ray(settings, journal, timeout_s=DEADLINE_S)
    remote: Any = ray.remote(num_cpus=0)
    byte_queue = remote(ByteQueue).remote()
    worker = remote(Worker).remote(queue, groups, tokens, k, workers)
    payload: Any = ray.get(worker.payload.remote())
    store = open_store(LOOPBACK, DEADLINE_S)
    member = {"address": LOOPBACK, "port": store.port, "size": workers, "timeout_s": DEADLINE_S}
    followers = [
        remote(Follower).remote(Membership(rank=rank, **member), queue, k)
        for rank in range(1, workers)
    ]
    group = WorkerGroup(Membership(rank=0, **member), "cpu")
    leader = Leader(queue, k, group, followers)
    earlier, current = EarlierStep(byte_queue, leader, k), CurrentStep(queue, leader, k)
    steps = [
        (
            _step(earlier, worker, byte_queue, followers),
            _step(current, worker, queue.actor, followers),
        )
        for _ in range(STEPS)
    ]
    for actor in (worker, *followers, queue.actor, byte_queue):
        ray.kill(actor)
    if dist.is_initialized():
        dist.destroy_process_group()
    given = {"groups": groups, "tokens": tokens, "k": k, "learner_workers": workers}
    given |= {"payload_mb": payload / 1e6}
    return [
        {"way": name} | given | {key: median(step[key] for step in warm) for key in warm[0]}
        for name, (_, *warm) in zip(("earlier", "current"), zip(*steps, strict=True), strict=True)
    ]


def _step(
    way: CurrentStep | EarlierStep, worker: Any, queue: Any, followers: Sequence[Any]
) -> dict[str, float]:
    def used() -> list[float]:
        actors = (worker, queue, *followers)
        return [cpu_seconds(), *ray.get([a.__ray_call__.remote(cpu_seconds) for a in actors])]

    before = used()
    started = time.perf_counter()
    ray.get(way.put(worker))
    arrived = time.perf_counter()
    way.train()
    ended = time.perf_counter()
    leader, of_worker, of_queue, *others = np.subtract(used(), before).tolist()
    return way.done() | {
        "put_s": arrived - started,
        "train_s": ended - arrived,
        "worker_cpu_s": of_worker,
        "queue_cpu_s": of_queue,
        "leader_cpu_s": leader,
        "other_cpu_s": sum(others),
    }


def _idle_bytes(queue: GroupQueue, shares: Sequence[TrajectoryShare]) -> int:
    """Bytes of trajectories that a worker runs only to keep step with other workers."""
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
    """Bytes of the parts that contain these trajectories."""
    payloads: Any = ray.get(queue.actor.payloads.remote([share.place for share in shares]))
    parts = [part for payload in payloads.values() for part in payload.parts if part is not None]
    return sum(columns.nbytes for columns in ray.get(parts))


def data_path_table(report: Sequence[dict[str, Any]]) -> Table:
    """Console table of `measure_data_path`."""
    table = Table(
        title=f"from worker to learner: {report[0]['groups']} groups of {MEMBERS} x "
        f"{report[0]['tokens']} tokens",
        caption="the leader's bytes are those beside its own share; CPU seconds of each process, "
        "wall seconds of putting, and from take until every learner worker has read its rows",
    )
    headers = ("way", "K", "workers", "payload MB", "queue", "leader", "leader's node", "worker s")
    for header in (*headers, "queue s", "leader s", "others s", "all s", "put", "train"):
        table.add_column(header, justify="right")
    for row in report:
        shares = [row[name] / row["payload_mb"] for name in ("queue_mb", "leader_mb", "pulled_mb")]
        cpu = [row[f"{name}_cpu_s"] for name in ("worker", "queue", "leader", "other")]
        table.add_row(
            row["way"],
            f"{row['k']}",
            f"{row['learner_workers']}",
            f"{row['payload_mb']:.1f}",
            *(f"{share:.2%}" for share in shares),
            *(f"{seconds:.3f}" for seconds in (*cpu, sum(cpu), row["put_s"], row["train_s"])),
        )
    return table


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[2:]]
    found = measure_data_path(Path(sys.argv[1]), *given)
    print(json.dumps(found))
    Console(width=140).print(data_path_table(found))
