"""Resource plan of a run, by role: `dry_run=True` prints it. It starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distill.gpu import DTYPE_BYTES
from learner.memory import MemoryEstimate, readable


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """Members of one kind. `memory` in bytes of one, if known.

    `cpus` and `gpus` are of one, on each of the `nodes` that it takes, or in each of the bundles of
    its `span` (`ResourceDemand`).
    """

    name: str
    count: int
    most: int
    cpus: float
    gpus: float = 0
    nodes: int = 1
    span: int = 1
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


def engine_memory(estimate: MemoryEstimate | None, dtype: str) -> int | None:
    """Bytes of weights that an engine holds; its caches come on top."""
    return None if estimate is None else estimate.parameters * DTYPE_BYTES[dtype]


def learner_memory(estimate: MemoryEstimate | None, frozen: int | None, workers: int) -> int | None:
    """Bytes of one worker's share of weights, gradients, moments and frozen models; activations
    come on top."""
    if estimate is None or frozen is None:
        return None
    return -(-(estimate.bytes + frozen) // workers)


def push_line(parameters: int | None, dtype: str, engines: int) -> str:
    """Size of a weight push: so many parameters (None: all of a model whose size is not known), in
    the engines' precision, to each engine."""
    to = f"to {_engines(engines)} after each step"
    if parameters is None:
        return f"every parameter in {dtype} {to}; size unknown"
    size = parameters * DTYPE_BYTES[dtype]
    return (
        f"{readable(size)} ({parameters / 1e6:.1f} M parameters in {dtype}) {to}: "
        f"{readable(size * engines)}"
    )


def _engines(count: int) -> str:
    return f"{count} policy engine{'s' * (count != 1)}"


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
