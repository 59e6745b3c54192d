"""Plan that `dry_run` prints: roles, their resources and memory, and what a push moves.

describe_layout(config)     the roles of a run -> RolePlan, Layout -> a table, and sums
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from actors.sglang.memory import served_bytes
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.placement.gpu_plan import GpuPlan
from cluster.placement.push_plan import describe_push
from cluster.placement.roles import (
    LEARNER,
    REWARD,
    bounds_of,
    colocated,
    engines_of,
    placed_roles,
    turn_roles,
)
from cluster.placement.starts_here import starts_here
from distill.gpu import readable
from distill.models.loading import weight_files
from learner.config import TOKEN_BUDGET
from learner.memory import frozen_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Members of one kind. `memory` in bytes of one, if known.

    `cpus` and `gpus` are of one, on each of the `nodes` that it takes, or in each of the bundles of
    its `span`; for these and `together` see `ResourceDemand`.
    """

    name: str
    count: int
    most: int
    cpus: float
    gpus: float = 0
    nodes: int = 1
    span: int = 1
    together: int = 1
    memory: int | None = None
    note: str = ""

    @property
    def bundles(self) -> int:
        """Number of bundles that one member takes."""
        return self.nodes * self.span


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All roles, those that share nodes, and what a push of weights moves.

    Attributes:
        colocate: roles that share nodes, set by set.
        turns: roles whose members of one index are on the same GPUs, where one is awake.
        cores: of this machine, where the run starts Ray on it; Ray then grants what is asked for.
    """

    roles: Sequence[RolePlan]
    colocate: Sequence[Sequence[str]] = ()
    turns: Sequence[str] = ()
    push: str = ""
    cores: int | None = None


def describe_layout(config: CommonConfig, longest_rows: int = 0) -> str:
    """The plan that `dry_run` prints: who takes what, and what a push moves. Starts nothing.

    The device is chosen already (`with_device`).

    Args:
        longest_rows: see `LearnerConfig`; 0: not known.

    Raises:
        ConfigError: a role does not fit onto its part of a GPU.
    """
    device = config.cluster.device
    assert device != "auto", "the device of a run is chosen before its plan is made"
    largest = {role: bounds[1] for role, bounds in bounds_of(config).items()}
    plans = []
    for role in placed_roles(config, device):
        memory, note = _memory(config, role.name, device)
        plans.append(
            RolePlan(
                name=role.name,
                count=role.count,
                most=largest.get(role.name, role.count),
                cpus=role.resources.get("CPU", 0),
                gpus=role.resources.get("GPU", 0),
                nodes=role.nodes,
                span=role.span,
                together=role.together,
                memory=memory,
                note=note,
            )
        )
    push = ""
    if isinstance(config, RolloutConfig) and config.pushes:
        push = describe_push(config, device)
    cores = os.cpu_count() if starts_here() else None
    together, turns = colocated(config), turn_roles(config)
    plan = render(Layout(roles=plans, colocate=together, turns=turns, push=push, cores=cores))
    if not device.startswith("cuda"):
        return plan
    engines = engines_of(config, device) if isinstance(config, RolloutConfig) else {}
    here = {role: engine for role, engine in engines.items() if not engine.external}
    return "\n".join([plan, *GpuPlan(config, device, here, longest_rows).lines()])


def _memory(config: CommonConfig, role: str, device: str) -> tuple[int | None, str]:
    """Bytes of one member, as far as they are known before it starts, and of what."""
    if role == LEARNER:
        workers, learner = config.learner.workers, config.learner_memory(device)
        passes = learner and learner.passes(workers)
        budget = config.learner.token_budget or TOKEN_BUDGET[device]
        note = passes and passes.describe(budget, config.learner.gradient_checkpointing)
        copies = "with copies of teachers, " if config.frozen_in_learner(device) != 0 else ""
        held = learner and learner.states(workers, offloads=False).held
        return held, f"{copies}and {note or 'activations'}"
    if role == REWARD and isinstance(config, RolloutConfig) and config.reward_model is not None:
        dtype = config.engine.dtype_on(device)
        return frozen_bytes([config.reward_model], dtype), "and activations"
    engine = engines_of(config, device).get(role) if isinstance(config, RolloutConfig) else None
    if engine is None:
        return 0, ""
    if engine.external:
        return 0, "a server that runs elsewhere"
    if not weight_files(engine.model):
        return None, "and caches"
    ranks = parallelism(engine.server_flags).split if device == "cuda" else 1
    return served_bytes(engine.model, engine.dtype) // ranks, "and caches"


def render(layout: Layout) -> str:
    """A table of the roles, and the sums beneath it: for a start, and grown to the most."""
    header = ("role", "count", "each", "in all", "memory of one")
    rows = [header, *(_row(role) for role in layout.roles)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    for line, role in zip(range(1, len(lines)), layout.roles, strict=True):
        lines[line] = f"{lines[line]}  {role.note}".rstrip()
    for roles in layout.colocate:
        where = "on the same GPUs, by turns" if roles == layout.turns else "on one node"
        lines.append(f"placed   {' and '.join(roles)} {where}")
    for role in layout.roles:
        if role.nodes > 1:
            lines.append(f"         each {role.name} engine on {role.nodes} different nodes")
        if role.together > 1:
            lines.append(f"         every {role.together} {role.name} workers on one node")
        if role.span > 1 and role.name not in layout.turns:
            lines.append(
                f"         each {role.name} engine on the GPUs of {role.span} learner workers"
            )
    if layout.push:
        lines.append(f"push     {layout.push}")
    lines.append(f"needs    {_totals(layout)}")
    if layout.cores and _cpus(layout, [role.count for role in layout.roles]) > layout.cores:
        lines.append(f"         this machine has {layout.cores} cores, for which they take turns")
    return "\n".join(lines)


def _row(role: RolePlan) -> tuple[str, ...]:
    return (
        role.name,
        _span(role.count, role.most),
        _times(role) + _resources(role.cpus, role.gpus),
        _resources(role.cpus * role.bundles * role.count, role.gpus * role.bundles * role.count),
        "unknown" if role.memory is None else readable(role.memory) if role.memory else "small",
    )


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}..{most}"


def _times(role: RolePlan) -> str:
    if role.nodes > 1:
        return f"{role.nodes} nodes of "
    return f"{role.span} x " if role.span > 1 else ""


def _resources(cpus: float, gpus: float) -> str:
    amounts = [f"{amount:g} {name}" for amount, name in ((cpus, "CPU"), (gpus, "GPU")) if amount]
    return ", ".join(amounts) or "-"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _totals(layout: Layout) -> str:
    start = _sum(layout, [role.count for role in layout.roles])
    grown = _sum(layout, [role.most for role in layout.roles])
    return start if start == grown else f"{start} to start; grown to the most, {grown}"


def _sum(layout: Layout, counts: Sequence[int]) -> str:
    sized = zip(layout.roles, counts, strict=True)
    gpus = sum(role.gpus * role.bundles * count for role, count in sized)
    return _resources(_cpus(layout, counts), gpus)


def _cpus(layout: Layout, counts: Sequence[int]) -> float:
    sized = zip(layout.roles, counts, strict=True)
    return sum(role.cpus * role.bundles * count for role, count in sized)
