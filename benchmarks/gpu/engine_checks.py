"""Checks of SGLang servers, which share a process and one server.

The first check starts the server. Only the second half of `captured_graphs` needs another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from benchmarks.gpu.checks import COLD_START_S
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require
from cluster.handshake.handshake import handshake as compare_all
from distill.engine import GenerateRequest, ScoreRequest
from distill.handshake.comparison import MEAN_SHARE, tolerance_at
from distill.models.loading import load_causal_lm
from distill.objective.batching import TrainingRow
from distill.sampling import TrainSampling
from distill.tokenizer import load_tokenizer, probe_tokenizer
from distill.types import FloatArray
from learner.config import LearnerConfig
from learner.learner import Learner
from tests.tiny import VOCAB_SIZE

_TEMPERATURES = (0.5, 0.7, 1.0, 1.5)
_CALL_S = 120.0
# Share of the memory that each server gets where two servers share a GPU.
_SHARE = 0.4

T = TypeVar("T")


@cache
def _loop() -> asyncio.Runner:
    """Event loop of all calls of this process's servers."""
    return asyncio.Runner()


def new_engine(setting: Setting, **settings: Any) -> HostedSglangEngine:
    """Start an engine with its own server, of the student by default; do not wait for it."""
    given = {
        "model": setting.pair()[0], "dtype": setting.dtype, "device": setting.device,
        "start_deadline_s": COLD_START_S, "request_deadline_s": _CALL_S,
        "gpu_share": _SHARE if setting.cuda else 1.0, "server_flags": "--chunked-prefill-size 256",
    }  # fmt: skip
    return HostedSglangEngine(SglangConfig(**given | settings))


@cache
def _shared_engine(setting: Setting) -> HostedSglangEngine:
    """Server that the checks of this process share; it ends with the process."""

    async def start() -> HostedSglangEngine:
        return new_engine(setting)

    return _loop().run(start())


def on_shared(setting: Setting, use: Callable[[HostedSglangEngine], Awaitable[T]]) -> T:
    """Result of a coroutine on the shared server."""

    async def run() -> T:
        return await use(_shared_engine(setting))

    _shared_engine(setting)  # outside of the loop that runs
    return _loop().run(run())


def on_another(
    setting: Setting, use: Callable[[HostedSglangEngine], Awaitable[T]], **settings: Any
) -> T:
    """Result of a coroutine on a new server."""

    async def run() -> T:
        engine = new_engine(setting, **settings)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return _loop().run(run())


def server_start(setting: Setting) -> Numbers:
    """Seconds until a server has answered its first sampling and scoring requests."""
    started = time.perf_counter()
    gap = float(on_shared(setting, decode_gaps).max())
    return {"seconds": time.perf_counter() - started, "gap": gap}


def handshake(setting: Setting) -> Numbers:
    """Handshake of a run: the shared server, an embedded teacher, the learner, tokenizers."""
    student, teacher = setting.pair()
    config = LearnerConfig.of(model=student, total_steps=1, device=setting.device)
    learner = Learner(config, setting.scratch)

    async def learner_logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return learner.logprobs(rows_D)

    async def use(engine: HostedSglangEngine) -> Any:
        taught = EmbeddedEngine(model_path=teacher, dtype=setting.dtype, device=setting.device)
        try:
            return await compare_all(
                policies={"policy": engine}, teachers={"teacher": taught, "itself": engine},
                learner=learner_logprobs, tokenizer=probe_tokenizer(load_tokenizer(student)),
                temperature=TEMPERATURE, learner_dtype=config.dtype, deadline_s=_CALL_S,
            )  # fmt: skip
        finally:
            await taught.close()

    report = on_shared(setting, use)
    require(report.agrees, report.verdict())
    gaps = [made.max_gap for made in report.comparisons if not made.must_differ]
    return {"comparisons": float(len(report.comparisons)), "largest_gap": max(gaps)}


def mixed_temperatures(setting: Setting) -> Numbers:
    """Rows at four temperatures in one batch, also in chunks, compared with log-softmax."""
    rng = np.random.default_rng(6)
    requests = [
        ScoreRequest(
            tokens_T=rng.integers(2, VOCAB_SIZE, 40 + 12 * i).astype(np.int32), start=8,
            temperatures=tuple(dict.fromkeys((_TEMPERATURES[i % 4], 1.0))),
        )
        for i in range(24)
    ]  # fmt: skip
    model = load_causal_lm(setting.pair()[0], dtype=torch.float32, device=setting.device).eval()

    async def use(engine: HostedSglangEngine) -> list[float]:
        gaps = []
        for request, score in zip(requests, await engine.score(requests), strict=True):
            for t, found_N in zip(request.temperatures, score.logprobs_by_temperature, strict=True):
                gaps += np.abs(found_N - _truth(model, request, t)).tolist()
        gaps += (await decode_gaps(engine)).tolist()
        return gaps

    gaps = on_shared(setting, use)
    made: dict[str, float] = {
        "positions": float(len(gaps)),
        "max_gap": max(gaps),
        "mean_gap": float(np.mean(gaps)),
    }
    allowed = tolerance_at(setting.dtype, min(_TEMPERATURES))
    require(made["max_gap"] < allowed, f"log-probs are off: {made}")
    require(made["mean_gap"] < allowed * MEAN_SHARE, f"log-probs are off: {made}")
    return {**made}


@torch.no_grad()
def _truth(model: Any, request: ScoreRequest, t: float) -> np.ndarray:
    ids_1T = torch.from_numpy(request.tokens_T.astype(np.int64))[None].to(model.device)
    log_p_TV = torch.log_softmax(model(input_ids=ids_1T).logits[0].float() / t, dim=-1)
    chosen_N = log_p_TV[request.start - 1 : -1].gather(1, ids_1T[0, request.start :, None])[:, 0]
    return chosen_N.cpu().numpy()


async def decode_gaps(engine: HostedSglangEngine, samples: int = 8) -> np.ndarray:
    """Samples' own log-probs (decode) minus those of the same tokens when scored (prefill)."""
    prompt_T = np.arange(3, 19, dtype=np.int32)
    sampling = TrainSampling(temperature=TEMPERATURE, max_new_tokens=64)
    made = await engine.generate(
        GenerateRequest(prompt_tokens_T=prompt_T, sampling=sampling, num_samples=samples, seed=0)
    )
    scores = await engine.score([
        ScoreRequest(
            tokens_T=np.concatenate([prompt_T, sample.tokens_T]), start=len(prompt_T),
            temperatures=(TEMPERATURE,),
        )
        for sample in made
    ])  # fmt: skip
    pairs = zip(made, scores, strict=True)
    return np.concatenate([
        np.abs(sample.logprobs_T - score.logprobs_by_temperature[0]) for sample, score in pairs
    ])  # fmt: skip


def captured_graphs(setting: Setting) -> Numbers:
    """Decode against prefill with CUDA graphs and without, and the graphs' speed-up."""

    async def use(engine: HostedSglangEngine) -> tuple[float, float]:
        gap = float((await decode_gaps(engine)).max())
        started = time.perf_counter()
        await decode_gaps(engine, samples=32)
        return gap, time.perf_counter() - started

    with_gap, with_s = on_shared(setting, use)
    without_gap, without_s = on_another(setting, use, server_flags="--disable-cuda-graph")
    largest = max(with_gap, without_gap)
    require(largest < tolerance_at(setting.dtype, TEMPERATURE), f"off by {largest:.3g} nats")
    return {"gap_with": with_gap, "gap_without": without_gap, "speed_up": without_s / with_s}
