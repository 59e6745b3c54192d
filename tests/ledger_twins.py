"""Slow twins of the ledger's parts, as the docstrings of these parts define them.

They are the step rule (cluster/queue/step_rule.py), the choice of kept groups (`adopted`), and
which scores are proven (provenance.py, scoring.py).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from cluster.queue.ledger_types import Kept, LedgerSettings
from cluster.queue.scoring import Scoring
from cluster.queue.step_rule import StepRule, View
from distill.records import TrainedGroups


def next_step(rule: StepRule, view: View) -> tuple[list[int], list[int], list[int]]:
    """Trained and replaced groups of the next step, and unfinished groups that it waits for.

    No group of the view may be overdue.
    """
    taken, replaced = oldest(view)
    unfinished = sorted(view.started.keys() - view.finished)
    if len(taken) < view.groups_per_step:
        return [], [], unfinished
    left = view.started.keys() - {*taken, *replaced}
    for start in () if rule.late else range(view.step + 1):
        due = {i for i in left if view.started[i] <= start}
        trained = len(due) - min(len(view.constant & due), view.most_replaced)
        if due and trained > view.groups_per_step * (start + rule.horizon - view.step):
            return [], [], [i for i in unfinished if view.started[i] <= start]
    return taken, replaced, []


def oldest(view: View) -> tuple[list[int], list[int]]:
    """Trained and replaced groups of a step of the oldest finished groups; maybe too few."""
    taken, replaced = list[int](), list[int]()
    for group_id in sorted(view.finished, key=lambda i: (view.started[i], i)):
        if len(taken) < view.groups_per_step:
            skipped = group_id in view.constant and len(replaced) < view.most_replaced
            (replaced if skipped else taken).append(group_id)
    return sorted(taken), sorted(replaced)


def usable(kept: Mapping[int, Kept], trained: TrainedGroups, rules: LedgerSettings) -> set[int]:
    """Kept groups that a new job takes back, if it trains the oldest first."""
    version, chosen = len(trained) // rules.groups_per_step, list[int]()
    room = min(rules.window, rules.total_groups - len(trained))
    for started, group_id in sorted((each.started, group_id) for group_id, each in kept.items()):
        trained_at = version + len(chosen) // rules.groups_per_step
        if (
            len(chosen) < room
            and group_id not in trained
            and group_id not in trained.set_aside
            and started <= version  # otherwise it is from lost weights
            and (trained_at <= started + rules.max_staleness or rules.on_stale == "train_late")
        ):
            chosen.append(group_id)
    return set(chosen)


class Replica(NamedTuple):
    job: int
    number: int


class ScoresTwin:
    """Replicas that scored the groups of a run, over all its jobs, and what canaries prove.

    A score is proven when a canary that was sent after the group arrived is good.

    Attributes:
        kinds: `engine`, `rewards` or `in_learner`, for each replica of the current job.
        rewarding: lifetimes of the reward model, the current one last.
        moved: replicas of the current job with a bad canary.
        rescored: number of groups that were to be scored again, by the caller.
    """

    def __init__(self) -> None:
        self._events, self._job = 0, -1
        # By group: replicas whose scores of it are not proven, with the time at which it arrived.
        self._unproven: dict[int, dict[Replica, int]] = {}
        self._versions: dict[int, int] = {}
        self._by: dict[int, set[Replica]] = {}  # last scorers of each group
        self._moved: set[Replica] = set()
        self._good: dict[Replica, list[tuple[float, bool]]] = {}
        self.rescored = 0
        self.start_job(TrainedGroups())

    def start_job(self, trained: TrainedGroups) -> None:
        self._job += 1
        self.kinds: dict[int, str] = {}
        self.rewarding: list[int] = []
        self._sent: dict[Replica, int] = {}
        self.start_learner(trained)

    def start_learner(self, trained: TrainedGroups) -> None:
        """Start from weights with these groups."""
        self._in_learner: set[Replica] = set()
        self._since: dict[int, int] = {}  # by group: index of the reward model of its first lease
        self._versions = {i: v for i, v in self._versions.items() if i in trained}
        self._unproven = {i: by for i, by in self._unproven.items() if i in self._versions}

    def admit(self, kind: str) -> tuple[int, str]:
        """Return the number and the name of a new replica."""
        replica = Replica(self._job, len(self.kinds))
        self.kinds[replica.number] = kind
        self._good[replica] = []
        if kind == "rewards":
            self.rewarding.append(replica.number)
        if kind == "in_learner":
            self._in_learner.add(replica)
        return replica.number, str(replica)

    @property
    def moved(self) -> set[int]:
        return {each.number for each in self._moved if each.job == self._job}

    def engines(self, *, moved: bool) -> list[int]:
        gone = set() if moved else self.moved
        return [i for i, kind in self.kinds.items() if kind == "engine" and i not in gone]

    def lease(self, group_id: int) -> None:
        self._since.setdefault(group_id, max(0, len(self.rewarding) - 1))

    def discard_rewards(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._since.pop(group_id, None)

    def deliver(self, group_id: int, scored_by: Collection[int]) -> set[int]:
        """Return the replicas that scored the group or may have rewarded it."""
        by = {*scored_by, *self.rewarding[self._since.get(group_id, 0) :]}
        self._by[group_id] = {Replica(self._job, number) for number in by}
        self._score(group_id, self._by[group_id] | self._unproven.get(group_id, {}).keys())
        return by

    def _score(self, group_id: int, replicas: Iterable[Replica]) -> None:
        self._events += 1
        self._unproven.setdefault(group_id, {}).update(dict.fromkeys(replicas, self._events))

    def drop(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._unproven.pop(group_id, None)

    def train(self, version: int, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            self._versions[group_id] = version
            self._by[group_id] = self._by[group_id] | self._in_learner
            self._score(group_id, self._in_learner)
            self._since.pop(group_id, None)

    def send(self, numbers: Iterable[int]) -> None:
        self._sent |= {Replica(self._job, number): self._events for number in numbers}

    def answer(self, number: int, good: bool, gap: float, rode: bool) -> set[int]:
        """Return the groups that a bad replica may have scored wrongly."""
        replica = Replica(self._job, number)
        sent = self._sent.pop(replica, 0)
        if not good:
            self._moved.add(replica)
            return {i for i, by in self._unproven.items() if replica in by}
        self._good[replica].append((gap, rode))
        for by in self._unproven.values():
            if by.get(replica, sent + 1) <= sent:
                del by[replica]
        return set()

    def first_version_of(self, group_ids: Collection[int]) -> int | None:
        return min((v for i, v in self._versions.items() if i in group_ids), default=None)

    def proven(self, version: int) -> int:
        """Newest version without unproven scores of this job, up to the newest one."""
        unproven = {i for i, by in self._unproven.items() if any(r.job == self._job for r in by)}
        first = self.first_version_of(unproven)
        return version if first is None else first - 1

    def check(self, found: Scoring | None) -> None:
        """Compare the audit of a whole journal."""
        if found is None:
            assert not self._good
            return
        assert [each.who for each in found.replicas] == [str(replica) for replica in self._good]
        gaps: dict[str, list[int]] = {}
        bad: dict[str, list[int]] = {}
        for each, (replica, good) in zip(found.replicas, self._good.items(), strict=True):
            unproven = [i for i in self._versions if replica in self._unproven.get(i, ())]
            trained = [i for i in self._versions if replica in self._by[i]]
            assert (each.trained, each.gaps) == (len(trained), len(unproven))
            assert (each.canaries, each.batched) == (len(good), sum(rode for _, rode in good))
            assert each.largest == max((gap for gap, _ in good), default=0.0)
            if unproven:
                of = bad if replica in self._moved else gaps
                of[str(replica)] = sorted({self._versions[i] for i in unproven})
        assert (found.gaps, found.bad) == (gaps, bad)
        unwatched = sum(not self._by[i] for i in self._versions)
        assert (found.trained, found.unwatched) == (len(self._versions), unwatched)
        assert found.proven == found.trained - sum(
            not self._by[i] or bool(self._unproven.get(i)) for i in self._versions
        )
        assert found.rescored == self.rescored and found.problems == []
