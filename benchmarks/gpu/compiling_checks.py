"""Check of compiled layers in the sharded learner, apart from others: compiling takes minutes."""

from __future__ import annotations

from benchmarks.gpu.setting import Numbers, Setting
from benchmarks.gpu.sharding_checks import sharded


def compiled_step(setting: Setting) -> Numbers:
    """Seconds, MFU and memory of sharded steps with compiled layers, by row length."""
    return sharded(setting, compiled=True)
