"""Interface to the places of a run's actors, for code that creates actors."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol


class Places(Protocol):
    """A place for each actor, by role and index: on a Ray cluster, or in this process."""

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        """Arguments for `actor_class.options`: resources, and the member's place number `part`."""
        ...

    def span(self, role: str) -> int:
        """Number of places on one node that a member of this role shares with others."""
        ...

    def ready(self, role: str, index: int) -> bool:
        """True if the member's place has a node."""
        ...

    def lacking(self, role: str, index: int) -> str:
        """Message for a member whose place has no node: needed and available resources."""
        ...

    def add(self, role: str) -> int:
        """Add a member; return its index."""
        ...

    def remove(self, role: str, index: int) -> None:
        """Free the place of an added member."""
        ...


def place_of(places: Places, role: str, no_progress_s: float) -> dict[str, Any]:
    """Arguments `placed` and `lacking` for the `ActorSpec` of a role.

    `no_progress_s`: deadline of the run, seconds.
    """

    def lacking(index: int) -> str:
        return (
            f"{places.lacking(role, index)}. The run fails after {no_progress_s:g} s without "
            "progress (no_progress_s)"
        )

    return {"placed": partial(places.ready, role), "lacking": lacking}


class LocalPlaces:
    """Places of a run with `local=True`: all actors are in this process, and pools do not grow."""

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        return {}

    def span(self, role: str) -> int:
        return 1

    def ready(self, role: str, index: int) -> bool:
        return True

    def lacking(self, role: str, index: int) -> str:
        raise AssertionError(f"this process has room for {role} {index}")

    def add(self, role: str) -> int:
        raise AssertionError(f"a local run adds no {role}")

    def remove(self, role: str, index: int) -> None:
        pass
