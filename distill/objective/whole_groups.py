"""Whole groups, including their tokens, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distill.objective.sums import meta_of
from distill.records import Fetched, StepGroups, TrajectoryGroupMeta, TrajectoryId, TrajectorySource
from distill.types import TrajectoryGroup


def opened(
    source: TrajectorySource, metas_P: Sequence[TrajectoryGroupMeta]
) -> tuple[list[TrajectoryGroup], Mapping[int, str]]:
    """Fetch the groups of this metadata from `source`.

    Returns:
        The groups that were found, and the reasons for the lost groups, by group id.
    """
    found, lost = source.trajectories([place for each in metas_P for place in each.places])
    whole = [
        each.group([found[place] for place in each.places])
        for each in metas_P
        if each.group_id not in lost
    ]
    return whole, lost


class LocalGroups:
    """`TrajectorySource` of groups in this process: the groups of the last call of `taken`."""

    def __init__(self) -> None:
        self._groups: dict[int, TrajectoryGroup] = {}

    def taken(self, groups_P: Sequence[TrajectoryGroup], **others: Any) -> StepGroups:
        """Record of a step that trains these groups; `others` are its other fields."""
        self._groups = {group.group_id: group for group in groups_P}
        return StepGroups(
            group_ids=[group.group_id for group in groups_P],
            groups_P=[meta_of(group) for group in groups_P],
            **others,
        )

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        groups = self._groups
        return Fetched({at: groups[at.group_id].trajectories_G[at.member] for at in places}, {})

    def mark_lost(self, lost: Mapping[int, str]) -> None:
        raise AssertionError(f"groups of this process are lost: {lost}")
