"""The set of prompt groups that some weights were trained on: the state behind exactly once.

A group id is the prompt's position in the run's seeded stream. Groups are trained in order of id,
but for those that were set aside because they could not be made; so a watermark and the set-aside
ids below it say all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from distill.errors import CheckpointError
from distill.types import TrajectoryGroup


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
    """A step's groups in order of id, and the reason of each id between them that was set aside."""

    groups_P: list[TrajectoryGroup]
    set_aside: dict[int, str]


class TrainedGroups:
    """The prompt groups that a set of weights accounts for: every id below `watermark`.

    Each was trained, but for those set aside. `group_id in trained` is true of the trained ones,
    and `len(trained)` counts them.
    """

    def __init__(self, watermark: int = 0, set_aside: Mapping[int, str] | None = None) -> None:
        """`set_aside`: the reason of each id below `watermark` that was not trained."""
        self._watermark = watermark
        self._set_aside = dict(sorted((set_aside or {}).items()))
        assert all(0 <= group_id < watermark for group_id in self._set_aside), (
            f"set aside {list(self._set_aside)}, which are not all below {watermark}"
        )

    @property
    def watermark(self) -> int:
        """The lowest id that is not accounted for."""
        return self._watermark

    @property
    def set_aside(self) -> Mapping[int, str]:
        return MappingProxyType(self._set_aside)

    def __contains__(self, group_id: int) -> bool:
        return 0 <= group_id < self._watermark and group_id not in self._set_aside

    def __len__(self) -> int:
        return self._watermark - len(self._set_aside)

    def __repr__(self) -> str:
        return f"TrainedGroups(watermark={self._watermark}, set_aside={self._set_aside})"

    def add(self, group_id: int) -> None:
        """Accounts for the next group, as trained.

        Raises:
            AssertionError: the id is accounted for already, or is not the next one.
        """
        self._account(group_id)

    def skip(self, group_id: int, reason: str) -> None:
        """Accounts for the next group, as set aside; raises what `add` does."""
        self._account(group_id)
        self._set_aside[group_id] = reason

    def _account(self, group_id: int) -> None:
        assert group_id >= self._watermark, f"group {group_id} would be trained twice"
        assert group_id == self._watermark, (
            f"group {group_id} is out of order: {self._watermark} is next"
        )
        self._watermark += 1

    def to_json(self) -> dict[str, Any]:
        set_aside = {str(group_id): reason for group_id, reason in self._set_aside.items()}
        return {"watermark": self._watermark, "set_aside": set_aside}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainedGroups:
        """Raises CheckpointError if `value` is not what `to_json` writes."""
        try:
            watermark = int(value["watermark"])
            set_aside = {int(group_id): reason for group_id, reason in value["set_aside"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"unreadable delivery state {value!r}") from error
        below = all(0 <= group_id < watermark for group_id in set_aside)
        if watermark < 0 or not below or not all(isinstance(r, str) for r in set_aside.values()):
            raise CheckpointError(f"inconsistent delivery state {value!r}")
        return cls(watermark, set_aside)
