"""The rollout worker: prompts in, scored trajectory groups out.

    lease     waits for: credit (slots)        unblocked by: the learner's publish
    rollout   waits for: the policy engine
    score     waits for: the group's teacher and the reference, where there are any
    put       waits for: room in the queue     unblocked by: the learner's take

Many groups are under way at once; each is a task of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from actors.episode import rollout_group
from actors.teacher import score_rollout
from distill.envs.base import EnvGroupBuilder
from distill.interfaces import Engine
from distill.sampling import TrainSampling
from distill.types import TrajectoryGroup


class EnvGroupDataset(Protocol):
    """A run's endless, seeded sequence of environment groups."""

    def builder(self, group_id: int) -> EnvGroupBuilder: ...


class GroupSink(Protocol):
    """Where leases come from and finished groups go."""

    async def lease(self, max_groups: int) -> Sequence[int]:
        """Group ids to work on, at least one; empty once the run is closing."""
        ...

    async def put(self, group: TrajectoryGroup) -> None: ...


class RolloutWorker:
    """Runs until the sink closes, or until a group fails; the error then ends `run`.

    Args:
        policy: samples.
        teachers: by name, as groups name theirs; none for plain RL.
        reference: the policy that the learner is held near to; None without such a term.
        top_k: how many of the teacher's likeliest tokens the objective wants at each action.
        max_groups: most groups under way at once.
    """

    def __init__(
        self,
        *,
        policy: Engine,
        teachers: Mapping[str, Engine],
        sink: GroupSink,
        dataset: EnvGroupDataset,
        sampling: TrainSampling,
        seed: int,
        max_groups: int,
        reference: Engine | None = None,
        top_k: int = 0,
    ) -> None:
        self._policy = policy
        self._teachers = teachers
        self._reference = reference
        self._top_k = top_k
        self._sink = sink
        self._dataset = dataset
        self._sampling = sampling
        self._seed = seed
        self._max_groups = max_groups
        self._under_way = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def run(self) -> None:
        """Keeps up to `max_groups` groups under way."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while group_ids := await self._lease():
                    for group_id in group_ids:
                        tasks.create_task(self._produce(group_id))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled by the first

    async def _lease(self) -> Sequence[int]:
        await self._has_room.wait()
        group_ids = await self._sink.lease(self._max_groups - self._under_way)
        self._under_way += len(group_ids)
        if self._under_way >= self._max_groups:
            self._has_room.clear()
        return group_ids

    async def _produce(self, group_id: int) -> None:
        started = time.perf_counter()
        group = await rollout_group(
            self._policy,
            self._dataset.builder(group_id),
            self._sampling,
            group_id=group_id,
            seed=self._seed,
        )
        sampled = time.perf_counter()
        timings = {"time/rollout": sampled - started}
        if self._teachers or self._reference is not None:
            group = await score_rollout(
                group, teachers=self._teachers, reference=self._reference, top_k=self._top_k
            )
            timings["time/teacher"] = time.perf_counter() - sampled
        await self._sink.put(replace(group, metrics={**group.metrics, **timings}))
        self._under_way -= 1
        self._has_room.set()
