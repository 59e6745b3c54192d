"""Queues as runs start them: on Ray, or in this process."""

import secrets
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import ray

from cluster.handles.local_actor import LocalActor
from cluster.queue.group_queue import GroupQueue
from cluster.queue.ledger_types import LedgerSettings
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
    """Queue on a Ray actor; the caller kills the actor."""
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
    """Queue on an actor of this process."""
    actor = LocalActor(
        GroupQueueActor, secrets.token_hex(8), run_id, trained or TrainedGroups(), settings, journal
    )
    return GroupQueue(actor, timeout_s=timeout_s)


# new_queue(on_ray=, ...): a fixture; takes rules of the ledger and arguments of `queue_here`.
NewQueue = Callable[..., GroupQueue]
_RULES = {field.name for field in fields(LedgerSettings)}


def small_queue(journal: str, timeout_s: float, on_ray: bool = False, **changes: Any) -> GroupQueue:
    """Queue of four steps of two groups."""
    rules = {"groups_per_step": 2, "max_staleness": 1, "total_groups": 8, "lease_s": 600.0}
    rules |= {name: changes.pop(name) for name in _RULES & changes.keys()}
    build = queue_on_ray if on_ray else queue_here
    return build(LedgerSettings(**rules), journal, timeout_s=timeout_s, **changes)
