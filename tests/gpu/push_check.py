"""Check of the push: a learner's weights into an engine, beside a memcpy of them."""

from __future__ import annotations

import time
from typing import Any

import torch

from actors.config import EngineConfig
from cluster.handles.local_actor import LocalActor
from cluster.weights.publisher import Publisher, PushSettings
from distill.delivery import TrainedGroups
from tests.gpu.learner_checks import new_learner
from tests.gpu.setting import TEMPERATURE, Setting, require

_TIMEOUT_S = 120.0


class _Slots:
    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Nobody waits for them here."""


def push(setting: Setting) -> dict[str, float]:
    """Weights into an embedded engine on the same device, and its log-probs afterwards."""
    learner = new_learner(setting, setting.dtype)
    config = EngineConfig(
        kind="embedded", model=setting.model(), dtype=setting.dtype,
        device=setting.device, 
    )  # fmt: skip
    engine: Any = LocalActor(config.engine_class, **config.arguments())
    publish = Publisher(
        {"engine": engine},
        _Slots(),
        PushSettings(
            choice="auto", served=False, device=setting.device, directory=setting.scratch,
            model=setting.model(), temperature=TEMPERATURE, learner_dtype=setting.dtype,
            probe_every=1, prove_every=1, timeout_s=_TIMEOUT_S,
        ),
        learner.logprobs,
    )  # fmt: skip
    try:
        pushed = {}
        for version in range(3):  # the first makes blocks and groups
            for parameter in learner.model.parameters():
                parameter.data.mul_(1.01)
            weights = learner.weights(getattr(torch, setting.dtype))
            pushed = publish(weights, version, TrainedGroups())
        gap = publish.settle()
        way = publish.describe()
    finally:
        engine.close.remote()
    copied = _memcpy_s(int(pushed["push/bytes"]), setting.device)
    require(gap is not None, "no engine answered the probe")
    print(f"by {way}")
    return {
        "gb": pushed["push/bytes"] / 1e9,
        "seconds": pushed["push/seconds"],
        "pause": pushed["push/pause"],
        "memcpy_s": copied,
        "times_memcpy": pushed["push/seconds"] / copied,
        "probe_gap": float(gap or 0.0),
    }


def _memcpy_s(size: int, device: str) -> float:
    """Of as many bytes, on the device itself."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
