"""Checks of a sleeping engine: the GPU memory that it returns, and the memory that it keeps."""

from __future__ import annotations

import os
import subprocess
from unittest.mock import patch

import torch

from actors.sglang.hosted import HostedSglangEngine
from benchmarks.gpu.engine_checks import decode_gaps, on_another
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require
from distill.gpu import GIB
from distill.handshake.comparison import tolerance_at
from distill.models.loading import load_causal_lm
from distill.weights.model_weights import HeldWeights
from distill.weights.shared_memory import SharedBlock

_GRAPHS_SLEEP = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
_TIMEOUT_S = 20.0


def sleep_and_wake(setting: Setting) -> Numbers:
    """Memory that a sleeping engine returns; equal samples after its weights are restored."""
    made = _slept(setting, "true")
    allowed = tolerance_at(setting.dtype, TEMPERATURE)
    require(made["gap_after"] < allowed, f"the engine answers differently after its sleep: {made}")
    require(not setting.cuda or made["freed_gib"] > 1, f"almost no memory was released: {made}")
    return {**made}


def sleep_with_graphs(setting: Setting) -> Numbers:
    """The same if SGLang keeps captured graphs on the GPU."""
    return {**_slept(setting, "false")}


def _slept(setting: Setting, graphs_sleep: str) -> dict[str, float]:
    student = setting.pair()[0]
    model = load_causal_lm(student, dtype=torch.float32, device="cpu")
    block = SharedBlock()
    block.write(HeldWeights(dict(model.named_parameters())))
    weights = block.share()

    async def use(engine: HostedSglangEngine) -> dict[str, float]:
        before = (await decode_gaps(engine)).max()
        awake, awake_kept = _free(setting), _others_bytes(setting)
        await engine.sleep()
        asleep, kept = _free(setting), _others_bytes(setting)
        await engine.load_weights(weights, 1)
        after = (await decode_gaps(engine)).max()
        return {
            "awake_gib": awake_kept / GIB,
            "asleep_gib": kept / GIB,
            "freed_gib": (asleep - awake) / GIB,
            "taken_back_gib": (asleep - _free(setting)) / GIB,
            "gap_before": float(before),
            "gap_after": float(after),
        }

    with patch.dict(os.environ, {_GRAPHS_SLEEP: graphs_sleep} if setting.cuda else {}):
        return on_another(setting, use, sleeps=True)


def _free(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.cuda else 0


def _others_bytes(setting: Setting) -> int:
    """GPU bytes of other processes, as the driver counts them."""
    if not setting.cuda:
        return 0
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    listed = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    print(listed)
    rows = [line.split(",") for line in listed.splitlines() if line.strip()]
    # In a container the driver may know no process ids, or no memory of each.
    others = [used for pid, used in rows if pid.strip() != str(os.getpid())]
    numbers = [used.strip() for used in others if used.strip().isdecimal()]
    return sum(map(int, numbers)) << 20
