"""Weight pushes from the learner's tensors to the engine's acknowledgement, by transport.

Each way pushes the same model from a learner of one worker, whose weights are whole, and from two
workers over gloo, alternately, each after a memcpy of the same bytes. The engine is idle; the pause
is the time in which it could not generate.

The stages of a push are also timed alone. From their seconds per byte and a network's rate,
`push_seconds` computes a push that is too large for this machine (docs/benchmarks/weights.md).
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import torch.distributed
from rich.console import Console
from rich.table import Table

from actors.config import EngineConfig, EngineKind
from actors.sglang.installed import sglang_installed
from benchmarks.scaling import DEADLINE_S, LOSSES, follower
from cluster.config.pools import WeightsChoice
from cluster.weights.transport import PushSettings, Transport, collect
from cluster.weights.transports import choose_transports
from distill.models.loading import new_qwen3
from distill.weights.model_weights import (
    COPY_BYTES,
    Weights,
    names_of,
    plan_buckets,
    total_bytes,
)
from distill.weights.shared_memory import SharedBlock
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.process_group import WorkerGroup
from tests.learner.piped_followers import meet
from tests.weights import LendableWeights, gather_all

REPEATS, WARMUP = 5, 2
START_DEADLINE_S = 300.0
# 44.6 M parameters in fp32: more than one portion.
SHAPE = {"vocab_size": 8192, "hidden_size": 640, "layers": 8, "heads": 10}


def measure_transports(scratch: Path) -> dict[str, Any]:
    """`bytes`; `pushes` (see `_measure`) by engine and transport; `stages`."""
    model = new_qwen3(**SHAPE, context_length=512, eos_token_id=1, pad_token_id=0, seed=0)
    directory = Path(tempfile.mkdtemp(prefix="transports-", dir=scratch))
    model.save_pretrained(directory / "model")
    del model
    kinds: list[tuple[str, EngineKind, list[WeightsChoice]]] = [
        ("embedded", "embedded", ["shared_memory", "disk", "group"])
    ]
    if sglang_installed():
        kinds.append(("SGLang", "sglang", ["shared_memory", "disk", "group", "ipc"]))
    pushes: dict[str, dict[str, float]] = {}
    with _ray(), _two_workers(str(directory / "model"), directory) as learner:
        sharded = learner.weights()
        whole = LendableWeights(gather_all(sharded))
        stages = _stages(whole, sharded)
        for name, kind, choices in kinds:
            config = EngineConfig(kind=kind, model=str(directory / "model"), device="cpu")
            engine: Any = ray.remote(config.engine_class).remote(**config.arguments())
            ray.get(engine.info.remote(), timeout=START_DEADLINE_S)
            for choice in choices:
                settings = PushSettings(
                    choice=choice, served=config.hosted, device="cpu",
                    directory=str(directory / "weights"), model=str(directory / "model"),
                    temperature=1.0, dtype="float32", probe_every=0, prove_every=0,
                    timeout_s=60,
                )  # fmt: skip
                [transport] = choose_transports(settings, {name: engine}, learner.lender_places())
                pushes[f"{name}, {choice}"] = _measure(transport, whole, sharded)
            ray.kill(engine)
    return {"bytes": total_bytes(whole), "pushes": pushes, "stages": stages}


@contextmanager
def _two_workers(model: str, scratch: Path) -> Iterator[Learner]:
    """Learner that leads from this process, with a second worker in another process."""
    config = LearnerConfig.of(
        model=model, total_steps=1, device="cpu", threads=torch.get_num_threads()
    )
    context = multiprocessing.get_context("spawn")
    store, (leads, follows) = meet(2, context, DEADLINE_S)
    process = context.Process(target=follower, args=(config, follows), daemon=True)
    process.start()
    try:
        group = WorkerGroup(leads.membership, config.device)
        yield Learner(config, str(scratch), losses=LOSSES, group=group)
    finally:
        torch.distributed.destroy_process_group()
        process.kill()
        process.join()
        del store


def _measure(transport: Transport, whole: Weights, sharded: Weights) -> dict[str, float]:
    """Median seconds of a push, and of a memcpy of the same bytes (`memcpy_seconds`).

    From a learner of one worker: `seconds`, of which `pause_seconds` without generation. From two
    workers: `gathered_seconds`, `gathered_pause_seconds`.
    """
    names = ("seconds", "pause_seconds", "gathered_seconds", "gathered_pause_seconds")
    made: dict[str, list[float]] = {name: [] for name in (*names, "memcpy_seconds")}
    for turn in range(WARMUP + REPEATS):
        taken = [memcpy_seconds(total_bytes(whole))]
        for i, weights in enumerate((sharded, whole)):
            started = time.perf_counter()
            acknowledged = collect(transport.start(weights, 2 * turn + i), 60).require("a push")
            transport.finish()
            taken = [time.perf_counter() - started, max(acknowledged.values()), *taken]
        if turn < WARMUP:
            continue  # the first pushes map memory and form the group
        for name, seconds in zip(made, taken, strict=True):
            made[name].append(seconds)
    transport.abort()
    return {name: median(seconds) for name, seconds in made.items()}


def _stages(whole: Weights, sharded: Weights) -> dict[str, float]:
    """Median seconds of each stage, for all bytes.

    `check` that they are finite, on both workers; `gather` from two workers; `copy` of whole
    tensors into shared memory; a `memcpy`.
    """
    block = SharedBlock()

    def gather() -> None:
        for bucket in plan_buckets(sharded.layouts, COPY_BYTES):
            sharded.gather(names_of(bucket))

    stages: dict[str, Callable[[], Any]] = {
        "check": sharded.first_non_finite,
        "gather": gather,
        "copy": lambda: block.write(whole),
    }
    made = {name: _median_seconds(stage) for name, stage in stages.items()}
    return made | {"memcpy": memcpy_seconds(total_bytes(whole))}


def memcpy_seconds(nbytes: int) -> float:
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return _median_seconds(lambda: target.copy_(source))


def _median_seconds(run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(WARMUP + REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds[WARMUP:])


@contextmanager
def _ray() -> Iterator[None]:
    already = ray.is_initialized()
    if not already:
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        if not already:
            ray.shutdown()


def stage_costs(report: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per GB of each stage of a push to SGLang, from `measure_transports`.

    `load` is the server's pause if weights are in shared memory; `network`, gloo on the loopback,
    is the time of a push by group beyond checking and loading.
    """
    gigabytes = report["bytes"] / 1e9
    made = {name: seconds / gigabytes for name, seconds in report["stages"].items()}
    pushes = report["pushes"]
    made["load"] = pushes["SGLang, shared_memory"]["pause_seconds"] / gigabytes
    group = pushes["SGLang, group"]["seconds"] / gigabytes
    return made | {"network": max(0.0, group - made["check"] - made["load"])}


def on_network(costs: Mapping[str, float], gigabits_per_s: float) -> dict[str, float]:
    """The same stages between hosts: gathering and sending at the network's nominal rate at best.

    >>> on_network({"gather": 1.0, "network": 0.1}, 25.0)
    {'gather': 1.0, 'network': 0.32}
    """
    floor = 8 / gigabits_per_s
    bounded = {name: max(costs[name], floor) for name in ("gather", "network")}
    return {**costs, **bounded}


def push_seconds(gigabytes: float, costs: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a push, by the waits in cluster/weights/transports.py and collective.py.

    Args:
        costs: seconds per GB of `check`, `gather`, `copy`, `network` and `load`.

    Returns:
        `shared_memory`: all stages one after the other. `group`: the learner gathers a portion
        while the engines load the one before; nothing else overlaps. `pipelined`, which is not
        done: all stages of a group push at once, on different portions.

    >>> costs = {"check": 0.1, "gather": 1.0, "copy": 0.2, "network": 0.5, "load": 0.3}
    >>> {way: round(seconds, 2) for way, seconds in push_seconds(2.0, costs).items()}
    {'shared_memory': 3.2, 'group': 3.2, 'pipelined': 2.0}
    """
    check, gather, copy, network, load = (
        costs[name] for name in ("check", "gather", "copy", "network", "load")
    )
    return {
        "shared_memory": gigabytes * (check + gather + copy + load),
        "group": gigabytes * (check + network + max(gather, load)),
        "pipelined": gigabytes * max(gather, network, load),
    }


def transports_tables(report: Mapping[str, Any]) -> list[Table]:
    """Console tables of `measure_transports`."""
    gigabytes = report["bytes"] / 1e9
    pushes = Table(
        title=f"weight pushes of {gigabytes * 1e3:.0f} MB, seconds per GB (x a memcpy), median",
        caption=f"learner, its second worker and the engine share {os.cpu_count()} cores",
    )
    for header in ("engine, transport", "one worker", "pause", "two workers", "pause"):
        pushes.add_column(header, justify="left" if header.startswith("engine") else "right")
    for name, push in report["pushes"].items():
        cells = [
            f"{push[key] / gigabytes:.2f} ({push[key] / push['memcpy_seconds']:.1f})"
            for key in ("seconds", "pause_seconds", "gathered_seconds", "gathered_pause_seconds")
        ]
        pushes.add_row(name, *cells)
    stages = Table(title="stages of a push by themselves, seconds per GB")
    made = {name: seconds / gigabytes for name, seconds in report["stages"].items()}
    for name in made:
        stages.add_column(name, justify="right")
    stages.add_row(*(f"{cost:.3f}" for cost in made.values()))
    return [pushes, stages]


if __name__ == "__main__":
    found = measure_transports(Path(sys.argv[1]))
    print(json.dumps(found))
    for table in transports_tables(found):
        Console().print(table)
