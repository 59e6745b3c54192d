"""Resources of members and nodes: what a role needs, and what certainly does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]

# Resources are multiples of a ten-thousandth in Ray; sums of floats are not.
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """Members that need the same: `resources` (CPU, GPU, or custom) are of one of them.

    One that takes several `nodes` needs these resources on each. One with a `span` needs them in so
    many bundles of one node, each of which it shares with members of other roles. Consecutive
    members, so many `together`, are on one node; with 1, each is wherever there is room.
    """

    name: str
    count: int
    resources: Resources
    nodes: int = 1
    span: int = 1
    together: int = 1

    @property
    def bundles(self) -> int:
        """Number of bundles that one member takes."""
        return self.nodes * self.span

    @property
    def needed(self) -> dict[str, float]:
        return {name: amount for name, amount in self.resources.items() if amount}

    @property
    def each(self) -> str:
        """Resources of one member, for people."""
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        span = f"{self.span} x " if self.span > 1 else ""
        return f"{nodes}{span}{describe(self.resources)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.count} x {self.each})"


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Bundles of one group, for a role, or for several that share them.

    Attributes:
        apart: each on a node of its own.
        together: all on one node.
    """

    role: str
    bundles: list[dict[str, float]]
    apart: bool = False
    together: bool = False

    @classmethod
    def of_one(cls, demand: ResourceDemand) -> PlannedGroup:
        """For one member alone."""
        return cls(demand.name, [demand.needed] * demand.nodes, apart=demand.nodes > 1)


def describe(resources: Resources) -> str:
    """'1 CPU, 0.5 GPU'; 'nothing' where nothing is needed."""
    order = sorted(resources.items(), key=lambda item: (item[0] not in ("CPU", "GPU"), item[0]))
    return ", ".join(f"{amount:g} {name}" for name, amount in order if amount) or "nothing"


def lacking_of(planned: Mapping[str, PlannedGroup], nodes: Sequence[Resources]) -> list[str]:
    """Groups that certainly do not fit on these nodes, idle, beside the groups before them.

    Certain: the nodes hold too few such bundles, or the sum exceeds the cluster. Whether bundles of
    many sizes can be packed in any other case is for Ray to find out.
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
    """Resources that every one of the bundles takes at least."""
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
