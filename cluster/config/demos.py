"""Settings of the demonstration."""

from __future__ import annotations

import chz

from actors.config import EngineChoice
from cluster.config.early_checks import WRITTEN_DIRECTORY


@chz.chz
class DemoConfig:
    """Distils a teacher of two-digit sums into a student that forgets to carry."""

    out: str = chz.field(
        doc="directory for data, models and runs; an earlier demo in it is removed",
        metadata=WRITTEN_DIRECTORY,
    )
    temperature: float = chz.field(default=0.7, doc="rollout temperature T; on purpose not 1")
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: SGLang servers that the demo starts; embedded: transformers in the actor's "
        "process; auto: sglang if it is installed and there are GPUs, else embedded",
    )
    steps: int = chz.field(default=80, doc="optimizer steps of the distillation")
    seed: int = chz.field(default=0, doc="seed of problems, models and training")
