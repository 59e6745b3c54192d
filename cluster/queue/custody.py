"""Custody of scores: which groups were scored by which replica, and between which canaries.

A replica is one life of one scoring engine, by a number. What it scored is proven once a canary
that was asked for afterwards is good; all its canaries before were, for one that moves is the last
of its life. "Afterwards" is the order of the ledger's events, and no clock: a group arrived before
the canaries were sent. Used by the queue as it goes, and by the audit of its journal.

A frozen model in the learner itself is a replica, too: what weights contain, all of these that the
learner held then have scored. So is a life of the reward model: each of those since a group was
leased may have rewarded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


class Custody:
    """Groups that are not proven yet, in the queue and in weights."""

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}  # replicas whose next good canary a group waits for
        self._asked: dict[int, set[int]] = {}  # by replica: groups that its present canary covers
        self._versions: dict[int, int] = {}  # of open groups in weights
        self._in_learner: set[int] = set()  # replicas in the present learner
        self._rewarding: list[int] = []  # lives of the reward model, the present one last
        self._begun: dict[int, int] = {}  # by group under way: the place of the first that it met
        self.moved: set[int] = set()

    @property
    def in_learner(self) -> frozenset[int]:
        """The replicas that the present learner holds."""
        return frozenset(self._in_learner)

    def joined_learner(self, replica: int) -> None:
        """The learner holds a replica, which scores all that it trains on from now on."""
        self._in_learner.add(replica)

    def rewards_from_now(self, replica: int) -> None:
        """A life of the reward model begins."""
        self._rewarding.append(replica)

    def rewards(self, replica: int) -> bool:
        """True of a life of the reward model."""
        return replica in self._rewarding

    def begun(self, group_id: int) -> None:
        """A group is leased. If it was before, and was not to begin anew, its rewards may be those
        of then."""
        if self._rewarding:
            self._begun.setdefault(group_id, len(self._rewarding) - 1)

    def anew(self, group_ids: Iterable[int]) -> None:
        """These begin anew, rewards and all."""
        for group_id in group_ids:
            self._begun.pop(group_id, None)

    def rewarded_by(self, group_id: int) -> set[int]:
        """The lives of the reward model that may have rewarded a group that is under way."""
        return set(self._rewarding[self._begun.get(group_id, 0) :])

    def arrived(self, group_id: int, replicas: Iterable[int]) -> bool:
        """A group has come, scored by these. False if one of them is known to have moved.

        If it came before and was not dropped since, weights may contain it as it was then.
        """
        replicas = set(replicas)
        for covered in self._asked.values():
            covered.discard(group_id)
        if both := replicas | self._open.get(group_id, set()):
            self._open[group_id] = both
        return not replicas & self.moved

    def asked(self, replicas: Iterable[int]) -> None:
        """Canaries are about to be sent to these."""
        for replica in replicas:
            self._asked[replica] = self.open_of(replica)

    def good(self, replica: int) -> None:
        """The canary that was asked for last has not moved."""
        for group_id in self._asked.pop(replica, set()):
            if replicas := self._open.get(group_id):
                replicas.discard(replica)
                if not replicas:
                    self.drop([group_id])

    def bad(self, replica: int) -> set[int]:
        """It has moved: returns the groups that it may have scored wrongly."""
        self.moved.add(replica)
        self._asked.pop(replica, None)
        return self.open_of(replica)

    def open_of(self, replica: int) -> set[int]:
        """Groups that wait for the replica's next good canary, or wait in vain."""
        return {group_id for group_id, replicas in self._open.items() if replica in replicas}

    def published(self, version: int, group_ids: Iterable[int]) -> None:
        """Weights of this version contain these groups."""
        for group_id in group_ids:
            if self._in_learner:
                self._open.setdefault(group_id, set()).update(self._in_learner)
            if group_id in self._open:
                self._versions[group_id] = version
            self._begun.pop(group_id, None)

    def drop(self, group_ids: Iterable[int]) -> None:
        """Groups that are not there any more, or proven."""
        for group_id in group_ids:
            self._open.pop(group_id, None)
            self._versions.pop(group_id, None)
            for covered in self._asked.values():
                covered.discard(group_id)

    def keep(self, trained: Callable[[int], bool]) -> None:
        """Another learner, from other weights: of the groups, those that are trained still are
        left."""
        self._in_learner.clear()
        self._begun.clear()
        self.drop([i for i in self._open if i not in self._versions or not trained(i)])

    def versions_of(self, group_ids: Iterable[int]) -> Mapping[int, int]:
        """Versions whose weights contain them first, of those that are in any."""
        return {i: self._versions[i] for i in group_ids if i in self._versions}

    def first_open_version(self) -> int | None:
        """The first version that contains a group which is not proven; None: all are."""
        return min(self._versions.values(), default=None)
