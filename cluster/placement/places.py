"""Places of a run's actors, for code that creates actors without importing Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from cluster.placement.placement_groups import Placement


# Places of a run's actors, by role and index: on a Ray cluster, or in this process.
Places: TypeAlias = "Placement | LocalPlaces"


def lacking_in(places: Places, role: str, no_progress_s: float) -> Callable[[int], str]:
    """`ActorSpec.lacking` of a role. `no_progress_s`: deadline of the run, seconds."""

    def lacking(index: int) -> str:
        fails = f"The run fails after {no_progress_s:g} s without progress (no_progress_s)"
        what = places.lacking(role, index)
        return f"{what}. {fails}" if what else ""

    return lacking


class LocalPlaces:
    """Places of a run with `local=True`: all actors are in this process, and pools do not grow.

    For the methods see `Placement`.
    """

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        return {}

    def span(self, role: str) -> int:
        return 1

    def lacking(self, role: str, index: int) -> str:
        return ""

    def add(self, role: str) -> int:
        raise AssertionError(f"a local run adds no {role}")

    def remove(self, role: str, index: int) -> None:
        pass
