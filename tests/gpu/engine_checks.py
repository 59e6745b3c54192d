"""Checks of engines: the push, the handshake, T in one batch, captured graphs, sleep, a run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from actors.config import EngineConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from cluster.calibrate import main as calibrate
from cluster.config.pools import WeightsChoice
from cluster.handles.local_actor import LocalActor
from cluster.weights.publisher import Publisher
from cluster.weights.push_settings import PushSettings
from distill.delivery import TrainedGroups
from distill.engine import GenerateRequest, ScoreRequest
from distill.handshake.comparison import MEAN_SHARE, TOLERANCE
from distill.models.loading import load_causal_lm
from distill.sampling import TrainSampling
from distill.weights.tensors import PackedTensors
from tests.gpu.learner_checks import new_learner
from tests.gpu.setting import TEMPERATURE, Setting, Skipped, require
from tests.tiny import VOCAB_SIZE, make_tiny_pair

_TEMPERATURES = (0.5, 0.7, 1.0, 1.5)
_START_S, _CALL_S = 280.0, 120.0

T = TypeVar("T")


class _Slots:
    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Nobody waits for them here."""


def push(setting: Setting) -> dict[str, float]:
    """Weights into an engine on the same device, probed afterwards; beside a memcpy of them."""
    return _push(setting, "shared_memory", sglang_installed())


def push_ipc(setting: Setting) -> dict[str, float]:
    """The same into SGLang by CUDA IPC: a bucket at a time, none of it left on the GPU."""
    _require_sglang()
    if not setting.cuda:
        raise Skipped("CUDA IPC is between GPUs' processes; on a CPU tests/cluster/test_ipc.py")
    torch.cuda.reset_peak_memory_stats()
    return _push(setting, "ipc", True)


def _push(setting: Setting, choice: WeightsChoice, served: bool) -> dict[str, float]:
    learner, model = new_learner(setting, setting.dtype), setting.model()
    config = EngineConfig(
        kind="sglang" if served else "embedded", model=model, dtype=setting.dtype,
        device=setting.device, gpu_share=0.4 if setting.cuda else 1.0, start_deadline_s=_START_S,
    )  # fmt: skip
    engine: Any = LocalActor(config.engine_class, **config.arguments())
    publish = Publisher(
        {"engine": engine},
        _Slots(),
        PushSettings(
            choice=choice, served=served, device=setting.device, directory=setting.scratch,
            model=model, temperature=TEMPERATURE, learner_dtype=setting.dtype,
            probe_every=1, prove_every=1, timeout_s=_START_S,
            gpus=1,
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
            held.append(torch.cuda.memory_allocated() if setting.cuda else 0)
        gap = publish.settle()
        way = publish.describe()
    finally:
        engine.close.remote()
    copied = _memcpy_s(int(pushed["push/bytes"]), setting.device)
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


def handshake(setting: Setting) -> dict[str, float]:
    """`cluster.calibrate`: decode, prefill, teacher and learner at T, and the tokenizers."""
    _require_sglang()
    student, teacher = setting.pair()
    out = Path(setting.scratch) / "calibration.json"
    code = calibrate([
        f"student={student}", f"teacher={teacher}", f"temperature={TEMPERATURE}", "engine=sglang",
        f"device={setting.device}", f"out={out}", *_half_a_gpu(setting),
    ])  # fmt: skip
    report = json.loads(out.read_text())
    gaps = [row["max_gap"] for row in report["comparisons"] if not row["must_differ"]]
    require(code == 0, f"exit code {code}: the parties disagree by up to {max(gaps):.3g} nats")
    return {"comparisons": float(len(report["comparisons"])), "largest_gap": max(gaps)}


def _half_a_gpu(setting: Setting) -> list[str]:
    """Two servers on one GPU at the same time."""
    flags = "server_flags=--mem-fraction-static 0.3 --max-total-tokens 8192"
    return [flags] if setting.cuda else []


def _require_sglang() -> None:
    if not sglang_installed():
        raise Skipped("SGLang is not installed (make install-sglang)")


def _with_engine(
    setting: Setting, use: Callable[[HostedSglangEngine], Awaitable[T]], **settings: Any
) -> T:
    async def run() -> T:
        engine = HostedSglangEngine(
            model_path=setting.pair()[0], dtype=setting.dtype, device=setting.device,
            start_deadline_s=_START_S, request_deadline_s=_CALL_S, **settings,
        )  # fmt: skip
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def mixed_temperatures(setting: Setting) -> dict[str, float]:
    """Rows at four temperatures in one batch, in chunks too, beside plain log-softmax."""
    _require_sglang()
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
        gaps += (await _decode_gaps(engine)).tolist()
        return gaps

    gaps = _with_engine(setting, use, flags="--chunked-prefill-size 256")
    made = {"positions": float(len(gaps)), "max_gap": max(gaps), "mean_gap": float(np.mean(gaps))}
    allowed = TOLERANCE[setting.dtype] / min(_TEMPERATURES)
    require(made["max_gap"] < allowed, f"log-probs are off: {made}")
    require(made["mean_gap"] < allowed * MEAN_SHARE, f"log-probs are off: {made}")
    return made


@torch.no_grad()
def _truth(model: Any, request: ScoreRequest, t: float) -> np.ndarray:
    ids_1T = torch.from_numpy(request.tokens_T.astype(np.int64))[None].to(model.device)
    log_p_TV = torch.log_softmax(model(input_ids=ids_1T).logits[0].float() / t, dim=-1)
    chosen_N = log_p_TV[request.start - 1 : -1].gather(1, ids_1T[0, request.start :, None])[:, 0]
    return chosen_N.cpu().numpy()


async def _decode_gaps(engine: HostedSglangEngine, samples: int = 8) -> np.ndarray:
    """Samples' own log-probs (decode) less those of the same tokens as given ones (prefill)."""
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


def captured_graphs(setting: Setting) -> dict[str, float]:
    """Decode beside prefill with CUDA graphs and without, and what the graphs are worth."""
    _require_sglang()
    if not setting.cuda:
        raise Skipped("a CPU has no CUDA graphs; decode against prefill is part of mixed T")

    async def use(engine: HostedSglangEngine) -> tuple[float, float]:
        gap = float((await _decode_gaps(engine)).max())
        started = time.perf_counter()
        await _decode_gaps(engine, samples=32)
        return gap, time.perf_counter() - started

    with_gap, with_s = _with_engine(setting, use)
    without_gap, without_s = _with_engine(setting, use, flags="--disable-cuda-graph")
    made = {"gap_with": with_gap, "gap_without": without_gap, "speed_up": without_s / with_s}
    allowed = TOLERANCE[setting.dtype] / TEMPERATURE
    require(max(with_gap, without_gap) < allowed, f"decode disagrees with prefill: {made}")
    return made


def sleep(setting: Setting) -> dict[str, float]:
    """An engine that sleeps: memory that comes back, and the same samples once weights have."""
    _require_sglang()
    student = setting.pair()[0]
    weights = PackedTensors.pack(
        dict(load_causal_lm(student, dtype=torch.float32, device="cpu").named_parameters())
    )

    async def use(engine: HostedSglangEngine) -> dict[str, float]:
        before = (await _decode_gaps(engine)).max()
        awake = _free(setting)
        await engine.sleep()
        asleep = _free(setting)
        await engine.load_weights(weights, 1)
        after = (await _decode_gaps(engine)).max()
        return {
            "freed_gib": (asleep - awake) / (1 << 30),
            "taken_back_gib": (asleep - _free(setting)) / (1 << 30),
            "gap_before": float(before),
            "gap_after": float(after),
        }

    made = _with_engine(setting, use, sleeps=True)
    allowed = TOLERANCE[setting.dtype] / TEMPERATURE
    require(made["gap_after"] < allowed, f"it is not as it was: {made}")
    require(not setting.cuda or made["freed_gib"] > 1, f"next to nothing was released: {made}")
    return made


def _free(setting: Setting) -> int:
    return torch.cuda.mem_get_info()[0] if setting.cuda else 0


def run_of_20(setting: Setting) -> dict[str, float]:
    """recipe=opd on Ray: 20 steps, every group trained once by the audit of its journal."""
    root = Path(setting.scratch) / "pair"
    root.mkdir(exist_ok=True)
    pair, out = make_tiny_pair(root), Path(setting.scratch) / "run"
    shutil.rmtree(out, ignore_errors=True)
    shares = {"gpus_per_actor": 0.3} if setting.cuda else {}
    settings = {
        "student": pair.student, "teacher": pair.teacher, "prompts": pair.prompts, "out": out,
        "temperature": TEMPERATURE, "steps": 20, "prompts_per_step": 4, "group_size": 4,
        "max_new_tokens": 8, "lr": 1e-3, "eval_size": 0, "device": setting.device,
    } | shares  # fmt: skip
    _command("cluster.train", "recipe=opd", *(f"{k}={v}" for k, v in settings.items()))
    _command("cluster.audit", f"out={out}")
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "time/step" in step]
    require(len(steps) == 20, f"{len(steps)} steps of 20")
    return {
        "tokens_per_s": float(np.median([step["tokens_per_s"] for step in steps[2:]])),
        "logprob_gap": float(np.mean([step["train/logprob_gap"] for step in steps])),
        "kl_first": steps[0]["opd/reverse_kl"],
        "kl_last": steps[-1]["opd/reverse_kl"],
    }


def _command(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"}, timeout=_START_S, check=False,
    )  # fmt: skip
    last = (done.stdout + done.stderr).strip().splitlines()[-3:]
    require(done.returncode == 0, f"{module} ended with {done.returncode}: {' / '.join(last)}")
