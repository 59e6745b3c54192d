"""Run of recipe=opd with a random 0.6 B student and 1.7 B teacher; speed of its stages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.gpu.commands import trained
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, rows_of
from benchmarks.peak import peak_flops
from distill.models.loading import load_config, meta_causal_lm
from learner.flops import ModelFlops

_WARM_UP = 2


def pair_run(
    setting: Setting, name: str, *, steps: int, deadline_s: float, **settings: Any
) -> Numbers:
    """Tokens/s and MFU of every stage, and the gap between log-probs of policy and learner.

    Each step waits for its own rollouts (max_staleness=0), so the stages follow one another.

    Args:
        name: name of the run's directory.
        settings: settings of the run, besides the models and the sizes of a step.
    """
    prompts, out = Path(setting.scratch) / "prompts.jsonl", Path(setting.scratch) / name
    lines = [json.dumps({"prompt": f"{a} + {b} ="}) for a in range(40) for b in range(40)]
    prompts.write_text("\n".join(lines) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    groups, size, length = setting.choose(2, 16), setting.choose(2, 8), setting.choose(8, 64)
    made = trained(
        deadline_s, out, steps, student=student_of(setting), teacher=teacher_of(setting),
        prompts=prompts, device=setting.device, temperature=TEMPERATURE, max_staleness=0,
        prompts_per_step=groups, group_size=size, max_new_tokens=length, lr=1e-5, eval_size=0,
        checkpoint_every=steps, **settings,
    )  # fmt: skip
    return _reached(setting, made[_WARM_UP:], groups * size)


def student_of(setting: Setting) -> str:
    return setting.model("0.6B", seed=1)


def teacher_of(setting: Setting) -> str:
    return setting.model("1.7B", seed=2)


def _reached(setting: Setting, steps: Sequence[Mapping[str, Any]], rows: int) -> Numbers:
    numbers: Numbers = {}
    mean = median(step["rollout/response_length"] for step in steps)
    stages = {
        "rollout": (student_of(setting), "time/rollout"),
        "scoring": (teacher_of(setting), "time/teacher"),
    }
    for name, (model, clock) in stages.items():
        taken = median(step[clock] for step in steps)
        numbers[f"{name}_tokens_per_s"] = rows * mean / taken
        numbers[f"{name}_mfu"] = _forward_flops(model, rows, round(mean)) / taken / _peak(setting)
    learning = [
        sum(step[f"time/{part}"] for part in ("forward", "backward", "optimizer")) for step in steps
    ]
    numbers["learner_tokens_per_s"] = rows * mean / median(learning)
    numbers["learner_mfu"] = 1e12 * median(s["train/tflops_per_s"] for s in steps) / _peak(setting)
    numbers["push_seconds"] = median(step["push/seconds"] for step in steps)
    numbers["step_seconds"] = median(step["time/step"] for step in steps)
    numbers["logprob_gap"] = fmean(step["train/logprob_gap"] for step in steps)
    return numbers


def _forward_flops(model: str, rows: int, length: int) -> float:
    """FLOPs of forward passes over rows with this number of tokens, without prompts."""
    flops = ModelFlops.of(meta_causal_lm(model))
    assert flops is not None
    shapes: Any = rows_of(load_config(model), count=rows, length=2 * length, seed=0)
    return flops.forward(shapes) / 2


def _peak(setting: Setting) -> float:
    return peak_flops(setting.device, getattr(torch, setting.dtype))
