"""Checks of the push: a learner's weights into an engine on its device, by each transport."""

from __future__ import annotations

from typing import Any

import torch

from actors.config import EngineConfig
from actors.sglang.installed import sglang_installed
from benchmarks.gpu.checks import COLD_START_S
from benchmarks.gpu.learner_checks import new_learner
from benchmarks.gpu.measure import held_bytes, seconds
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require
from cluster.config.pools import WeightsChoice
from cluster.handles.local_actor import LocalActor
from cluster.weights.publisher import Publisher
from cluster.weights.transport import PushSettings
from distill.records import TrainedGroups


def push_copy(setting: Setting) -> Numbers:
    """Push weights to an engine on the same device and probe them; compared with a memcpy."""
    return _push(setting, "shared_memory", sglang_installed())


def push_ipc(setting: Setting) -> Numbers:
    """Push weights to SGLang by CUDA IPC: one bucket at a time, none left on the GPU."""
    return _push(setting, "ipc", True)


def _push(setting: Setting, choice: WeightsChoice, served: bool) -> Numbers:
    learner, model = new_learner(setting, setting.dtype), setting.model()
    config = EngineConfig(
        kind="sglang" if served else "embedded",
        model=model,
        dtype=setting.dtype,
        device=setting.device,
        gpu_share=0.4 if setting.cuda else 1.0,
        start_deadline_s=COLD_START_S,
    )
    engine: Any = LocalActor(config.engine_class, **config.arguments())
    publish = Publisher(
        {"engine": engine},
        PushSettings(
            choice=choice, served=served, device=setting.device, directory=setting.scratch,
            model=model, temperature=TEMPERATURE, dtype=setting.dtype,
            probe_every=1, prove_every=1, timeout_s=COLD_START_S,
        ),
        learner.logprobs,
        lenders=learner.lender_places(),
    )  # fmt: skip
    try:
        pushed, held = {}, []
        for version in range(3):  # the first makes blocks and groups
            for parameter in learner.model.parameters():
                parameter.data.mul_(1.01)
            weights = learner.weights(getattr(torch, setting.dtype))
            pushed = publish(weights, version, TrainedGroups())
            held.append(held_bytes(setting))
        gap = publish.settle()
        way = publish.describe()
    finally:
        engine.close.remote()
    copied = _memcpy_s(setting, int(pushed["push/bytes"]))
    require(gap is not None, "no engine answered the probe")
    grown = held[-1] - held[0]
    require(grown < 1 << 20, f"{grown >> 20} MiB more are held after a push than after the first")
    print(f"by {way}")
    return {
        "gb": pushed["push/bytes"] / 1e9,
        "seconds": pushed["push/seconds"],
        "pause": pushed["push/pause"],
        "memcpy_s": copied,
        "times_memcpy": pushed["push/seconds"] / copied,
        "probe_gap": float(gap or 0.0),
    }


def _memcpy_s(setting: Setting, size: int) -> float:
    """Seconds of copying this number of bytes on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return seconds(setting, lambda: target.copy_(source))
