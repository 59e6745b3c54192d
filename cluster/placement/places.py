"""Interface to the places of a run's actors, for code that creates actors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Places(Protocol):
    """A place for each actor, by role and index: on a Ray cluster, or in this process."""

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        """Arguments for `actor_class.options`: resources, and the member's place number `part`."""
        ...

    def span(self, role: str) -> int:
        """Number of places on one node that a member of this role shares with others."""
        ...

    def lacking(self, role: str, index: int) -> str:
        """Needed and available resources, if the member's place has no node; else empty."""
        ...

    def add(self, role: str) -> int:
        """Add a member; return its index."""
        ...

    def remove(self, role: str, index: int) -> None:
        """Free the place of an added member."""
        ...


def lacking_in(places: Places, role: str, no_progress_s: float) -> Callable[[int], str]:
    """`ActorSpec.lacking` of a role. `no_progress_s`: deadline of the run, seconds."""

    def lacking(index: int) -> str:
        fails = f"The run fails after {no_progress_s:g} s without progress (no_progress_s)"
        what = places.lacking(role, index)
        return f"{what}. {fails}" if what else ""

    return lacking


class LocalPlaces:
    """Places of a run with `local=True`: all actors are in this process, and pools do not grow."""

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
