"""Groups whole, with their tokens, in one process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distill.delivery import Taken
from distill.objective.tallies import outline
from distill.outlines import Fetched, GroupOutline, Place, TrajectorySource
from distill.types import TrajectoryGroup


def opened(
    source: TrajectorySource, outlines_P: Sequence[GroupOutline]
) -> tuple[list[TrajectoryGroup], Mapping[int, str]]:
    """The groups of these outlines; and of those that are lost why."""
    found, lost = source.trajectories([place for each in outlines_P for place in each.places])
    return [each.filled_from(found) for each in outlines_P if each.group_id not in lost], lost


class GroupsHere:
    """A `TrajectorySource` of groups that are in this process: those that were shown last."""

    def __init__(self) -> None:
        self._groups: dict[int, TrajectoryGroup] = {}

    def taken(self, groups_P: Sequence[TrajectoryGroup], **others: Any) -> Taken:
        """Those groups as a `Taken`, with its other fields."""
        self._groups = {group.group_id: group for group in groups_P}
        return Taken(groups_P=[outline(group) for group in groups_P], **others)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def trajectories(self, places: Sequence[Place], ahead: bool = False) -> Fetched:
        groups = self._groups
        return Fetched({at: groups[at.group_id].trajectories_G[at.member] for at in places}, {})

    def lose(self, ids: Collection[int], reason: str) -> None:
        raise AssertionError(f"groups {sorted(ids)} of this process are lost: {reason}")
