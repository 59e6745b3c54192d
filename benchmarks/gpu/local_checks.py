"""Check of a whole run in one process: what rollouts, scoring and learning reach."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.commands import trained
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require, rows_of
from benchmarks.peak import peak_flops
from distill.models.loading import load_config, meta_causal_lm
from learner.flops import ModelFlops

_DEADLINE_S = 500.0
_STEPS, _WARM_UP = 20, 2


def embedded_run(setting: Setting) -> Numbers:
    """recipe=opd of a random 0.6 B student and 1.7 B teacher: tokens/s and MFU of every stage.

    Each step waits for its own rollouts (max_staleness=0), so the stages follow one another.
    """
    student, teacher = setting.model("0.6B", seed=1), setting.model("1.7B", seed=2)
    prompts, out = Path(setting.scratch) / "prompts.jsonl", Path(setting.scratch) / "local"
    lines = [json.dumps({"prompt": f"{a} + {b} ="}) for a in range(40) for b in range(40)]
    prompts.write_text("\n".join(lines) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    groups, size, length = setting.choose(2, 16), setting.choose(2, 8), setting.choose(8, 64)
    steps = trained(
        _DEADLINE_S, out, _STEPS, student=student, teacher=teacher, prompts=prompts, local=True,
        engine="embedded", device=setting.device, temperature=TEMPERATURE, max_staleness=0,
        prompts_per_step=groups, group_size=size, max_new_tokens=length, lr=1e-5, eval_size=0,
        checkpoint_every=_STEPS, estimator="sampled",
    )[_WARM_UP:]  # fmt: skip
    made: Numbers = {}
    rows, mean = groups * size, median(step["rollout/response_length"] for step in steps)
    stages = {"rollout": (student, "time/rollout"), "scoring": (teacher, "time/teacher")}
    for name, (model, clock) in stages.items():
        taken = median(step[clock] for step in steps)
        made[f"{name}_tokens_per_s"] = rows * mean / taken
        made[f"{name}_mfu"] = _forward_flops(model, rows, round(mean)) / taken / _peak(setting)
    learning = [
        sum(step[f"time/{part}"] for part in ("forward", "backward", "optimizer")) for step in steps
    ]
    made["learner_tokens_per_s"] = rows * mean / median(learning)
    made["learner_mfu"] = 1e12 * median(s["train/tflops_per_s"] for s in steps) / _peak(setting)
    made["push_seconds"] = median(step["push/seconds"] for step in steps)
    made["step_seconds"] = median(step["time/step"] for step in steps)
    require(made["step_seconds"] > 0, "the steps took no time")
    return made


def _forward_flops(model: str, rows: int, length: int) -> float:
    """FLOPs of the forward passes over rows of so many tokens, prompts left out."""
    flops = ModelFlops.of(meta_causal_lm(model))
    assert flops is not None
    shapes: Any = rows_of(load_config(model), count=rows, length=2 * length, seed=0)
    return flops.forward(shapes) / 2


def _peak(setting: Setting) -> float:
    return peak_flops(setting.device, getattr(torch, setting.dtype))
