"""Which prompt groups a set of weights contains: the memory that makes training exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distill.errors import CheckpointError


class TrainedGroups:
    """A set of group ids, stored as 'all below `watermark`' and the few beyond it.

    Groups are trained nearly in order, so the set stays small however long the run.
    """

    def __init__(self, watermark: int = 0, beyond: Iterable[int] = ()) -> None:
        self._watermark = watermark
        self._beyond = set(beyond)

    def __contains__(self, group_id: int) -> bool:
        return group_id < self._watermark or group_id in self._beyond

    def __len__(self) -> int:
        return self._watermark + len(self._beyond)

    def add(self, group_id: int) -> None:
        """Raises AssertionError on an id that is in the set: a group would be trained twice."""
        assert group_id not in self, f"group {group_id} would be trained twice"
        self._beyond.add(group_id)
        while self._watermark in self._beyond:
            self._beyond.remove(self._watermark)
            self._watermark += 1

    def to_json(self) -> dict[str, Any]:
        return {"watermark": self._watermark, "beyond": sorted(self._beyond)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainedGroups:
        """Raises CheckpointError if `value` is not what `to_json` writes."""
        try:
            state = cls(int(value["watermark"]), [int(group_id) for group_id in value["beyond"]])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"unreadable delivery state {value!r}") from error
        lowest = min(state._beyond, default=state._watermark + 1)
        if state._watermark < 0 or lowest <= state._watermark:
            raise CheckpointError(f"inconsistent delivery state {value!r}")
        return state
