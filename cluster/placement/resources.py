"""Resource demands of roles, and a check for demands that certainly do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]

# Ray's resources are multiples of 1e-4; sums of floats are not exact.
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """Resource demand of the members of a role.

    Attributes:
        count: number of members.
        resources: CPU, GPU or custom resources of one bundle.
        nodes: number of nodes that one member uses, with a bundle on each.
        span: number of bundles of one node that a member shares with members of other roles.
        together: number of consecutive members that must be on one node; 1: any node.
    """

    name: str
    count: int
    resources: Resources
    nodes: int = 1
    span: int = 1
    together: int = 1

    @property
    def bundles(self) -> int:
        """Number of bundles of one member."""
        return self.nodes * self.span

    @property
    def needed(self) -> dict[str, float]:
        return {name: amount for name, amount in self.resources.items() if amount}

    @property
    def each(self) -> str:
        """Resources of one member, as text."""
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        span = f"{self.span} x " if self.span > 1 else ""
        return f"{nodes}{span}{describe(self.resources)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.count} x {self.each})"


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Bundles of one placement group, for a role or for several roles that share them.

    Attributes:
        apart: each bundle must be on a different node.
        together: all bundles must be on one node.
    """

    role: str
    bundles: list[dict[str, float]]
    apart: bool = False
    together: bool = False

    @classmethod
    def of_one(cls, demand: ResourceDemand) -> PlannedGroup:
        """Group for one member."""
        return cls(demand.name, [demand.needed] * demand.nodes, apart=demand.nodes > 1)


def describe(resources: Resources) -> str:
    """Resources as text, '1 CPU, 0.5 GPU'; 'nothing' if there are none."""
    order = sorted(resources.items(), key=lambda item: (item[0] not in ("CPU", "GPU"), item[0]))
    return ", ".join(f"{amount:g} {name}" for name, amount in order if amount) or "nothing"


def lacking_of(planned: Mapping[str, PlannedGroup], nodes: Sequence[Resources]) -> list[str]:
    """Names of groups that certainly do not fit on these nodes, even idle, after earlier groups.

    This is certain if the nodes hold too few of the bundles, or if the sum exceeds the cluster. If
    bundles of several sizes can be packed in other cases is left to Ray.
    """
    total, spent = sum_of(nodes), {}
    lacking = []
    for name, group in planned.items():
        bundles = group.bundles
        spent = sum_of([spent, *bundles])
        smallest = _common(bundles)
        most = 1 if group.apart else float("inf")
        places = sum(min(most, _times(node, smallest)) for node in nodes)
        on_one_node = [sum_of(bundles)] if group.together else bundles
        too_large = not all(any(_holds(node, part) for node in nodes) for part in on_one_node)
        if too_large or places < len(bundles) or not _holds(total, spent):
            lacking.append(name)
    return lacking


def _common(bundles: Sequence[Resources]) -> dict[str, float]:
    """Minimum over the bundles of each resource that all of them need."""
    return {
        name: min(bundle.get(name, 0) for bundle in bundles)
        for name in bundles[0]
        if all(bundle.get(name) for bundle in bundles)
    }


def _times(node: Resources, bundle: Resources) -> float:
    """Number of such bundles that fit on the node."""
    if not bundle:
        return float("inf")
    return min((node.get(name, 0) + _CLOSE) // amount for name, amount in bundle.items())


def _holds(room: Resources, wanted: Resources) -> bool:
    return all(room.get(name, 0) + _CLOSE > amount for name, amount in wanted.items())


def sum_of(parts: Iterable[Resources]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total
