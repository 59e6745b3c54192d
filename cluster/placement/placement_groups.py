"""Placement groups of a run: a bundle of resources per actor, reserved before actors are created.

    placement = Placement(demands, name=...)
    placement.reserve(deadline_s=..., print_line=..., poll=...)  all of them, or an error
    actor_class.options(**placement.options("policy", 0))  in its bundle
    actor_class.options(**placement.options("policy", 0, 1))  on the second of its nodes
    index = placement.add("policy")                        another member, perhaps on a future node
    placement.lacking("policy", index)                     "" once its bundle has a node
    placement.remove("policy", index)
    placement.release()

A member that restarts stays in its bundle. Ray moves the bundles of a lost node to another node
with free resources, and restarts their members there. Until Ray detects the loss, a new member is
sent to the dead node, and dies with it, so it needs restarts.

A member on several nodes has its own group, with one bundle per node (STRICT_SPREAD). A member that
shares several bundles of a node with members of other roles is in one group with them
(STRICT_PACK): a policy engine with two GPUs and the two learner workers there, or engines of
several teachers that take turns on two GPUs. The same holds for members that must be on one node,
such as the learner workers of one replica.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement.connect import autoscales
from cluster.placement.resources import (
    PlannedGroup,
    ResourceDemand,
    describe,
    lacking_of,
    sum_of,
)
from distill.errors import ConfigError

_POLL_S, _FIRST_POLL_S = 0.5, 0.05
# Interval between equal lines of `print_line`, seconds.
_SAY_EVERY_S = 10.0
# Delay before the first line, seconds. If there are free resources, Ray assigns them sooner.
_SAY_FROM_S = 1.0
# Longest age of a cached table of a placement group, seconds.
_TABLE_S = 0.4
# Time that a run holds a part of its groups, and time that it then releases them, seconds. Ray
# retries a waiting group within a second. The first is random, so that one of two runs is first.
_HELD_S, _GIVEN_BACK_S = (30.0, 60.0), 3.0


@dataclass(frozen=True, slots=True, eq=False)
class _Sharers:
    """Roles whose members of one index share bundles."""

    demands: tuple[ResourceDemand, ...]

    @property
    def name(self) -> str:
        """Name of their group."""
        return "+".join(demand.name for demand in self.demands)

    @property
    def together(self) -> int:
        """Number of consecutive bundles that must be on one node."""
        return math.lcm(*(n for demand in self.demands for n in (demand.span, demand.together)))

    def place(self, number: int) -> tuple[str, int]:
        """Group of a shared bundle, and its index there. There is one group, or one per node."""
        if self.together == 1:
            return self.name, number
        return _own_group(self.name, number // self.together), number % self.together

    def bundle(self, number: int) -> dict[str, float]:
        return sum_of(d.needed for d in self.demands if number < d.count * d.span)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Bundles of a member: `many` of them in `group`, from the index `bundle` on."""

    group: PlacementGroup
    bundle: int
    many: int = 1


class Placement:
    """The bundles of one run.

    A role's initial members are placed together: all or none, on as few nodes as possible, because
    weights are pushed through shared memory to engines on the learner's node. The roles of each
    tuple in `colocate` share bundles: their members of the same index are on one node. Member i
    with a span shares the bundles of the other roles' members from i * span to (i + 1) * span - 1.
    """

    def __init__(
        self,
        demands: Sequence[ResourceDemand],
        *,
        colocate: Sequence[Sequence[str]] = (),
        name: str,
    ) -> None:
        self._demands = {demand.name: demand for demand in demands}
        unknown = [role for roles in colocate for role in roles if role not in self._demands]
        assert len(self._demands) == len(demands) and not unknown, (list(self._demands), unknown)
        # By role. A role with members that must be together has its own shared bundles.
        self._sharers = {d.name: _Sharers((d,)) for d in demands if d.needed and d.together > 1}
        for roles in colocate:
            together = _Sharers(tuple(d for d in demands if d.name in roles and d.needed))
            self._sharers |= {demand.name: together for demand in together.demands}
        self._name = name
        self._groups: dict[str, PlacementGroup] = {}
        self._bundles: dict[tuple[str, int], _Bundle] = {}
        self._tables: dict[Any, dict[str, Any]] = {}
        self._tables_read = 0.0
        self._next_index = {demand.name: demand.count for demand in demands}
        self._free: defaultdict[str, list[int]] = defaultdict(list)  # reserved, but without member

    def reserve(
        self, *, deadline_s: float, print_line: Callable[[str], None], poll: Callable[[], None]
    ) -> None:
        """Reserve the bundles of all initial members. If this fails, no bundle stays reserved.

        Args:
            print_line: called with a line about the roles that wait for resources.
            poll: called twice a second; it may raise.

        Raises:
            ConfigError: the cluster is too small, or had no free resources within the deadline.
        """
        try:
            self._require_possible()
            self._create_all()
            self._wait(deadline_s, print_line, poll)
        except BaseException:
            self.release()
            raise

    def options(self, role: str, index: int, part: int = 0) -> dict[str, Any]:
        """Arguments for `actor_class.options`: resources, and the member's bundle number `part`."""
        resources = dict(self._demands[role].resources)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
        }
        if resources:
            options["resources"] = resources
        if self._demands[role].needed:
            placed = self._bundles[role, index]
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placed.group, placement_group_bundle_index=placed.bundle + part
            )
        return options

    def span(self, role: str) -> int:
        """Number of bundles of one node that a member of this role shares with others."""
        return self._demands[role].span

    def add(self, role: str) -> int:
        """Add a member; return its index.

        It gets the bundle of a removed initial member, or a new group, which may not be placed yet.
        """
        if self._free[role]:
            return self._free[role].pop()
        index = self._next_index[role]
        self._next_index[role] += 1
        demand = self._demands[role]
        assert demand.span == 1, f"{role} shares the bundles of other roles, which are all taken"
        if demand.needed:
            name = _own_group(role, index)
            self._groups[name] = self._create(name, PlannedGroup.of_one(demand))
            self._bundles[role, index] = _Bundle(self._groups[name], 0, demand.nodes)
        return index

    def lacking(self, role: str, index: int) -> str:
        """Needed resources, and the cluster's, if the member's bundle has no node; else empty.

        Bundles of a lost node have none until they are moved.
        """
        if not self._demands[role].needed:
            return ""
        if (placed := self._bundles.get((role, index))) is not None:
            alone = placed.bundle if placed.many == 1 else None
            if _is_placed(self._table(placed.group), alone):
                return ""
        return f"{self._demands[role].each}: {_available_resources()}"

    def _table(self, group: PlacementGroup) -> dict[str, Any]:
        """Table of a group, cached briefly: all members of a lost node need the same table."""
        now = time.monotonic()
        if now - self._tables_read > _TABLE_S:
            self._tables_read = now
            self._tables.clear()
        if group.id not in self._tables:
            self._tables[group.id] = placement_group_table(group)
        return self._tables[group.id]

    def nodes(self, *roles: str) -> list[str]:
        """Ids of the nodes with bundles of these roles."""
        found: set[str] = set()
        for (role, _), placed in self._bundles.items():
            if role in roles:
                nodes = placement_group_table(placed.group)["bundles_to_node_id"]
                found |= {nodes[placed.bundle + i] for i in range(placed.many)} - {""}
        return sorted(found)

    def remove(self, role: str, index: int) -> None:
        """Free the bundle of an added member, and kill the member if it still runs.

        The bundle of an initial member stays reserved until `release`, because Ray frees only whole
        groups, and is reused by the next `add`.
        """
        if index < self._demands[role].count:
            self._free[role].append(index)
            return
        if (group := self._groups.pop(_own_group(role, index), None)) is not None:
            del self._bundles[role, index]
            remove_placement_group(group)

    def release(self) -> None:
        """Free all bundles, and kill actors that still run in them."""
        groups, self._groups = self._groups, {}
        self._bundles.clear()
        for group in groups.values():
            remove_placement_group(group)

    def _create_all(self) -> None:
        for name, group in self._planned().items():
            self._groups[name] = self._create(name, group)
        self._assign_bundles()

    def _create(self, name: str, planned: PlannedGroup) -> PlacementGroup:
        strategy = "PACK"
        if planned.apart or planned.together:
            strategy = "STRICT_SPREAD" if planned.apart else "STRICT_PACK"
        return placement_group(planned.bundles, strategy=strategy, name=f"{self._name}/{name}")

    def _planned(self) -> dict[str, PlannedGroup]:
        """Groups of the initial members, by name."""
        planned: dict[str, PlannedGroup] = {}
        for demand in self._demands.values():
            if not (demand.count and demand.needed) or demand.name in self._sharers:
                continue
            if demand.nodes == 1:
                planned[demand.name] = PlannedGroup(demand.name, [demand.needed] * demand.count)
                continue
            for index in range(demand.count):
                planned[_own_group(demand.name, index)] = PlannedGroup.of_one(demand)
        for together in dict.fromkeys(self._sharers.values()):
            assert all(demand.nodes == 1 for demand in together.demands), together.name
            for i in range(max(demand.count * demand.span for demand in together.demands)):
                name, _ = together.place(i)
                group = PlannedGroup(together.name, [], together=together.together > 1)
                planned.setdefault(name, group).bundles.append(together.bundle(i))
        # Groups that need much of one node first, before others take parts of it.
        return dict(sorted(planned.items(), key=lambda item: not item[1].together))

    def _assign_bundles(self) -> None:
        for demand in self._demands.values():
            if not demand.needed:
                continue
            for index in range(demand.count):
                name, first = demand.name, index
                if (together := self._sharers.get(demand.name)) is not None:
                    name, first = together.place(index * demand.span)
                elif demand.nodes > 1:
                    name, first = _own_group(demand.name, index), 0
                self._bundles[demand.name, index] = _Bundle(
                    self._groups[name], first, demand.bundles
                )

    def _wait(
        self, deadline_s: float, print_line: Callable[[str], None], poll: Callable[[], None]
    ) -> None:
        started = time.monotonic()
        held_until = random.uniform(*_HELD_S)
        printed_at, printed = float("-inf"), ""
        planned = self._planned()
        while unplaced := [
            name for name, g in self._groups.items() if not _is_placed(placement_group_table(g))
        ]:
            poll()
            waited = time.monotonic() - started
            who = self._describe_roles(planned[name] for name in unplaced)
            line = f"waiting for {who}: {_available_resources()}"
            if waited > deadline_s:
                raise ConfigError(
                    f"still {line}, after {deadline_s:.0f} s. Request fewer members or less for "
                    "each, add nodes, wait until other jobs end (ray list actors, ray list "
                    "placement-groups), or raise start_deadline_s",
                    field="cluster.start_deadline_s",
                )
            is_new = line != printed or waited - printed_at >= _SAY_EVERY_S
            if is_new and waited >= _SAY_FROM_S:
                print_line(f"{line}; {waited:.0f} s of {deadline_s:.0f} s")
                printed_at, printed = waited, line
            if waited > held_until and len(unplaced) < len(self._groups):
                if not self._lacking():  # otherwise nodes are missing, and no other run holds them
                    self._give_back(poll)
                held_until = time.monotonic() - started + random.uniform(*_HELD_S)
            time.sleep(_FIRST_POLL_S if waited < _SAY_FROM_S else _POLL_S)

    def _give_back(self, poll: Callable[[], None]) -> None:
        """Release the placed groups, and create all groups again after a pause.

        Otherwise two runs that start together could each hold resources that the other waits for.
        """
        self.release()
        until = time.monotonic() + _GIVEN_BACK_S
        while time.monotonic() < until:
            poll()
            time.sleep(_POLL_S)
        self._create_all()

    def _describe_roles(self, groups: Iterable[PlannedGroup]) -> str:
        """Roles of these groups, with their resources."""
        names: list[str] = []
        for group in groups:
            together = self._shared_by(group)
            names += [demand.name for demand in together.demands] if together else [group.role]
        return ", ".join(str(self._demands[name]) for name in dict.fromkeys(names))

    def _require_possible(self) -> None:
        """Raise ConfigError if the idle nodes could not hold the roles, without an autoscaler."""
        lacking = self._lacking()
        if not lacking or autoscales():
            return
        planned = self._planned()
        who = self._describe_roles(planned[name] for name in lacking)
        total = sum_of(chain(*(group.bundles for group in planned.values())))
        raise ConfigError(
            f"the Ray cluster cannot hold {who}: {_available_resources()}, and it has no "
            f"autoscaler. The run needs {describe(total)} in all, and each member's resources on "
            "one node. Request fewer members or less for each (dry_run=True shows them), or add "
            f"nodes{self._by_turns()}"
        )

    def _lacking(self) -> list[str]:
        """Names of the groups that the running nodes could not hold even if they were idle."""
        return lacking_of(self._planned(), [node["Resources"] for node in _nodes()])

    def _shared_by(self, group: PlannedGroup) -> _Sharers | None:
        return next((s for s in self._sharers.values() if s.name == group.role), None)

    def _by_turns(self) -> str:
        """Remedy if each pair of roles has two GPUs, and could share one; else empty."""
        gpus = [[d.needed.get("GPU", 0) for d in s.demands] for s in self._sharers.values()]
        if not any(min(needed) >= 1 for needed in gpus if len(needed) > 1):
            return ""
        return (
            "; gpus_per_actor=0.5, with as many policy.engines as learner.workers, puts each pair "
            "on one GPU"
        )


def _own_group(role: str, index: int) -> str:
    """Name of a group with only one member."""
    return f"{role}-{index}"


def _is_placed(table: Mapping[str, Any], bundle: int | None = None) -> bool:
    """True if a bundle has a node, according to the group's table. None: all of its bundles."""
    if bundle is None or table.get("state") != "RESCHEDULING":
        return table.get("state") == "CREATED"
    return bool(table["bundles_to_node_id"][bundle])


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _available_resources() -> str:
    nodes = _nodes()
    total = sum_of(node["Resources"] for node in nodes)
    free = ray.available_resources()
    has = ", ".join(f"{total.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    idle = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU") if total.get(name))
    return (
        f"the cluster has {has} on {len(nodes)} node{'s' * (len(nodes) != 1)}, "
        f"{idle or 'nothing'} free"
    )
