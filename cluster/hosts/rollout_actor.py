"""Rollout actor: hosts the worker and its engine pools, and serves the driver's calls.

A run starts many of these actors and waits for them, so this module does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.rollout.worker import RolloutWorker, Stage
from cluster.handles.engine_pool import EnginePool
from distill.engine import Score, ScoreRequest
from distill.envs.base import EnvStream

# Engine handles by pool name and engine name.
Roster = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RosterChange:
    """Engines that joined and left, by pool. A restarted engine counts as joined.

    Attributes:
        engines: handle of each engine that joined, and None for each that left, by name.
        complete: True if `engines` is the complete roster.
        replicas: numbers for `Score.scored_by` of the engines that joined, if they have one.
    """

    engines: Roster
    complete: bool
    replicas: Mapping[str, int]

    @classmethod
    def between(cls, old: Roster, new: Roster, replicas: Mapping[str, int]) -> RosterChange:
        """Change from roster `old` to `new`; `complete` if `old` is empty."""
        engines: dict[str, dict[str, Any]] = {}
        for role in {**old, **new}:
            before, after = old.get(role, {}), new.get(role, {})
            names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
            engines[role] = {name: after.get(name) for name in names}
        changed = {name for members in engines.values() for name in members}
        return cls(engines, not old, {n: i for n, i in replicas.items() if n in changed})

    def applied(self, old: Roster) -> dict[str, dict[str, Any]]:
        """Roster after the change. It has the roles of both."""
        roster = {role: {} if self.complete else dict(members) for role, members in old.items()}
        for role, members in self.engines.items():
            all_of = roster.get(role, {}) | dict(members)
            roster[role] = {name: handle for name, handle in all_of.items() if handle is not None}
        return roster


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group in progress at a worker: its stage, and the seconds in that stage."""

    group_id: int
    stage: Stage
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's work in progress. `requests`: number of requests in progress, by engine."""

    groups: tuple[GroupProgress, ...]
    requests: Mapping[str, int]


class RolloutActor:
    """Hosts a `RolloutWorker` in an actor."""

    def __init__(
        self, build: Callable[..., RolloutWorker], dataset: EnvStream, patience_s: float
    ) -> None:
        """
        Args:
            build: builds the worker from the dataset and a function that returns a pool by name.
            patience_s: longest time that a request waits for an engine that responds.
        """
        self._pools: dict[str, EnginePool] = {}
        self._patience_s = patience_s
        self._roster: dict[str, dict[str, Any]] = {}
        self._replicas: dict[str, int] = {}
        self._worker = build(self._pool, dataset=dataset)

    def _pool(self, name: str) -> EnginePool:
        """Pool with this name, created at its first use."""
        if name not in self._pools:
            self._pools[name] = EnginePool(name, {}, self._patience_s)
        return self._pools[name]

    async def run(self) -> None:
        """Run the worker until the queue closes or the worker is drained."""
        await self._worker.run()

    async def update(self, change: RosterChange, max_groups: int, epoch: int) -> None:
        """Set the engines that serve, the limit of groups in progress and the queue's epoch."""
        self._roster = change.applied(self._roster)
        self._replicas |= change.replicas
        for name, members in self._roster.items():
            self._pool(name).update(members, self._replicas)
        self._worker.max_groups = max_groups
        self._worker.forget(epoch)

    async def canary(
        self, role: str, engine: str, requests: Sequence[ScoreRequest], patience_s: float
    ) -> tuple[list[Score], bool]:
        """Send an engine's canaries with the next rows that it scores for this worker.

        See `EnginePool.score_with_next_batch`.
        """
        return await self._pool(role).score_with_next_batch(engine, requests, patience_s)

    async def cancel_restarted(self, over: Mapping[int, int], epoch: int) -> None:
        """Cancel restarted groups of the queue's `epoch`; see `RolloutWorker.cancel_restarted`."""
        self._worker.cancel_restarted(over, epoch)

    async def drain(self) -> None:
        self._worker.drain()

    async def status(self) -> WorkerStatus:
        now = time.monotonic()
        requests: dict[str, int] = {}
        for pool in self._pools.values():
            requests |= pool.in_progress
        return WorkerStatus(
            groups=tuple(
                GroupProgress(group.lease.group_id, group.stage, now - group.since)
                for group in self._worker.active
            ),
            requests=requests,
        )


def build_worker(
    pool: Callable[[str], EnginePool],
    *,
    policy: str,
    teachers: Mapping[str, str],
    reference: str | None,
    models: Mapping[str, str],
    **settings: Any,
) -> RolloutWorker:
    """Build the worker in its actor. Role arguments, and values of mappings, are pool names."""
    return RolloutWorker(
        policy=pool(policy),
        teachers={name: pool(role) for name, role in teachers.items()},
        reference=None if reference is None else pool(reference),
        models={name: pool(role) for name, role in models.items()},
        **settings,
    )
