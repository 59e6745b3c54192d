"""Places of a run's actors, as those who create actors see them."""

from __future__ import annotations

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

    def add(self, role: str) -> int:
        """One more member; returns its index."""
        ...

    def remove(self, role: str, index: int) -> None:
        """Frees an added member's place."""
        ...


class LocalPlaces:
    """The places of a run with `local=True`: this process has room, and pools keep their size."""

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        return {}

    def span(self, role: str) -> int:
        return 1

    def ready(self, role: str, index: int) -> bool:
        return True

    def add(self, role: str) -> int:
        raise AssertionError(f"a local run adds no {role}")

    def remove(self, role: str, index: int) -> None:
        pass
