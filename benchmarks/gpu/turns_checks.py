"""Check of engines that take turns on one GPU."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from actors.sglang.config import SglangConfig
from actors.sglang.memory import ASLEEP_BYTES
from actors.sglang.turns import TurnTakingEngine
from benchmarks.gpu.checks import COLD_START_S
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require
from distill.engine import ScoreRequest
from distill.handshake.comparison import tolerance_at
from tests.tiny import VOCAB_SIZE

_SLEEPS = 5


def engines_by_turns(setting: Setting) -> Numbers:
    """Seconds until a sleeping engine has answered, and the change of its answers after its sleep.

    The seconds include those for which the other engine keeps its turn after its last call.
    """
    return asyncio.run(_by_turns(setting))


async def _by_turns(setting: Setting) -> Numbers:
    engines: list[TurnTakingEngine] = []
    gaps, seconds = [], []
    try:
        for model in setting.pair():
            config = SglangConfig(
                model=model,
                dtype=setting.dtype,
                device=setting.device,
                start_deadline_s=COLD_START_S,
                sleeps=True,
                gpu_reserved=ASLEEP_BYTES if setting.cuda else 0,
                turn=str(Path(setting.scratch) / "gpu.turn"),
            )
            engine = await asyncio.to_thread(TurnTakingEngine, config)
            engines.append(engine)
            await engine.health()
        first = [await _logprobs(engine) for engine in engines]
        for _ in range(_SLEEPS):
            for engine, before_N in zip(engines, first, strict=True):
                began = time.perf_counter()
                after_N = await _logprobs(engine)
                seconds.append(time.perf_counter() - began)
                gaps.append(float(np.abs(after_N - before_N).max()))
    finally:
        for engine in engines:
            await engine.close()
    allowed = tolerance_at(setting.dtype, TEMPERATURE) / 8
    require(max(gaps) <= allowed, f"answers moved by {max(gaps):.3g} nats, allowed {allowed:.3g}")
    return {"gap": max(gaps), "seconds": float(np.median(seconds)), "longest_s": max(seconds)}


async def _logprobs(engine: TurnTakingEngine) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = [
        ScoreRequest(
            tokens_T=rng.integers(3, VOCAB_SIZE, size=128).astype(np.int32),
            start=1,
            temperatures=(TEMPERATURE,),
        )
        for _ in range(8)
    ]
    return np.concatenate([score.logprobs_by_temperature[0] for score in await engine.score(rows)])
