"""The set of prompt groups that some weights were trained on: the state behind exactly once.

A group id is the prompt's position in the run's seeded stream. Steps take groups about in order of
id, and set aside those that could not be made; so a watermark, the set-aside ids below it and the
few trained ids above it say all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from distill.errors import CheckpointError
from distill.outlines import GroupOutline

# Which groups a step takes (cluster/queue/step_rules.py), and what becomes of those that cannot be
# trained in time.
StepRuleName = Literal["in_order", "due_first"]
Overdue = Literal["wait", "late", "again"]
# Why groups are set aside that are not at fault: a step has passed over them.
CONSTANT_REWARD = "all members have the same reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Leave to work on one group.

    Attributes:
        group_id: the prompt's position in the run's stream.
        attempt: 1, 2, ... of this group in this epoch.
        epoch: counts the starts of the run and the learner's returns to a checkpoint; what belongs
            to an older one is dropped.
    """

    group_id: int
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """A step's groups in order of id, by their outlines.

    Attributes:
        set_aside: ids that are accounted for with them, and were not trained: why not.
        overdue: groups that are older than the run's `max_staleness`.
        begun_again: how often its groups were begun again in all, since they were overdue.
        replaced: groups of constant reward that the step passes over, and that reward.
        start_max: weight versions since the first lease of the group that was leased first; None:
            nobody knows.
    """

    groups_P: list[GroupOutline]
    set_aside: dict[int, str]
    overdue: int = 0
    begun_again: int = 0
    replaced: Mapping[int, float] = field(default_factory=dict)
    start_max: int | None = None


class TrainedGroups:
    """The prompt groups that a set of weights accounts for. Immutable.

    Every id below `watermark` was trained, but for those set aside; and so were those in `above`.
    `group_id in trained` is true of the trained ones, and `len(trained)` counts them.
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
            above: trained ids above `watermark`, which is not accounted for itself.
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

    __hash__ = None  # type: ignore[assignment]  # as of a set

    def __repr__(self) -> str:
        above = f", above={sorted(self._above)}" if self._above else ""
        return f"TrainedGroups(watermark={self._watermark}, set_aside={self._set_aside}{above})"

    def after(self, group_ids: Collection[int], set_aside: Mapping[int, str]) -> TrainedGroups:
        """What weights account for that were trained on `group_ids` besides.

        Args:
            set_aside: reasons of groups that will not be trained. Those that the watermark passes
                are accounted for; it stands after a trained group, and does not pass the others.

        Raises:
            AssertionError: a group is accounted for already, or is set aside at the same time.
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
        """Ids that are trained here and were not in `earlier`, in order."""
        newer = range(earlier.watermark, self._watermark)
        ids = {i for i in newer if i not in self._set_aside} | self._above
        return sorted(i for i in ids if i not in earlier)

    def to_json(self) -> dict[str, Any]:
        set_aside = {str(group_id): reason for group_id, reason in self._set_aside.items()}
        above = {"above": sorted(self._above)} if self._above else {}
        return {"watermark": self._watermark, "set_aside": set_aside, **above}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainedGroups:
        """Raises CheckpointError if `value` is not what `to_json` writes."""
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
