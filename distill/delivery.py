"""The set of prompt groups that some weights were trained on: the state for exactly-once training.

A group id is the prompt's position in the run's seeded stream. Steps take groups approximately in
order of id, and set aside those that could not be made. A watermark, the set-aside ids below it and
the few trained ids above it therefore describe the whole set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from distill.errors import CheckpointError
from distill.outlines import GroupOutline

# Rule for the groups that a step takes (cluster/queue/step_rules.py), and for those that cannot be
# trained in time.
StepRuleName = Literal["in_order", "due_first"]
OnStale = Literal["wait", "train_late", "restart"]
# Reason for setting aside a group without a fault, which a step has passed over.
CONSTANT_REWARD = "all members have the same reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to work on one group.

    Attributes:
        group_id: the prompt's position in the run's stream.
        attempt: number of the attempt at this group in this epoch, from 1.
        epoch: counts the starts of the run and the learner's returns to a checkpoint; results of an
            older epoch are dropped.
    """

    group_id: int
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """Outlines of a step's groups, in order of id.

    Attributes:
        set_aside: ids accounted for with these groups but not trained, with the reasons.
        overdue: number of groups that are older than the run's `max_staleness`.
        begun_again: total number of restarts of its groups because they were overdue.
        replaced: reward of each group of constant reward that the step passes over, by group id.
        start_max: weight versions since the first lease of the group that was leased first; None:
            unknown.
    """

    groups_P: list[GroupOutline]
    set_aside: dict[int, str]
    overdue: int = 0
    begun_again: int = 0
    replaced: Mapping[int, float] = field(default_factory=dict)
    start_max: int | None = None


class TrainedGroups:
    """The prompt groups that a set of weights accounts for. Immutable.

    Every id below `watermark` was trained, except those set aside, and so were those in `above`.
    `group_id in trained` is True for the trained ids, and `len(trained)` counts them.
    """

    def __init__(
        self,
        watermark: int = 0,
        set_aside: Mapping[int, str] | None = None,
        above: Collection[int] = (),
    ) -> None:
        """
        Args:
            set_aside: the reason of each id below `watermark` that was not trained.
            above: trained ids above `watermark`; `watermark` itself is not accounted for.
        """
        self._watermark = watermark
        self._set_aside = dict(sorted((set_aside or {}).items()))
        self._above = frozenset(above)
        assert all(0 <= group_id < watermark for group_id in self._set_aside), (
            f"set aside {list(self._set_aside)}, which are not all below {watermark}"
        )
        assert all(group_id > watermark for group_id in self._above), (
            f"trained {sorted(self._above)}, which are not all above {watermark}"
        )

    @property
    def watermark(self) -> int:
        """The lowest id that is not accounted for."""
        return self._watermark

    @property
    def set_aside(self) -> Mapping[int, str]:
        return MappingProxyType(self._set_aside)

    @property
    def above(self) -> frozenset[int]:
        """Trained ids above the watermark."""
        return self._above

    def __contains__(self, group_id: int) -> bool:
        below = 0 <= group_id < self._watermark and group_id not in self._set_aside
        return below or group_id in self._above

    def __len__(self) -> int:
        return self._watermark - len(self._set_aside) + len(self._above)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedGroups) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a set

    def __repr__(self) -> str:
        above = f", above={sorted(self._above)}" if self._above else ""
        return f"TrainedGroups(watermark={self._watermark}, set_aside={self._set_aside}{above})"

    def after(self, group_ids: Collection[int], set_aside: Mapping[int, str]) -> TrainedGroups:
        """State after training on `group_ids` as well.

        Args:
            set_aside: reasons of groups that will not be trained. Those that the watermark passes
                are accounted for. The watermark stops after a trained group, and does not pass the
                set-aside groups behind it.

        Raises:
            AssertionError: a group is already accounted for, or is set aside as well.
        """
        for group_id in group_ids:
            known = group_id in self or group_id < self._watermark or group_id in set_aside
            assert not known, f"group {group_id} would be trained twice, or was set aside"
        assert len(set(group_ids)) == len(group_ids), f"groups {group_ids} name one twice"
        trained = self._above.union(group_ids)
        end = at = self._watermark
        while at in trained or at in set_aside:
            at += 1
            if at - 1 in trained:
                end = at
        passed = {i: set_aside[i] for i in range(self._watermark, end) if i not in trained}
        return TrainedGroups(end, self._set_aside | passed, [i for i in trained if i >= end])

    def since(self, earlier: TrainedGroups) -> list[int]:
        """Ids that are trained here but not in `earlier`, in order."""
        newer = range(earlier.watermark, self._watermark)
        ids = {i for i in newer if i not in self._set_aside} | self._above
        return sorted(i for i in ids if i not in earlier)

    def to_json(self) -> dict[str, Any]:
        set_aside = {str(group_id): reason for group_id, reason in self._set_aside.items()}
        above = {"above": sorted(self._above)} if self._above else {}
        return {"watermark": self._watermark, "set_aside": set_aside, **above}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainedGroups:
        """Inverse of `to_json`.

        Raises:
            CheckpointError: `value` was not written by `to_json`.
        """
        try:
            watermark = int(value["watermark"])
            set_aside = {int(group_id): reason for group_id, reason in value["set_aside"].items()}
            above = [int(group_id) for group_id in value.get("above", [])]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"unreadable delivery state {value!r}") from error
        in_place = all(0 <= i < watermark for i in set_aside) and all(i > watermark for i in above)
        if watermark < 0 or not in_place or not all(isinstance(r, str) for r in set_aside.values()):
            raise CheckpointError(f"inconsistent delivery state {value!r}")
        return cls(watermark, set_aside, above)
