"""Kept groups: what a ledger knows of them, and which of them a new job takes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.queue.ledger_settings import LedgerSettings
from distill.records import Lease, TrainedGroups


class Kept(NamedTuple):
    """A group whose delivery is on disk.

    Attributes:
        started: weight version of its first lease, or of the lease at which it began again.
    """

    epoch: int
    attempt: int
    started: int

    def lease(self, group_id: int) -> Lease:
        """The lease that delivered it."""
        return Lease(group_id=group_id, attempt=self.attempt, epoch=self.epoch)


def adopted(
    kept: Mapping[int, Kept], trained: TrainedGroups, settings: LedgerSettings
) -> dict[int, Kept]:
    """Kept groups that a job which starts from `trained` takes back, by id.

    They fit into the window, are not in the weights, and can all be trained in time, the oldest
    first, as every step rule takes them.
    """
    version = len(trained) // settings.groups_per_step
    most = min(settings.window, settings.total_groups - len(trained))
    late = settings.on_stale == "train_late"
    found: dict[int, Kept] = {}
    for group_id, each in sorted(kept.items(), key=lambda item: (item[1].started, item[0])):
        over = group_id < trained.watermark or group_id in trained
        age = version + len(found) // settings.groups_per_step - each.started
        in_time = late or age <= settings.max_staleness
        if len(found) < most and not over and each.started <= version and in_time:
            found[group_id] = each
    return found
