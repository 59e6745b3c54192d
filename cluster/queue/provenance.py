"""Provenance of scores: which groups were scored by which replica, and between which canaries.

A replica is one process lifetime of one scoring engine, identified by a number. A replica has moved
when one of its canaries is bad, and is then replaced. A score is proven when a canary that was sent
after it is good. All earlier canaries were good, since a bad one is the last of a replica. "After"
refers to the order of the ledger's events, not to a clock: the group arrived before the canaries
were sent. The queue uses this class during the run, and the audit when it reads a journal.

A frozen model inside the learner is a replica, too, which has scored every group that was trained
while the learner held it. So is each lifetime of the reward model: any lifetime since a group was
leased may have rewarded the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class ScoreProvenance:
    """Tracks the groups whose scores are not proven yet, in the queue and in weights.

    Attributes:
        versions: first weight version that contains each tracked group, by group id.
        in_learner: replicas in the current learner, which score all groups that it trains.
        rewarding: lifetimes of the reward model, the current one last.
        moved: replicas with a bad canary.
    """

    def __init__(self) -> None:
        # By group: replicas whose scores of it are not proven.
        self._unproven: dict[int, set[int]] = {}
        self._covered: dict[int, set[int]] = {}  # by replica: groups that its pending canary covers
        self.versions: dict[int, int] = {}
        self.in_learner: set[int] = set()
        self.rewarding: list[int] = []
        # By leased group: index in `rewarding` of the reward model at its first lease.
        self._rewarding_since: dict[int, int] = {}
        self.moved: set[int] = set()

    def record_lease(self, group_id: int) -> None:
        """Record the lease of a group.

        A group that is leased again without `discard_rewards` may keep rewards from its earlier
        lease.
        """
        if self.rewarding:
            self._rewarding_since.setdefault(group_id, len(self.rewarding) - 1)

    def discard_rewards(self, group_ids: Iterable[int]) -> None:
        """Record that groups are sampled again and discard their earlier rewards."""
        for group_id in group_ids:
            self._rewarding_since.pop(group_id, None)

    def rewarded_by(self, group_id: int) -> set[int]:
        """Lifetimes of the reward model that may have rewarded a leased group."""
        return set(self.rewarding[self._rewarding_since.get(group_id, 0) :])

    def record_delivery(self, group_id: int, replicas: Iterable[int]) -> bool:
        """Record a delivered group and the replicas that scored it.

        If the group was delivered before and not dropped since, weights may contain that earlier
        delivery, so its replicas stay on record.

        Returns:
            False if one of `replicas` is known to have moved.
        """
        replicas = set(replicas)
        for covered in self._covered.values():
            covered.discard(group_id)
        if both := replicas | self._unproven.get(group_id, set()):
            self._unproven[group_id] = both
        return not replicas & self.moved

    def record_canaries_sent(self, replicas: Iterable[int]) -> None:
        for replica in replicas:
            self._covered[replica] = self.unproven_of(replica)

    def record_good_canary(self, replica: int) -> None:
        for group_id in self._covered.pop(replica, set()):
            if replicas := self._unproven.get(group_id):
                replicas.discard(replica)
                if not replicas:
                    self.drop([group_id])

    def record_bad_canary(self, replica: int) -> set[int]:
        """Record that the replica has moved; returns the groups that it may have scored wrongly."""
        self.moved.add(replica)
        self._covered.pop(replica, None)
        return self.unproven_of(replica)

    def unproven_of(self, replica: int) -> set[int]:
        """Groups scored by the replica whose scores are not proven."""
        return {group_id for group_id, replicas in self._unproven.items() if replica in replicas}

    def record_published(self, version: int, group_ids: Iterable[int]) -> None:
        """Record that weights of this version contain these groups."""
        for group_id in group_ids:
            if self.in_learner:
                self._unproven.setdefault(group_id, set()).update(self.in_learner)
            if group_id in self._unproven:
                self.versions[group_id] = version
            self._rewarding_since.pop(group_id, None)

    def has_unproven_rewards(self, group_id: int) -> bool:
        """True if a reward model may have rewarded the group, and that is not proven."""
        return not self._unproven.get(group_id, set()).isdisjoint(self.rewarding)

    def drop(self, group_ids: Iterable[int]) -> None:
        """Stop tracking groups, because they are proven or no longer exist."""
        for group_id in group_ids:
            self._unproven.pop(group_id, None)
            self.versions.pop(group_id, None)
            for covered in self._covered.values():
                covered.discard(group_id)

    def reset(self, trained: Callable[[int], bool]) -> None:
        """Reset for a learner that starts from other weights.

        Args:
            trained: True for group ids that these weights contain; only those stay tracked.
        """
        self.in_learner.clear()
        self._rewarding_since.clear()
        self.drop([i for i in self._unproven if i not in self.versions or not trained(i)])
