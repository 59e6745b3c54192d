"""The learner's step: seconds by stage, use of the machine, and the effect of other settings.

Every measurement is a process of its own. Variants that are compared take the same steps in one
process, alternately, and a ratio is the median of the ratios of single steps, so that other load on
the machine affects both. Time is CPU time for processes with one thread, and wall time for those
with two: measure those on an idle machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.memory import kilobytes
from benchmarks.pair import VOCAB_SIZE
from benchmarks.peak import peak_flops
from distill.models.loading import load_causal_lm, new_qwen3
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.config import LearnerConfig, Precision
from learner.flops import ModelFlops
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss

# Hidden size and layers.
SIZES = ((128, 4), (256, 6), (512, 4))
PROMPTS, GROUP = 8, 4
LOSS = PolicyObjectiveLoss(objective=ObjectiveConfig())
STAGES = ("forward", "backward", "optimizer", "rest")
# Steps that warm up (moments, kernels, compiled code), and steps that medians include.
WARMUP, REPEATS = 2, 5
# Rows are longer by this factor where memory is measured, so that activations are most of it.
MEMORY_STRETCH = 4
COMPILED_SIZE = (128, 4)
_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration of the learner."""

    dtype: Precision = "float32"
    gradient_checkpointing: bool = False
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work of a child process: steps of all variants alternately, or one variant's memory."""

    model: str
    temperature: float
    variants: Sequence[Variant]
    threads: int = 1
    repeats: int = REPEATS
    memory: bool = False


def measure_learner(scratch: Path, temperature: float, repeats: int = REPEATS) -> dict[str, Any]:
    """`stages`, `checkpointing` and `compile`: lists of comparisons.

    Each comparison is a list of the results of its variants (see `_child`); ratios are to the
    first.
    """
    models = {size: new_checkpoint(scratch, *size) for size in {*SIZES, COMPILED_SIZE}}

    def compared(size: tuple[int, int], *variants: Variant, **changes: Any) -> list[Any]:
        setting = {"model": models[size], "temperature": temperature, "repeats": repeats}
        return _in_child(Case(variants=variants, **(setting | changes)))

    def with_memory(size: tuple[int, int], *variants: Variant) -> list[Any]:
        return [
            made | compared(size, variant, memory=True)[0]
            for made, variant in zip(compared(size, *variants), variants, strict=True)
        ]

    return {
        "stages": [
            compared(size, Variant(), Variant(dtype="bfloat16"), threads=threads)
            for size in SIZES
            for threads in (1, 2)
        ],
        "checkpointing": [
            with_memory(size, Variant(), Variant(gradient_checkpointing=True)) for size in SIZES
        ],
        "compile": [
            compared(COMPILED_SIZE, Variant(dtype=dtype), Variant(dtype=dtype, compiled=True))
            for dtype in ("float32", "bfloat16")
            if shutil.which("g++")  # which compiles what torch generates
        ],
    }


def new_checkpoint(scratch: Path, hidden: int, layers: int) -> str:
    """Save a model; returns its directory."""
    model = new_qwen3(
        vocab_size=VOCAB_SIZE, hidden_size=hidden, layers=layers, heads=hidden // 64,
        context_length=1024, eos_token_id=1, pad_token_id=0, seed=1,
    )  # fmt: skip
    directory = scratch / f"qwen3-{hidden}x{layers}"
    model.save_pretrained(directory)
    return str(directory)


def _in_child(case: Case) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.learner", json.dumps(asdict(case))]
    # What the compiler wrote in an earlier run is not its work in this one.
    environment = os.environ | {
        "OMP_NUM_THREADS": str(case.threads), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }  # fmt: skip
    done = subprocess.run(
        command, check=True, timeout=_DEADLINE_S, stdout=subprocess.PIPE, env=environment
    )
    return json.loads(done.stdout)


class _Subject:
    """A learner of one variant, and the durations of its steps."""

    def __init__(self, case: Case, variant: Variant) -> None:
        config = LearnerConfig.of(
            model=case.model, total_steps=WARMUP + case.repeats, threads=case.threads, device="cpu",
            dtype=variant.dtype, gradient_checkpointing=variant.gradient_checkpointing,
            compile=variant.compiled,
        )  # fmt: skip
        self.learner = Learner(config, str(Path(case.model).parent))
        self.dtype = getattr(torch, variant.dtype)
        self._clock = time.process_time if case.threads == 1 else time.perf_counter

    def step(self, rows_D: Sequence[TrainingRow]) -> dict[str, float]:
        """Wall seconds by stage and in total (`wall`); `total`: by the clock that is compared."""
        wall, total = time.perf_counter(), self._clock()
        metrics = self.learner.step(Part(rows_D=rows_D, loss=LOSS))
        wall, total = time.perf_counter() - wall, self._clock() - total
        seconds = {stage: metrics[f"time/{stage}"] for stage in STAGES[:-1]}
        rest = wall - sum(seconds.values())
        return seconds | {"rest": rest, "total": total, "wall": wall}

    def gradient(self) -> Tensor:
        """Gradient of the last step after clipping, as one vector."""
        grads = [parameter.grad for parameter in self.learner.model.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])


def uneven_rows(temperature: float, seed: int, stretch: int = 1) -> list[TrainingRow]:
    """Groups with one prompt each, of uneven lengths that depend on `seed`."""
    rng = np.random.default_rng(seed)

    def tokens(least: int, most: int) -> np.ndarray:
        return rng.integers(2, VOCAB_SIZE, stretch * rng.integers(least, most)).astype(np.int32)

    def row(prompt_T: np.ndarray) -> TrainingRow:
        tokens_T = np.concatenate([prompt_T, tokens(32, 64)])
        length = len(tokens_T)
        return TrainingRow(
            tokens_T=tokens_T,
            loss_mask_T=np.arange(length) >= len(prompt_T),
            advantages_T=rng.normal(size=length).astype(np.float32),
            behaviour_logprobs_T=np.full(length, -np.log(VOCAB_SIZE), np.float32),
            temperature=temperature,
            source=f"seed {seed}",
        )

    prompts = [tokens(40, 80) for _ in range(PROMPTS)]
    return [row(prompt_T) for prompt_T in prompts for _ in range(GROUP)]


def _child(case: Case) -> list[dict[str, Any]]:
    """Results of each variant: its settings, and its steps after `WARMUP` steps.

    `warm_up_s` is the wall time of steps that prepare something. `seconds` by stage are medians;
    `ratio` is to the first variant's step; `gap` is the relative difference of the first step's
    gradient, by its norm.
    """
    if case.memory:
        return [{"mb": _memory(case)}]
    flops = ModelFlops.of(load_causal_lm(case.model, dtype=torch.float32, device="cpu"))
    assert flops is not None
    subjects = [_Subject(case, variant) for variant in case.variants]
    peaks = [peak_flops("cpu", subject.dtype) for subject in subjects]
    taken: list[list[dict[str, float]]] = [[] for _ in subjects]
    gradients: list[Tensor] = []
    needed = []
    for seed in range(WARMUP + case.repeats):
        rows_D = uneven_rows(case.temperature, seed)
        needed.append(flops.training(rows_D))
        for subject, steps in zip(subjects, taken, strict=True):
            steps.append(subject.step(rows_D))
            if seed == 0:
                gradients.append(subject.gradient())
    norm = gradients[0].norm()
    setting = {"model": Path(case.model).name, "threads": case.threads}
    return [
        setting
        | asdict(variant)
        | _summary(steps, taken[0], needed, peak)
        | {"gap": ((gradient - gradients[0]).norm() / norm).item()}
        for variant, steps, peak, gradient in zip(
            case.variants, taken, peaks, gradients, strict=True
        )
    ]


def _summary(
    steps: list[dict[str, float]],
    first: list[dict[str, float]],
    needed: list[float],
    peak: float,
) -> dict[str, Any]:
    """Summary of a variant's steps, the first variant's, and the FLOPs of both."""
    steady = list(zip(steps, first, needed, strict=True))[WARMUP:]
    speed = median(flops / step["total"] for step, _, flops in steady)
    return {
        "warm_up_s": sum(step["wall"] for step in steps[:WARMUP]),
        "seconds": {name: median(step[name] for step, _, _ in steady) for name in steps[-1]},
        "ratio": median(step["total"] / other["total"] for step, other, _ in steady),
        "flops_per_s": speed,
        "peak_flops_per_s": peak,
        "mfu": speed / peak,
    }


def _memory(case: Case) -> float:
    """MB that a step adds at its peak to weights, moments and gradients."""
    subject = _Subject(case, case.variants[0])
    # Makes the moments; of tokens so few that malloc keeps nothing that a step could use.
    subject.step(uneven_rows(case.temperature, 0)[:1])
    rows_D = uneven_rows(case.temperature, 1, MEMORY_STRETCH)
    before = kilobytes("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    subject.step(rows_D)
    return (kilobytes("/proc/self/status", "VmHWM") - before) * 1024 / 1e6


def learner_tables(report: dict[str, Any]) -> list[Table]:
    """Console tables of `measure_learner`."""
    stages = _table("the learner's step, CPU", "dtype", "threads", "s/step", *STAGES, "GFLOP/s",
                    "peak", "MFU", "x fp32")  # fmt: skip
    for made in [made for variants in report["stages"] for made in variants]:
        seconds = made["seconds"]
        stages.add_row(
            made["model"], made["dtype"], str(made["threads"]), f"{seconds['total']:.3f}",
            *(f"{seconds[stage] / seconds['wall']:.0%}" for stage in STAGES),
            f"{made['flops_per_s'] / 1e9:.0f}", f"{made['peak_flops_per_s'] / 1e9:.0f}",
            f"{made['mfu']:.1%}", f"{made['ratio']:.2f}",
        )  # fmt: skip
    checkpointing = _table(
        "gradient checkpointing, fp32, 1 thread, CPU; MB besides weights, moments, gradients",
        "MB without", "MB with", "ratio", "s without", "s with", "ratio", "gap",
    )  # fmt: skip
    for without, made in report["checkpointing"]:
        checkpointing.add_row(
            made["model"], f"{without['mb']:.0f}", f"{made['mb']:.0f}",
            f"{made['mb'] / without['mb']:.2f}", f"{without['seconds']['total']:.3f}",
            f"{made['seconds']['total']:.3f}", f"{made['ratio']:.2f}", f"{made['gap']:.0e}",
        )  # fmt: skip
    compiled = _table("blocks compiled, 1 thread, CPU; wall time of compiling", "dtype", "s eager",
                      "s compiled", "ratio", "s to compile", "gap")  # fmt: skip
    for eager, made in report["compile"]:
        compiled.add_row(
            made["model"], made["dtype"], f"{eager['seconds']['total']:.3f}",
            f"{made['seconds']['total']:.3f}", f"{made['ratio']:.2f}",
            f"{made['warm_up_s'] - eager['warm_up_s']:.0f}", f"{made['gap']:.0e}",
        )  # fmt: skip
    return [stages, checkpointing, compiled]


def _table(title: str, *headers: str) -> Table:
    table = Table("model", title=title)
    for header in headers:
        table.add_column(header, justify="right")
    return table


if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    chosen["variants"] = [Variant(**variant) for variant in chosen["variants"]]
    print(json.dumps(_child(Case(**chosen))))
