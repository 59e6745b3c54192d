"""Step rules: which groups may start, and which finished ones the next step trains on.

A rule is a pure function of a `View` of the ledger, so that runs can be played again from their
journal, and rules judged in a simulator (tests/bench/scheduling.py) before they are believed.

`max_staleness` is a bound that users rely on: a group that starts at weight version v is trained at
version v + max_staleness at the latest. Nothing is dropped for it, since what is dropped is long.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """State that a rule decides by.

    Attributes:
        step: steps that were published since the run's start, resume or return to a checkpoint.
        groups_per_step: groups of each step, P.
        started: for each live group that is not trained, what `step` was when it was first leased.
            Groups start in order of id, so the lowest are the oldest.
        finished: ids of those among them that have been delivered.
    """

    step: int
    groups_per_step: int
    started: Mapping[int, int]
    finished: Set[int]


class StepRule(Protocol):
    """A rule for steps. Pure."""

    def room(self, view: View) -> int:
        """Number of groups that may start now."""
        ...

    def choose(self, view: View) -> list[int] | None:
        """Ids of the next step in order, all finished; None: it waits."""
        ...

    def waited_for(self, view: View) -> list[int]:
        """Ids of the started groups that the next step waits for, in order."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """Groups in order of id: the next step waits for each of its own, and no other.

    Attributes:
        window: most groups between their start and published weights that contain them, at most
            (max_staleness + 1) P.
    """

    window: int

    def room(self, view: View) -> int:
        return self.window - len(view.started)

    def choose(self, view: View) -> list[int] | None:
        if len(view.finished) < view.groups_per_step:
            return None
        ids = self._next(view)
        return ids if set(ids) <= view.finished else None

    def waited_for(self, view: View) -> list[int]:
        return [group_id for group_id in self._next(view) if group_id not in view.finished]

    def _next(self, view: View) -> list[int]:
        return heapq.nsmallest(view.groups_per_step, view.started)


@dataclass(frozen=True, slots=True)
class DueFirst:
    """The oldest finished groups, as long as all that have started can still be trained in time.

    With v the version of the weights to be trained, those that stay behind and started at u or
    before must fit into the P (u + H - v) places of the steps that are left to them, for each u;
    otherwise the step waits. Of all choices the oldest finished leave least behind for every u, so
    no other could go on either. In order of age this always works out in the end, as no more than
    (H + 1) P groups are under way (by induction over v; `window` is at most that).

    Short groups overtake long ones that started with them. Nothing is dropped, so in the long run
    what goes in comes out and no length is preferred; but while the long groups under way become
    more than they were, after a start, the steps are of shorter ones: by one step's worth in all in
    the simulator, whether that is at once or after some steps in order.

    With H = 0 it is `InOrder`.

    Attributes:
        horizon: H, in weight versions.
        window: as of `InOrder`.
        late: groups that are overdue are not waited for: they are trained when they come.
    """

    horizon: int
    window: int
    late: bool = False

    def room(self, view: View) -> int:
        return self.window - len(view.started)

    def choose(self, view: View) -> list[int] | None:
        if len(view.finished) < view.groups_per_step:
            return None
        ids = _oldest_finished(view)
        return ids if self._late_after(view, ids) is None else None

    def waited_for(self, view: View) -> list[int]:
        unfinished = view.started.keys() - view.finished
        if len(view.finished) < view.groups_per_step:
            return sorted(unfinished)
        until = self._late_after(view, _oldest_finished(view))
        if until is None:
            return []
        return sorted(group_id for group_id in unfinished if view.started[group_id] <= until)

    def _late_after(self, view: View, chosen: list[int]) -> int | None:
        """The first start of which too many groups would be left behind by a step."""
        if self.late:
            return None
        counts = Counter(view.started.values())
        counts.subtract(view.started[group_id] for group_id in chosen)
        starts = sorted(counts)
        left_behind = accumulate(counts[start] for start in starts)
        for start, left in zip(starts, left_behind, strict=True):
            if left > view.groups_per_step * (start + self.horizon - view.step):
                return start
        return None


def _oldest_finished(view: View) -> list[int]:
    return heapq.nsmallest(view.groups_per_step, view.finished)
