"""Kept groups: the ledger's record of each, and the choice of those that a new job takes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cluster.queue.ledger_settings import LedgerSettings
from distill.records import Lease, TrainedGroups


class Kept(NamedTuple):
    """A group whose delivery is on disk.

    Attributes:
        epoch, attempt: epoch and attempt of the lease that delivered the group.
        started: weight version of the group's first lease, or of its first lease after it began
            again.
    """

    epoch: int
    attempt: int
    started: int

    def lease(self, group_id: int) -> Lease:
        """The lease that delivered the group."""
        return Lease(group_id=group_id, attempt=self.attempt, epoch=self.epoch)


def adopted(
    kept: Mapping[int, Kept], trained: TrainedGroups, settings: LedgerSettings
) -> dict[int, Kept]:
    """Choose the kept groups that a job which starts from `trained` takes back, by id.

    The groups fit into the window, are not in the weights, and can all be trained in time if the
    oldest are trained first, as by every step rule.
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
