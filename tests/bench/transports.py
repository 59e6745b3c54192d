"""Weight pushes, end to end: the learner's tensors to the engine's acknowledgement.

Each transport pushes the same model; its seconds stand beside a memcpy of the same bytes that was
timed in the same run, a moment before. The engine is idle; the pause is what generation would lose.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from torch import Tensor

from actors.embedded_engine import EmbeddedEngine
from actors.sglang_hosted import HostedSglangEngine
from actors.sglang_server import sglang_installed
from cluster.acknowledge import values
from cluster.weights import Transport, WeightsChoice, choose_transports
from distill.models import new_qwen3

REPEATS = 7
START_DEADLINE_S = 300.0
# 12.7 M parameters in fp32.
SHAPE = {"vocab_size": 8192, "hidden_size": 384, "layers": 5, "heads": 6}


def measure_transports(scratch: Path) -> dict[str, Any]:
    """`bytes`, and of each transport the median seconds of a push, its pause, and a memcpy."""
    model = new_qwen3(**SHAPE, context_length=512, eos_token_id=1, pad_token_id=0, seed=0)
    directory = Path(tempfile.mkdtemp(prefix="transports-", dir=scratch))
    model.save_pretrained(directory / "model")
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    kinds: list[tuple[str, type, list[WeightsChoice]]] = [
        ("embedded", EmbeddedEngine, ["shared_memory", "object_store", "disk"])
    ]
    if sglang_installed():
        kinds.append(
            ("SGLang", HostedSglangEngine, ["shared_memory", "object_store", "disk", "group"])
        )
    pushes: dict[str, dict[str, float]] = {}
    with _ray():
        for name, kind, choices in kinds:
            engine = ray.remote(kind).remote(
                model_path=str(directory / "model"), device="cpu", threads=1
            )
            ray.get(engine.info.remote(), timeout=START_DEADLINE_S)
            for choice in choices:
                [transport] = choose_transports(
                    choice, {name: engine}, served=kind is HostedSglangEngine, device="cpu",
                    directory=str(directory / "weights"), model=str(directory / "model"),
                    timeout_s=60,
                )  # fmt: skip
                pushes[f"{name}, {choice}"] = _measure(transport, tensors)
            ray.kill(engine)
    return {"bytes": sum(tensor.nbytes for tensor in tensors.values()), "pushes": pushes}


def _measure(transport: Transport, tensors: dict[str, Tensor]) -> dict[str, float]:
    pushes, pauses, copies = [], [], []
    for version in range(REPEATS + 2):
        copied = memcpy_seconds(sum(tensor.nbytes for tensor in tensors.values()))
        started = time.perf_counter()
        acknowledged = values(transport.start(tensors, version), "a push", 60, transport.problem)
        transport.finish()
        seconds = time.perf_counter() - started
        if version < 2:
            continue  # the first pushes map memory and form the group
        pushes.append(seconds)
        pauses.append(max(acknowledged.values()))
        copies.append(copied)
    transport.abort()
    return {
        "seconds": median(pushes),
        "memcpy_seconds": median(copies),
        "pause_seconds": median(pauses),
    }


def memcpy_seconds(nbytes: int) -> float:
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


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
