"""Places of a run's actors, as those who create actors see them."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol


class Places(Protocol):
    """A place for each actor, by its role and index: on a Ray cluster, or in this process."""

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        """Arguments for `actor_class.options`: resources, and one of a member's places."""
        ...

    def span(self, role: str) -> int:
        """Number of places on one node that a member of this role shares with others."""
        ...

    def ready(self, role: str, index: int) -> bool:
        """True if the member's place has a node."""
        ...

    def lacking(self, role: str, index: int) -> str:
        """Resources that a member whose place has no node waits for, and those that there are."""
        ...

    def add(self, role: str) -> int:
        """One more member; returns its index."""
        ...

    def remove(self, role: str, index: int) -> None:
        """Frees an added member's place."""
        ...


def place_of(places: Places, role: str, no_progress_s: float) -> dict[str, Any]:
    """`placed` and `lacking` of a role's `ActorSpec`; `no_progress_s` is the run's deadline."""

    def lacking(index: int) -> str:
        return (
            f"{places.lacking(role, index)}. The run fails once nothing has got on for "
            f"{no_progress_s:g} s (no_progress_s)"
        )

    return {"placed": partial(places.ready, role), "lacking": lacking}


class LocalPlaces:
    """The places of a run with `local=True`: this process has room, and pools keep their size."""

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
