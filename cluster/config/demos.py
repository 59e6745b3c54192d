"""Settings of the demonstration."""

from __future__ import annotations

import chz

from actors.config import EngineChoice
from cluster.config.early_checks import WRITTEN_DIRECTORY
from distill.rules import above, at_least, setting


@chz.chz
class DemoConfig:
    """Distil a teacher of two-digit sums into a student that forgets to carry."""

    out: str = chz.field(
        doc="directory for data, models and runs; an earlier demo in it is removed",
        metadata=WRITTEN_DIRECTORY,
    )
    temperature: float = setting(
        above(0), default=0.7, doc="rollout temperature T; on purpose not 1"
    )
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: SGLang servers that the demo starts; embedded: transformers in the actor's "
        "process; auto: sglang if it is installed and there are GPUs, else embedded",
    )
    steps: int = setting(at_least(1), default=80, doc="optimizer steps of the distillation")
    seed: int = setting(at_least(0), default=0, doc="seed of problems, models and training")
