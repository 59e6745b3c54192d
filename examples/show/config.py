"""Settings of `python -m examples.show`."""

from __future__ import annotations

from typing import Literal

import chz

from actors.config import EngineChoice
from cluster.config.early_checks import WRITTEN_DIRECTORY

Task = Literal["tools", "rl_tools", "selfplay", "condensed"]


@chz.chz
class ShowConfig:
    """Run a recipe on a small task, with generated data and models."""

    task: Task = chz.field(doc="task and recipe to run")
    out: str = chz.field(
        doc="directory for data, models and the run; an earlier show is removed",
        metadata=WRITTEN_DIRECTORY,
    )
    temperature: float = chz.field(default=0.7, doc="rollout temperature T")
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang, embedded, or auto: sglang if it is installed and there are GPUs",
    )
    steps: int | None = chz.field(default=None, doc="optimizer steps of the recipe")
    seed: int = chz.field(default=0, doc="seed of data, models and training")
