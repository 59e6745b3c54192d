"""Pushes of what changed against pushes of all: bytes and seconds, by learning rate, in bfloat16.

A learner takes steps of policy gradient on random rows. After each it pushes what changed, and then
all, by Ray's object store to an idle engine in bfloat16. The store is this machine's, so seconds
hold no network: `seconds_on` adds one by its rate. The stages of a change, finding it and making
weights of it, are timed alone, too, by the CPU's clock, for which others on the machine count less.

    python -m benchmarks.deltas DIR
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from benchmarks.scaling import LOSSES
from benchmarks.transports import SHAPE, START_DEADLINE_S
from cluster.weights.delta import DeltaSender, DeltaTransport
from cluster.weights.gather import values
from cluster.weights.transport import Transport
from cluster.weights.transports import ObjectStoreTransport
from distill.models.loading import new_qwen3
from distill.weights.delta import ReceivedWeights, SentWeights
from distill.weights.model_weights import total_bytes
from learner.config import LearnerConfig
from learner.learner import Learner, Part
from tests.samples import training_row

RATES = (1e-6, 1e-5, 1e-4)
# AdamW's first updates are of full size everywhere; the share of changes falls for a few steps.
WARMUP, STEPS = 4, 6
ROWS, PROMPT, TRAINED = 8, 16, 48


def measure_deltas(scratch: Path, rates: Sequence[float] = RATES) -> dict[str, Any]:
    """`bytes` of all weights, and `pushes`: medians by engine and learning rate."""
    model = new_qwen3(**SHAPE, context_length=512, eos_token_id=1, pad_token_id=0, seed=0)
    directory = str(Path(tempfile.mkdtemp(prefix="deltas-", dir=scratch)) / "model")
    model.save_pretrained(directory)
    kinds: dict[str, type] = {"embedded": EmbeddedEngine}
    if sglang_installed():
        kinds["SGLang"] = HostedSglangEngine
    made: dict[str, dict[str, float]] = {}
    size = 0
    already = ray.is_initialized()
    if not already:
        ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.WARNING)
    try:
        for name, kind in kinds.items():
            engine: Any = ray.remote(kind).remote(
                model_path=directory, device="cpu", dtype="bfloat16", threads=1
            )
            ray.get(engine.info.remote(), timeout=START_DEADLINE_S)
            for rate in rates:
                learner = _learner(directory, rate, scratch)
                size = total_bytes(learner.weights(torch.bfloat16))
                made[f"{name}, lr {rate:g}"] = _measure(learner, {name: engine})
            ray.kill(engine)
    finally:
        if not already:
            ray.shutdown()
    return {"bytes": size, "pushes": made}


def _learner(model: str, rate: float, scratch: Path) -> Learner:
    config = LearnerConfig(
        model=model, total_steps=WARMUP + STEPS, lr=rate, device="cpu",
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return Learner(config, str(scratch), losses=LOSSES)


def _measure(learner: Learner, engines: Mapping[str, Any]) -> dict[str, float]:
    """Medians: bytes and seconds of a push either way, the pauses, and the stages of a change."""
    sender, sent, received = DeltaSender(), SentWeights(), ReceivedWeights()
    changes, whole = DeltaTransport(engines, sender), ObjectStoreTransport(engines)
    notes: list[dict[str, float]] = []
    for step in range(WARMUP + STEPS):
        rows = [training_row(PROMPT, TRAINED, seed=ROWS * step + i) for i in range(ROWS)]
        learner.step(Part(rows_D=rows, loss=LOSSES[0]))
        weights = learner.weights(torch.bfloat16)
        sender.count()
        note = _push(changes, weights, step, "delta") | sender.metrics(engines, 0)
        note |= _push(whole, weights, step, "whole")
        started = time.process_time()
        sent.advance(weights, step)
        note["find_cpu_seconds"] = time.process_time() - started
        change = pickle.loads(pickle.dumps(sent.delta() or sent.whole(), protocol=5))
        started = time.process_time()
        received.take(change)
        note["make_cpu_seconds"] = time.process_time() - started
        notes.append(note)
    return {key: median(note[key] for note in notes[WARMUP:]) for key in notes[-1]}


def _push(transport: Transport, weights: Any, version: int, what: str) -> dict[str, float]:
    started = time.perf_counter()
    pending = transport.start(weights, version)
    waits = time.perf_counter() - started  # what follows goes on beside the next step
    pauses = values(pending, "a push", 60)
    transport.finish()
    seconds = time.perf_counter() - started
    made = {"seconds": seconds, "waits": waits, "pause": max(pauses.values())}
    return {f"{what}_{name}": value for name, value in made.items()}


def seconds_on(report: Mapping[str, Any], push: str, gigabits_per_s: float) -> dict[str, float]:
    """Seconds of a push of each kind with a network between, at its nominal rate."""
    made, per_byte = report["pushes"][push], 8e-9 / gigabits_per_s
    return {
        "delta": made["delta_seconds"] + made["push/bytes"] * per_byte,
        "whole": made["whole_seconds"] + report["bytes"] * per_byte,
    }


def deltas_table(report: Mapping[str, Any]) -> Table:
    """`measure_deltas` for people; seconds per GB of all weights."""
    gigabytes = report["bytes"] / 1e9
    table = Table(
        title=f"pushes of what changed of {gigabytes * 1e3:.0f} MB (bfloat16), s/GB, median",
        caption=f"learner and engine share {os.cpu_count()} cores; 1 Gb/s at its nominal rate",
    )
    for header in ("engine, learning rate", "changed", "bytes", "push", "whole", "learner waits",
                   "whole", "pause", "whole", "find, CPU", "make, CPU", "push, 1 Gb/s",
                   "whole, 1 Gb/s"):  # fmt: skip
        table.add_column(header, justify="left" if header.startswith("engine") else "right")
    for name, push in report["pushes"].items():
        stages = ("delta_seconds", "whole_seconds", "delta_waits", "whole_waits", "delta_pause",
                  "whole_pause", "find_cpu_seconds", "make_cpu_seconds")  # fmt: skip
        slow = seconds_on(report, name, 1)
        table.add_row(
            name,
            f"{push['push/changed_share']:.1%}",
            f"{push['push/bytes'] / report['bytes']:.1%}",
            *(f"{push[stage] / gigabytes:.2f}" for stage in stages),
            *(f"{slow[kind] / gigabytes:.2f}" for kind in ("delta", "whole")),
        )
    return table


if __name__ == "__main__":
    found = measure_deltas(Path(sys.argv[1]))
    print(json.dumps(found))
    Console(width=160).print(deltas_table(found))
