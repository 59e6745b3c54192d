"""Step rule: which groups may start, and which finished groups the next step trains on.

The rule is a pure function of a `View` of the ledger, so that runs can be replayed from their
journal, and the rule can be evaluated in a simulator (benchmarks/scheduling.py).

`max_staleness` is a bound that users rely on: a group that starts at weight version v is trained at
version v + max_staleness at the latest. No group is dropped to keep the bound, since the dropped
groups would be the long ones.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Input of the step rule.

    Attributes:
        step: number of steps trained since the run's start, resume or return to a checkpoint.
        groups_per_step: number of groups of each step, P.
        started: for each live group that is not trained, the number of steps whose weights were
            published at its first lease, or at the first after its last restart: `step` at that
            time, or one less during a push. Groups start in order of id, except restarted ones.
        finished: ids of the started groups that have been delivered.
        constant: ids of finished groups whose members all have the same reward. A step skips up to
            `most_replaced` of them, in order, and takes others instead.
        most_replaced: maximum number of groups that a step skips.
    """

    step: int
    groups_per_step: int
    started: Mapping[int, int]
    finished: Set[int]
    constant: Set[int] = frozenset()
    most_replaced: int = 0

    @property
    def in_progress(self) -> int:
        """Number of started groups, except constant ones that the next step may skip.

        A constant group beyond `most_replaced` is trained, in a place that a skipped group leaves.
        So up to (H + 1) P groups by this count can all be trained within H versions, whatever their
        rewards turn out to be.
        """
        return len(self.started) - min(len(self.constant), self.most_replaced)


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups that the next step trains, and constant ones that it skips, in order of id."""

    ids: list[int]
    replaced: list[int]


@dataclass(frozen=True, slots=True)
class StepRule:
    """Rule that trains the oldest finished groups, if all other started groups stay in time.

    Let v be the version of the weights to be trained. For each u, the groups that started at u or
    before and that the step leaves behind must fit into the P (u + H - v) places of their remaining
    steps. Otherwise the step waits. The oldest finished groups leave the fewest behind for every u,
    so if they do not satisfy the condition, no other choice does. In order of age the condition can
    always be met in the end, because at most (H + 1) P groups are in progress (by induction over v;
    `window` is at most that number). During a push, groups start one version behind the learner.
    But the pushed groups hold P slots, so at most H P others are in progress, which H steps train.

    Short groups overtake long ones that started with them. Since no group is dropped, no length is
    preferred in the long run. After a start, while long groups accumulate, the steps consist of
    shorter groups: in the simulator, by one step's worth of groups in total.

    A restarted group gets a later start. So there is more room before that start and no
    less after it, and the induction holds.

    With H = 0 each step trains the groups of its own prompts, in order.

    Attributes:
        horizon: H, in weight versions.
        window: maximum number of groups in progress (`View.in_progress`) until published weights
            contain them; at most (H + 1) P.
        late: True: steps do not wait for overdue groups, which are trained when they finish.
    """

    horizon: int
    window: int
    late: bool = False

    def room(self, view: View) -> int:
        return self.window - view.in_progress

    def choose(self, view: View) -> Choice | None:
        """Choose the groups of the next step, all finished; None if the step has to wait."""
        choice = _oldest(view.finished, view)
        whole = len(choice.ids) == view.groups_per_step
        return choice if whole and self._late_after(view, choice) is None else None

    def waited_for(self, view: View) -> list[int]:
        """Ids of the started groups that the next step waits for, in order of id."""
        unfinished = view.started.keys() - view.finished
        choice = _oldest(view.finished, view)
        if len(choice.ids) < view.groups_per_step:
            return sorted(unfinished)
        until = self._late_after(view, choice)
        if until is None:
            return []
        return sorted(group_id for group_id in unfinished if view.started[group_id] <= until)

    def peek(self, view: View) -> list[int]:
        """Ids of the finished groups that the next step takes if no other finishes."""
        return _oldest(view.finished, view).ids

    def choose_restarts(self, view: View, able: Sequence[int], start: int) -> list[int]:
        """Choose unfinished groups to restart, so that the next step need not wait.

        Args:
            able: ids of groups that may be restarted, in order of preference.
            start: their new start.

        Returns:
            The ids; empty if the step has to wait anyway.
        """
        choice, again = _oldest(view.finished, view), list[int]()
        if len(choice.ids) < view.groups_per_step:
            return []
        while (until := self._late_after(view, choice)) is not None:
            late = [i for i in able if i not in again and view.started[i] <= until]
            if not late:
                return []
            again.append(late[0])
            view = replace(view, started={**view.started, late[0]: start})
        return again

    def _late_after(self, view: View, choice: Choice) -> int | None:
        """First start of which a step would leave too many groups behind; None if none."""
        if self.late:
            return None
        gone = [*choice.ids, *choice.replaced]
        counts = Counter(view.started.values())
        counts.subtract(view.started[group_id] for group_id in gone)
        constant = Counter(view.started[group_id] for group_id in view.constant - set(gone))
        starts = sorted(counts)
        left_behind = accumulate(counts[start] for start in starts)
        replaceable = accumulate(constant[start] for start in starts)
        for start, left, of_them in zip(starts, left_behind, replaceable, strict=True):
            places = view.groups_per_step * (start + self.horizon - view.step)
            if left - min(of_them, view.most_replaced) > places:
                return start
        return None


def _oldest(group_ids: Iterable[int], view: View) -> Choice:
    """Choose the oldest of some groups for a step, at most P."""
    choice = Choice([], [])
    most = view.groups_per_step + view.most_replaced
    for _, group_id in heapq.nsmallest(most, ((view.started[i], i) for i in group_ids)):
        if len(choice.ids) == view.groups_per_step:
            break
        passed = group_id in view.constant and len(choice.replaced) < view.most_replaced
        (choice.replaced if passed else choice.ids).append(group_id)
    return Choice(sorted(choice.ids), sorted(choice.replaced))
