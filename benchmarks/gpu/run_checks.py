"""Checks of whole runs on Ray, with SGLang servers that share the learner's GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.pair_run import pair_run, teacher_of
from benchmarks.gpu.setting import Numbers, Setting

_DEADLINE_S = 500.0
# Learner, policy and teacher on one GPU.
_SHARE = 0.33


def served_run(setting: Setting) -> Numbers:
    """20 steps; the learner's weights go to the policy's server by CUDA IPC."""
    return _run(setting, "served", steps=20, estimator="sampled", colocate="share")


def states_run(setting: Setting) -> Numbers:
    """Run with a teacher's whole distributions, from hidden states of its server."""
    head: dict[str, Any] = {"teacher.head": teacher_of(setting)}
    return _run(setting, "states", estimator="full", **head)


def adapter_run(setting: Setting) -> Numbers:
    """Run with an adapter; the server loads each version beside the older ones."""
    adapter: dict[str, Any] = {"lora.rank": 16, "weights.transport": "adapter"}
    return _run(setting, "adapter", estimator="sampled", **adapter)


def sleeping_run(setting: Setting) -> Numbers:
    """Run in which the policy's server sleeps while the learner computes a step."""
    return _run(setting, "sleeping", estimator="sampled", colocate="sleep")


def turns_run(setting: Setting) -> Numbers:
    """Run in which learner, policy and teacher use the whole GPU by turns."""
    turns: dict[str, Any] = {"colocate": "sleep", "gpus_per_actor": 0.5, "teacher.gpus": "policy"}
    return _run(setting, "turns", estimator="sampled", **turns)


def _run(setting: Setting, name: str, steps: int = 5, **settings: Any) -> Numbers:
    if setting.cuda:
        settings = {"gpus_per_actor": _SHARE} | settings
    return pair_run(setting, name, steps=steps, deadline_s=_DEADLINE_S, engine="sglang", **settings)
