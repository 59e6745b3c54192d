"""Queues as runs start them: on Ray, or in this process."""

import secrets
from typing import Any

import ray

from cluster.handles.local_actor import LocalActor
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_settings import LedgerSettings
from cluster.queue.queue_actor import GroupQueueActor
from distill.records import TrainedGroups


def queue_on_ray(
    settings: LedgerSettings,
    journal: str,
    *,
    timeout_s: float,
    trained: TrainedGroups | None = None,
    run_id: str = "",
    actor_options: dict[str, Any] | None = None,
) -> GroupQueue:
    """Its actor is killed by whoever asked for it."""
    remote: Any = ray.remote
    lasting = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    actor = remote(GroupQueueActor).options(**lasting | (actor_options or {})).remote(
        secrets.token_hex(8), run_id, trained or TrainedGroups(), settings, journal
    )  # fmt: skip
    return GroupQueue(actor, timeout_s=timeout_s)


def queue_here(
    settings: LedgerSettings,
    journal: str,
    *,
    timeout_s: float,
    trained: TrainedGroups | None = None,
    run_id: str = "",
) -> GroupQueue:
    """The same queue on an actor of this process."""
    actor = LocalActor(
        GroupQueueActor, secrets.token_hex(8), run_id, trained or TrainedGroups(), settings, journal
    )
    return GroupQueue(actor, timeout_s=timeout_s)
