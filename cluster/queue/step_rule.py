"""The step rule: which groups may start, and which finished ones the next step trains on.

It is a pure function of a `View` of the ledger, so that runs can be played again from their
journal, and the rule judged in a simulator (benchmarks/scheduling.py).

`max_staleness` is a bound that users rely on: a group that starts at weight version v is trained at
version v + max_staleness at the latest. Nothing is dropped for it, since what is dropped is long.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """State that a rule decides by.

    Attributes:
        step: steps that were trained since the run's start, resume or return to a checkpoint.
        groups_per_step: groups of each step, P.
        started: for each live group that is not trained, how many steps' weights were published
            when it was first leased, or leased to begin again: `step`, or one less beside a push.
            But for those that began again, groups start in order of id.
        finished: ids of those among them that have been delivered.
        constant: ids of finished groups whose members all have the same reward: a step passes over
            them, in order, up to `most_replaced`, and takes others instead.
    """

    step: int
    groups_per_step: int
    started: Mapping[int, int]
    finished: Set[int]
    constant: Set[int] = frozenset()
    most_replaced: int = 0

    @property
    def under_way(self) -> int:
        """Started groups but for those that the next step may pass over.

        A constant group that it does not pass over, since it passes over `most_replaced` others,
        makes room by these; so at most (H + 1) P groups under way can all be trained within H
        versions, whatever their rewards turn out to be.
        """
        return len(self.started) - min(len(self.constant), self.most_replaced)


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups of the next step.

    Attributes:
        ids: those to train, in order.
        replaced: constant ones that it passes over, in order.
    """

    ids: list[int]
    replaced: list[int]


@dataclass(frozen=True, slots=True)
class StepRule:
    """The oldest finished groups, as long as all that have started can still be trained in time.

    With v the version of the weights to be trained, those that stay behind and started at u or
    before must fit into the P (u + H - v) places of the steps that are left to them, for each u;
    otherwise the step waits. Of all choices the oldest finished leave least behind for every u, so
    no other could go on either. In order of age this always works out in the end, as no more than
    (H + 1) P groups are under way (by induction over v; `window` is at most that). Beside a push,
    those that start are a version behind the learner; but P places are held by the groups that are
    pushed, so at most H P others are under way, which H steps train.

    Short groups overtake long ones that started with them. Nothing is dropped, so in the long run
    what goes in comes out and no length is preferred; but while the long groups under way become
    more than they were, after a start, the steps are of shorter ones: by one step's worth in all in
    the simulator.

    A group that begins again has another start, later than its own, so there is more room before it
    and no less after it: the induction holds.

    With H = 0 a step takes its own prompts' groups, in order.

    Attributes:
        horizon: H, in weight versions.
        window: most groups under way (`View.under_way`) until published weights contain them, at
            most (H + 1) P.
        late: groups that are overdue are not waited for: they are trained when they come.
    """

    horizon: int
    window: int
    late: bool = False

    def room(self, view: View) -> int:
        """Number of groups that may start now."""
        return self.window - view.under_way

    def choose(self, view: View) -> Choice | None:
        """Groups of the next step, all finished; None: it waits."""
        choice = _oldest(view.finished, view)
        whole = len(choice.ids) == view.groups_per_step
        return choice if whole and self._late_after(view, choice) is None else None

    def waited_for(self, view: View) -> list[int]:
        """Ids of the started groups that the next step waits for, in order."""
        unfinished = view.started.keys() - view.finished
        choice = _oldest(view.finished, view)
        if len(choice.ids) < view.groups_per_step:
            return sorted(unfinished)
        until = self._late_after(view, choice)
        if until is None:
            return []
        return sorted(group_id for group_id in unfinished if view.started[group_id] <= until)

    def foreseen(self, view: View) -> list[int]:
        """Ids of the finished groups that the next step takes if no other finishes, in order."""
        return _oldest(view.finished, view).ids

    def begin_again(self, view: View, able: Sequence[int], start: int) -> list[int]:
        """The first of the `able` unfinished groups that have to begin again, with `start` as
        their start, for the next step to wait for none; [] if it has to wait anyway."""
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
        """The first start of which too many groups would be left behind by a step."""
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
    """The first groups of a step among some, in order; fewer if they are too few."""
    choice = Choice([], [])
    most = view.groups_per_step + view.most_replaced
    for _, group_id in heapq.nsmallest(most, ((view.started[i], i) for i in group_ids)):
        if len(choice.ids) == view.groups_per_step:
            break
        passed = group_id in view.constant and len(choice.replaced) < view.most_replaced
        (choice.replaced if passed else choice.ids).append(group_id)
    return Choice(sorted(choice.ids), sorted(choice.replaced))
