"""Polling of what the rollout workers and the queue are doing, without ever waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster.handles import calls, errors
from cluster.hosts.rollout_actor import WorkerStatus
from cluster.placement.roles import ROLLOUT
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_answers import QueueStatus
from cluster.supervision.supervise import State, Supervisor

_EVERY_S = 1.0


class StatusPoller:
    """The last answers of the rollout workers and of the queue, each asked about once a second.

    One that hangs keeps nobody else from being asked.

    Attributes:
        workers: status by the worker's name, of those that answer.
        queue: None until the queue has answered once.
    """

    def __init__(
        self, supervisor: Supervisor, queue: GroupQueue, on_queue: Callable[[QueueStatus], None]
    ) -> None:
        self._supervisor, self._queue, self._on_queue = supervisor, queue, on_queue
        self.workers: dict[str, WorkerStatus] = {}
        self.queue: QueueStatus | None = None
        self._asked: dict[Any, str] = {}
        self._asked_at = 0.0
        self._queue_asked: Any = None
        self._fresh: set[str] = set()
        self._stale: set[Any] = set()  # questions from before `forget_freshness`

    def forget_freshness(self) -> None:
        """Statuses from before now do not tell whether an engine is idle."""
        self._fresh.clear()
        self._stale = set(self._asked)

    def all_fresh(self) -> bool:
        """Whether every worker has answered since `forget_freshness`."""
        members = self._supervisor.members(ROLLOUT, State.SERVING, State.DRAINING)
        return {member.name for member in members} <= self._fresh

    def poll(self) -> None:
        """Collects answers, and asks again."""
        self._collect_workers()
        self._collect_queue()
        now = time.monotonic()
        if now - self._asked_at >= _EVERY_S:
            self._asked_at = now
            self._ask()

    def _collect_workers(self) -> None:
        for reference in calls.ended(self._asked):
            name = self._asked.pop(reference)
            try:
                self.workers[name] = calls.get(reference)
                if reference not in self._stale:
                    self._fresh.add(name)
            except errors.RayError:
                self.workers.pop(name, None)

    def _collect_queue(self) -> None:
        if self._queue_asked is None or not calls.ended([self._queue_asked]):
            return
        asked, self._queue_asked = self._queue_asked, None
        try:
            status: QueueStatus = calls.get(asked)
        except errors.RayError:
            return  # the next one answers
        self.queue = status
        self._on_queue(status)

    def _ask(self) -> None:
        members = self._supervisor.members(ROLLOUT, State.SERVING, State.DRAINING)
        silent = set(self._asked.values())
        for member in members:
            if member.name not in silent:
                self._asked[member.handle.status.remote()] = member.name
        if self._queue_asked is None:
            self._queue_asked = self._queue.status()
        names = {member.name for member in members}
        self.workers = {name: status for name, status in self.workers.items() if name in names}
