"""Autoscaling of a run: observes it window by window, and grows and shrinks its pools.

cluster/runtime/autoscale.py decides. Growing adds an actor in a new placement group. If the cluster
has no room for it, Ray's autoscaler, if any, adds a node. Shrinking drains an actor and returns its
place; Ray's autoscaler removes nodes that stay empty.

A window consists of whole steps: it ends when a step's groups are complete, and the next one
begins. So the learner's share of waiting is that of whole steps, of any length. The first window
begins with the first step's groups: before that, a pool of any size would keep the learner waiting.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Protocol

from cluster.handles.node import nodes_alive
from cluster.hosts.rollout_actor import WorkerStatus
from cluster.placement.roles import EVALUATION, POLICY, ROLLOUT
from cluster.queue.ledger_types import QueueStatus
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.autoscale import Autoscaler, Observation, PoolName
from cluster.supervision.supervise import State, Supervisor

# Least length of a window.
_WINDOW_S = 5.0
# `memory_s` as a multiple of `down_after_s`: 30 min for 120 s.
_MEMORY = 15


class Pools(Protocol):
    """Pools of a run, which grow and shrink by one member."""

    supervisor: Supervisor
    bounds: dict[str, tuple[int, int]]

    @property
    def statuses(self) -> dict[str, WorkerStatus]: ...

    def grow(self, role: str) -> None: ...

    def shrink(self, role: str) -> None: ...


class Scaling:
    """Calls the autoscaler. Call `update` often, and `waited` after each wait of the learner.

    Args:
        steps_in_flight: number of steps whose groups are in progress or finished at the same time.
            For this number of windows after a change of members, some groups are of earlier
                members.
        up_after_s, down_after_s: see `Autoscaler`.
    """

    def __init__(
        self,
        pools: Pools,
        directory: RunDirectory,
        print_line: Callable[[str], None],
        *,
        steps_in_flight: int,
        up_after_s: float = 30.0,
        down_after_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools, self._directory = pools, directory
        self._print_line, self._clock = print_line, clock
        self._roles: dict[PoolName, list[str]] = {"policy": [POLICY], "rollout": [ROLLOUT]}
        others = (POLICY, ROLLOUT, EVALUATION)
        if teachers := [role for role in pools.bounds if role not in others]:
            self._roles["teacher"] = teachers
        bounds: dict[PoolName, tuple[int, int]] = {}
        for name, roles in self._roles.items():
            least = sum(pools.bounds[role][0] for role in roles)
            most = sum(pools.bounds[role][1] for role in roles)
            if most > least:
                bounds[name] = least, most
        self._autoscaler = Autoscaler(
            bounds,
            up_after_s=up_after_s,
            down_after_s=max(up_after_s, down_after_s),
            cooldown_s=2 * up_after_s,
            memory_s=_MEMORY * max(up_after_s, down_after_s),
            settling_windows=steps_in_flight,
        )
        self._window_s = min(_WINDOW_S, up_after_s / 2)
        self._began: float | None = None
        self._waited_s = 0.0
        self._ended: tuple[float, float] | None = None  # seconds of a window, and of its waits
        self._samples: list[Counter[str]] = []  # moments of a window: groups by stage
        self._before: QueueStatus | None = None  # the window began
        self._recorded: dict[str, object] = {}

    def waited(self, seconds: float) -> None:
        """Record that a step's groups are complete, for which the learner waited."""
        now = self._clock()
        if self._began is None:
            self._began = now
            return
        self._waited_s += seconds
        if now - self._began >= self._window_s:
            self._ended = now - self._began, self._waited_s
            self._began, self._waited_s = now, 0.0

    def update(self, status: QueueStatus) -> None:
        """Take a sample; after a window's end, decide and act."""
        self._record_sizes()
        self._record_nodes()
        workers = self._pools.statuses.values()
        self._samples.append(Counter(group.stage for worker in workers for group in worker.groups))
        if self._before is None or self._began is None:
            self._before = status
        if self._ended is None:
            return
        observation = self._observe(self._before, status, *self._ended)
        self._ended, self._samples, self._before = None, [], status
        self._directory.append_event(
            "window",
            learner_wait=observation.learner_wait,
            credit_starved=observation.credit_starved,
            queue_depth=observation.queue_depth,
            sampling=observation.sampling,
            environment=observation.environment,
            scoring=observation.scoring,
        )
        self._act(observation)

    def _observe(
        self, before: QueueStatus, status: QueueStatus, seconds: float, waited_s: float
    ) -> Observation:
        # Measured in the queue (a new one counts from 0): samples are taken in step with steps.
        passed_s = status.age_s - before.age_s
        starved_s = status.starved_s - before.starved_s
        return Observation(
            seconds=seconds,
            learner_wait=min(1.0, waited_s / seconds),
            credit_starved=min(1.0, max(0.0, starved_s / passed_s)) if passed_s > 0 else 0.0,
            sampling=fmean(sample["sampling"] for sample in self._samples),
            environment=fmean(sample["environment"] for sample in self._samples),
            scoring=fmean(sample["scoring"] for sample in self._samples),
            queue_depth=status.depth,
            sizes={name: self._size(roles) for name, roles in self._roles.items()},
            ready={
                name: sum(len(self._pools.supervisor.serving(role)) for role in roles)
                for name, roles in self._roles.items()
            },
            exhausted=status.exhausted,
        )

    def _act(self, observation: Observation) -> None:
        for change in self._autoscaler.observe(observation):
            pool, now, target = change.pool, observation.sizes[change.pool], change.size
            self._print_line(f"{pool} pool: {now} -> {target} ({change.reason})")
            self._directory.append_event(
                "scale", pool=pool, **{"from": now, "to": target}, reason=change.reason
            )
            for _ in range(abs(target - now)):
                self._step(pool, target > now)

    def _step(self, pool: PoolName, grows: bool) -> None:
        """Add or remove one member; of several teachers, at the busiest or the idlest."""
        load = {role: self._load(role) for role in self._roles[pool]}
        if grows:
            below = [role for role in load if self._size([role]) < self._pools.bounds[role][1]]
            self._pools.grow(max(below, key=load.__getitem__))
        else:
            above = [role for role in load if self._size([role]) > self._pools.bounds[role][0]]
            self._pools.shrink(min(above, key=load.__getitem__))

    def _load(self, role: str) -> float:
        """Requests in progress per member."""
        workers = self._pools.statuses.values()
        requests = sum(
            count
            for worker in workers
            for engine, count in worker.requests.items()
            if engine.startswith(f"{role} engine ")
        )
        return requests / max(1, self._size([role]))

    def _size(self, roles: list[str]) -> int:
        return sum(self._pools.supervisor.expected(role) for role in roles)

    def _record_nodes(self) -> None:
        alive = nodes_alive()
        if self._recorded.get("nodes") != alive:
            self._recorded["nodes"] = alive
            self._directory.append_event("nodes", alive=alive)

    def _record_sizes(self) -> None:
        """Record events for pools that have changed."""
        members = self._pools.supervisor.members
        for pool, roles in self._roles.items():
            states: Mapping[str, tuple[State, ...]] = {
                "ready": (State.SERVING,),
                "starting": (State.STARTING, State.READY),
                "draining": (State.DRAINING,),
            }
            sizes = {
                name: sum(len(members(role, *wanted)) for role in roles)
                for name, wanted in states.items()
            }
            if self._recorded.get(pool) != sizes:
                self._recorded[pool] = sizes
                self._directory.append_event("size", pool=pool, **sizes)
