"""The checks by name, in the order in which they run: what each looks at, and how long it may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu import engine_checks, learner_checks
from tests.gpu.setting import Setting


@dataclass(frozen=True, slots=True)
class Check:
    """Returns numbers for the report; raises `Failed`, or `Skipped`."""

    run: Callable[[Setting], dict[str, float]]
    deadline_s: float = 90.0

    @property
    def what(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or "").splitlines()[0]


CHECKS = {
    "gradient_truth": Check(learner_checks.gradient_truth),
    "full_divergence": Check(learner_checks.full_divergence),
    "bfloat16_step": Check(learner_checks.bfloat16_step),
    "long_attention": Check(learner_checks.long_attention),
    "packed_attention": Check(learner_checks.packed_attention),
    "planned_memory": Check(learner_checks.planned_memory),
    "utilisation": Check(learner_checks.utilisation),
    "push": Check(engine_checks.push, 180.0),
    "push_ipc": Check(engine_checks.push_ipc, 180.0),
    "handshake": Check(engine_checks.handshake, 240.0),
    "mixed_temperatures": Check(engine_checks.mixed_temperatures, 180.0),
    "captured_graphs": Check(engine_checks.captured_graphs, 240.0),
    "sleep": Check(engine_checks.sleep, 180.0),
    "run_of_20": Check(engine_checks.run_of_20, 300.0),
}
