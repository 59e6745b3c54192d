"""Credit and order of prompt groups: who may start, and which groups make the next step. No Ray.

A group holds a slot from its lease until the weights that its step produced are on every policy
engine. There are (max_staleness + 1) * groups_per_step slots, and steps take groups in order of id,
so a group leased at weight version v is trained at version v + max_staleness at the latest.
"""

from __future__ import annotations

from distill.delivery import TrainedGroups


class Ledger:
    """Counts leases, deliveries and releases of one run."""

    def __init__(
        self,
        *,
        trained: TrainedGroups,
        groups_per_step: int,
        max_staleness: int,
        total_groups: int,
    ) -> None:
        """`trained` are the groups in the starting weights; `total_groups` end the run."""
        self._next_lease = len(trained)
        assert all(group_id in trained for group_id in range(self._next_lease))
        self._next_delivery = self._next_lease
        self._limit = self._next_lease + groups_per_step * (max_staleness + 1)
        self._total = total_groups
        self._delivered: set[int] = set()

    def lease(self, max_groups: int) -> list[int]:
        """Up to `max_groups` ids that may start now; empty when there is no credit."""
        end = min(self._next_lease + max_groups, self._limit, self._total)
        group_ids = list(range(self._next_lease, end))
        self._next_lease += len(group_ids)
        return group_ids

    @property
    def exhausted(self) -> bool:
        """Every group of the run has been leased."""
        return self._next_lease >= self._total

    def deliver(self, group_id: int) -> bool:
        """True the first time a leased group arrives; False for a repeat, to be dropped."""
        assert 0 <= group_id < self._next_lease, f"group {group_id} was never leased"
        if group_id < self._next_delivery or group_id in self._delivered:
            return False
        self._delivered.add(group_id)
        return True

    def in_order(self) -> list[int]:
        """Delivered ids that follow the last one handed out without a gap; each is named once."""
        ready = []
        while self._next_delivery in self._delivered:
            self._delivered.remove(self._next_delivery)
            ready.append(self._next_delivery)
            self._next_delivery += 1
        return ready

    def release(self, num_groups: int) -> None:
        """Frees the slots of `num_groups` groups: their weights are on every engine."""
        self._limit += num_groups

    def missing(self) -> list[int]:
        """Leased ids that have not arrived: what a step that waits is waiting for."""
        return [
            group_id
            for group_id in range(self._next_delivery, self._next_lease)
            if group_id not in self._delivered
        ]
