"""Plan that `dry_run` prints: roles, their resources and memory, and the weight push.

describe_layout(config)     the roles of a run -> RolePlan -> a table, and sums
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from actors.sglang.memory import served_bytes
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.handles.node import starts_here
from cluster.placement.gpu_plan import gpu_lines
from cluster.placement.push_plan import describe_push
from cluster.placement.resources import ResourceDemand, describe, sum_of
from cluster.placement.roles import (
    LEARNER,
    REWARD,
    colocated,
    engines_of,
    placed_roles,
    pool_bounds,
    turn_roles,
    unplaced_roles,
)
from distill.gpu import readable
from distill.models.loading import weight_files
from learner.config import TOKEN_BUDGET
from learner.memory import frozen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Resources and memory of the members of a role.

    Attributes:
        demand: number of members at the start, and the resources of one.
        most: largest number of members.
        memory: bytes of one member; 0: small; None: unknown.
        note: further contents of its memory, whose size is not included.
    """

    demand: ResourceDemand
    most: int
    memory: int | None = None
    note: str = ""


def describe_layout(config: CommonConfig, longest_rows: int = 0) -> str:
    """Text of the plan that `dry_run` prints. Starts nothing.

    The device must already be chosen (`with_device`).

    Args:
        longest_rows: see `LearnerConfig`; 0: unknown.

    Raises:
        ConfigError: a role does not fit into its part of a GPU.
    """
    device = config.cluster.device
    assert device != "auto", "the device of a run is chosen before its plan is made"
    largest = {role: bounds[1] for role, bounds in pool_bounds(config).items()}
    roles = []
    for demand in [*placed_roles(config), *unplaced_roles(config)]:
        memory, note = _memory(config, demand.name)
        most = largest.get(demand.name, demand.count)
        roles.append(RolePlan(demand=demand, most=most, memory=memory, note=note))
    push = ""
    if isinstance(config, RolloutConfig) and config.pushes:
        push = describe_push(config)
    plan = render(
        roles,
        colocate=colocated(config),
        turns=turn_roles(config),
        push=push,
        cores=os.cpu_count() if starts_here() else None,
    )
    if not device.startswith("cuda"):
        return plan
    engines = engines_of(config) if isinstance(config, RolloutConfig) else {}
    here = {role: engine for role, engine in engines.items() if not engine.external}
    return "\n".join([plan, *gpu_lines(config, here, longest_rows)])


def _memory(config: CommonConfig, role: str) -> tuple[int | None, str]:
    """Bytes of one member that are known before its start (None: unknown), and a note."""
    device = config.cluster.device
    if role == LEARNER:
        learner = config.learner_memory()
        passes = learner and learner.passes
        budget = config.learner.token_budget or TOKEN_BUDGET[device]
        note = passes and passes.describe(budget, config.learner.gradient_checkpointing)
        copies = "with copies of teachers, " if config.frozen_in_learner() != 0 else ""
        held = learner and learner.held
        return held, f"{copies}and {note or 'activations'}"
    if role == REWARD and isinstance(config, RolloutConfig) and config.reward_model is not None:
        dtype = config.engine.dtype_on(device)
        return frozen_bytes([config.reward_model], dtype), "and activations"
    engine = engines_of(config).get(role) if isinstance(config, RolloutConfig) else None
    if engine is None:
        return 0, ""
    if engine.external:
        return 0, "a server that runs elsewhere"
    if not weight_files(engine.model):
        return None, "and caches"
    ranks = parallelism(engine.server_flags).split if device == "cuda" else 1
    return served_bytes(engine.model, engine.dtype) // ranks, "and caches"


def render(
    roles: Sequence[RolePlan],
    *,
    colocate: Sequence[Sequence[str]] = (),
    turns: Sequence[str] = (),
    push: str = "",
    cores: int | None = None,
) -> str:
    """Table of the roles, and sums of resources at the start and at the largest sizes.

    Args:
        colocate: sets of roles that share nodes.
        turns: roles whose members of the same index take turns on the same GPUs.
        push: description of a weight push.
        cores: CPU cores of this machine, if the run starts Ray here; Ray then grants more CPUs than
            there are cores.
    """
    header = ("role", "count", "each", "in all", "memory of one")
    rows = [header, *(_row(role) for role in roles)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    for line, role in zip(range(1, len(lines)), roles, strict=True):
        lines[line] = f"{lines[line]}  {role.note}".rstrip()
    for together in colocate:
        where = "on the same GPUs, by turns" if together == turns else "on one node"
        lines.append(f"placed   {' and '.join(together)} {where}")
    demands = [role.demand for role in roles]
    for demand in demands:
        each = f"         each {demand.name} engine on"
        if demand.nodes > 1:
            lines.append(f"{each} {demand.nodes} different nodes")
        if demand.together > 1:
            lines.append(f"         every {demand.together} {demand.name} workers on one node")
        if demand.span > 1 and demand.name not in turns:
            lines.append(f"{each} the GPUs of {demand.span} learner workers")
    if push:
        lines.append(f"push     {push}")
    start = _needed(demands, [demand.count for demand in demands])
    grown = _needed(demands, [role.most for role in roles])
    more = f" to start; at the largest pool sizes, {describe(grown)}" if start != grown else ""
    lines.append(f"needs    {describe(start)}{more}")
    if cores and start.get("CPU", 0) > cores:
        lines.append(f"         this machine has {cores} cores, shared by the actors")
    return "\n".join(lines)


def _row(role: RolePlan) -> tuple[str, ...]:
    demand = role.demand
    return (
        demand.name,
        _span(demand.count, role.most),
        demand.each,
        describe(_needed([demand], [demand.count])),
        "unknown" if role.memory is None else readable(role.memory) if role.memory else "small",
    )


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}..{most}"


def _needed(demands: Sequence[ResourceDemand], counts: Sequence[int]) -> dict[str, float]:
    """Total resources, with `counts` members of each demand."""
    return sum_of(
        {name: amount * demand.bundles * count for name, amount in demand.resources.items()}
        for demand, count in zip(demands, counts, strict=True)
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
