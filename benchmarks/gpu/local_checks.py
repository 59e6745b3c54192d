"""Check of a whole run in one process: speed of rollouts, scoring and learning."""

from __future__ import annotations

from benchmarks.gpu.pair_run import pair_run
from benchmarks.gpu.setting import Numbers, Setting

_DEADLINE_S = 500.0


def embedded_run(setting: Setting) -> Numbers:
    """20 steps without Ray, with embedded engines."""
    return pair_run(
        setting, "local", steps=20, deadline_s=_DEADLINE_S, local=True, engine="embedded",
        estimator="sampled",
    )  # fmt: skip
