"""Settings of the demonstrations."""

from __future__ import annotations

from typing import Literal

import chz

from actors.config import EngineChoice
from distill.errors import ConfigError

Task = Literal["tools", "rl_tools", "selfplay", "condensed"]


@chz.chz
class DemoConfig:
    """Distils a teacher of two-digit sums into a student that forgets to carry."""

    out: str = chz.field(
        doc="directory for data, models and runs; an earlier demo in it is removed"
    )
    temperature: float = chz.field(default=0.7, doc="rollout temperature T; on purpose not 1")
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: servers of our own; embedded: transformers in the actor's process; auto: "
        "sglang where it is installed",
    )
    steps: int = chz.field(default=120, doc="optimizer steps of the distillation")
    seed: int = chz.field(default=0, doc="seed of problems, models and training")


@chz.chz
class ShowConfig:
    """Runs a recipe on a small world that it makes itself."""

    task: Task = chz.field(doc="what is shown")
    out: str = chz.field(doc="directory for data, models and the run; an earlier show is removed")
    temperature: float = chz.field(default=0.7, doc="rollout temperature T; on purpose not 1")
    engine: EngineChoice = chz.field(
        default="auto", doc="sglang, embedded, or auto: sglang where it is installed"
    )
    steps: int | None = chz.field(default=None, doc="optimizer steps of the recipe")
    seed: int = chz.field(default=0, doc="seed of data, models and training")


@chz.chz
class OpdVsRlConfig:
    """Counts the optimizer steps that OPD and GRPO need from the same student."""

    out: str = chz.field(doc="directory for data, models and runs; the same command goes on in it")
    temperature: float = chz.field(default=0.7, doc="rollout temperature T")
    seeds: int = chz.field(default=3, doc="runs of each contender's best settings")
    steps: int | None = chz.field(
        default=None, doc="at most so many optimizer steps per run, for a quick look"
    )
    seed: int = chz.field(default=0, doc="seed of problems, models and the first run")

    @chz.validate
    def _in_range(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds} must be at least 1")
