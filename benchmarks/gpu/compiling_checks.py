"""Check of compiled layers in the sharded learner, by itself: compiling takes minutes."""

from __future__ import annotations

from benchmarks.gpu.setting import Numbers, Setting
from benchmarks.gpu.sharding_checks import sharded


def compiled_step(setting: Setting) -> Numbers:
    """Seconds, MFU and memory of sharded steps with compiled layers, by length of the row."""
    return sharded(setting, compiled=True)
