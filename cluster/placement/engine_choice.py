"""`engine=auto` of a run: decided once, before the run's checks, which depend on it."""

from __future__ import annotations

from typing import TypeVar

from actors.config import engine_note
from cluster.config.on_policy import RolloutConfig
from distill.settings import changed

Config = TypeVar("Config", bound=RolloutConfig)


def with_engine(config: Config) -> tuple[Config, str]:
    """The settings with a name for engine=auto, and a line that says why; else an empty one.

    The device is chosen already (`with_device`).

    Raises:
        ConfigError: SGLang was asked for and is not installed; or another setting needs it.
    """
    kind = config.engine.kind_on(config.cluster.device)
    said = "" if config.train_from is not None else engine_note(config.engine.kind, kind)
    return changed(config, engine=kind), said
