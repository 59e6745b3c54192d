"""Choice of a transport for each policy engine, from the locations of learner and engines. Pure.

    learner and engine                          auto               why
    one node, on CPUs                           shared_memory      the shortest pause
    one node, each with GPUs of its own         group (NCCL)       from GPU to GPU
    on the GPUs of the learner's workers        ipc                a bucket on that GPU, and no copy
    one node, sharing some of the GPUs          shared_memory      NCCL allows a GPU once per group
    different nodes                             group              no full copy at the learner
    an engine over several nodes                group              each rank receives its part

The embedded engine opens no IPC handles. On the learner's node it always reads shared memory, so
that its push overlaps the next step; on other nodes it joins a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config.pools import WeightsChoice
from distill.errors import ConfigError
from distill.weights.lending import LenderPlace

Way = Literal["shared_memory", "disk", "group", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of a learner or an engine.

    Attributes:
        node: id of its node; the first one, for a server over several nodes.
        host: name of its machine.
        gpus: ids of its GPUs on that node, empty on a CPU. For the learner, those of rank 0, which
            sends the weights.
        nccl: NCCL settings of its process (`distill.process_groups`).
        nodes: number of nodes that the engine's server spans.
    """

    node: str
    host: str = ""
    gpus: tuple[str, ...] = ()
    nccl: Mapping[str, str]
    nodes: int = 1

    def same_node(self, other: Place) -> bool:
        """True if both are entirely on the same node."""
        return self.node == other.node and self.nodes == other.nodes == 1

    def shares_gpu(self, other: Place) -> bool:
        return self.node == other.node and not set(self.gpus).isdisjoint(other.gpus)


def plan_ways(
    choice: WeightsChoice,
    learner: Place,
    engines: Mapping[str, Place],
    *,
    served: bool,
    lenders: Sequence[LenderPlace] = (),
) -> dict[Way, list[str]]:
    """Names of the engines of each transport; transports without engines are left out.

    Args:
        served: the engines are SGLang servers.
        lenders: locations of the learner's workers, by rank.

    Raises:
        ConfigError: `choice` cannot reach these engines.
    """
    ways: dict[Way, list[str]] = {}
    for name, place in engines.items():
        shares = served and bool(place.gpus) and _is_lent(place, lenders)
        way = _way(choice, learner, place, served)
        ways.setdefault("ipc" if choice == "auto" and shares else way, []).append(name)
    others = [name for name, place in engines.items() if not place.same_node(learner)]
    if choice == "shared_memory" and others:
        raise ConfigError(
            f"weights=shared_memory, but {', '.join(others)} and the learner are on different "
            "nodes; use weights=auto",
            field="weights.transport",
        )
    grouped = {name: engines[name] for name in ways.get("group", ())}
    if choice == "auto":  # NCCL allows one engine per GPU; the others on it use shared memory
        for name in _sharing_gpu(grouped):
            if engines[name].same_node(learner):
                ways["group"].remove(name)
                ways.setdefault("shared_memory", []).append(name)
                del grouped[name]
    _check_group(learner, grouped)
    return {way: names for way, names in ways.items() if names}


def _way(choice: WeightsChoice, learner: Place, engine: Place, served: bool) -> Way:
    assert choice != "adapter", "it goes to all engines in one way"
    if choice != "auto":
        return choice
    if not engine.same_node(learner):
        return "group"
    if served and learner.gpus and engine.gpus and not learner.shares_gpu(engine):
        return "group"
    return "shared_memory"


def lenders_of(name: str, engine: Place, ranks: int, lenders: Sequence[LenderPlace]) -> list[int]:
    """Ranks of the learner workers that lend weights, one for each rank of the engine `name`.

    Each engine rank reads from the worker on its own GPU. Ranks on CPUs are assigned to the workers
    of their machine in turn.

    Raises:
        ConfigError: no learner worker can lend to one of the ranks.
    """
    here = {worker.gpu: i for i, worker in enumerate(lenders) if worker.host == engine.host}
    if engine.nodes > 1 or not here:
        raise _not_lent(name, "and the learner are on different nodes")
    if not engine.gpus:
        on_cpu = [
            i
            for i, worker in enumerate(lenders)
            if worker == LenderPlace(host=engine.host, gpu=None)
        ]
        if not on_cpu:
            raise _not_lent(name, "is on a CPU, and the learner on GPUs")
        return [on_cpu[rank % len(on_cpu)] for rank in range(ranks)]
    if ranks > len(engine.gpus):
        raise _not_lent(name, f"has {ranks} ranks on {len(engine.gpus)} GPUs")
    for gpu in engine.gpus[:ranks]:
        if gpu not in here:
            raise _not_lent(name, f"computes on GPU {gpu}, which has no learner worker")
    return [here[gpu] for gpu in engine.gpus[:ranks]]


def _is_lent(engine: Place, lenders: Sequence[LenderPlace]) -> bool:
    """True if a learner worker runs on each of the engine's GPUs."""
    try:
        lenders_of("", engine, len(engine.gpus), lenders)
    except ConfigError:
        return False
    return True


def _not_lent(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"weights=ipc, but {name} {why}: weights=ipc needs each engine on a learner worker's "
        "GPU. Use weights=auto, or place them together (colocate=sleep gpus_per_actor=0.5)",
        field="weights.transport",
    )


def _sharing_gpu(engines: Mapping[str, Place]) -> list[str]:
    """Names of the engines that share a GPU with an earlier engine."""
    names = list(engines)
    return [
        name
        for i, name in enumerate(names)
        if any(engines[name].shares_gpu(engines[other]) for other in names[:i])
    ]


def _check_group(learner: Place, engines: Mapping[str, Place]) -> None:
    """Raise ConfigError for groups in which NCCL would fail or hang without an early error."""
    if not learner.gpus:
        return
    if doubled := [name for name, place in engines.items() if place.shares_gpu(learner)]:
        raise _shared_gpu(doubled, "the learner")
    if doubled := _sharing_gpu(engines):
        raise _shared_gpu(doubled, "another engine")
    for name, place in engines.items():
        for setting, value in place.nccl.items():
            if learner.nccl.get(setting) != value:
                raise ConfigError(
                    f"{setting} is {learner.nccl.get(setting)} for the learner and {value} for "
                    f"{name}: their group would hang. Set it to the same value on all nodes, or "
                    "on none",
                    field=setting,
                )


def _shared_gpu(engines: Sequence[str], other: str) -> ConfigError:
    return ConfigError(
        f"weights are pushed through a group, but {', '.join(engines)} shares a GPU with "
        f"{other}: NCCL allows a GPU only once in a group; give each its own GPUs, or use "
        "weights=auto on the learner's node and weights=disk elsewhere",
        field="weights.transport",
    )
