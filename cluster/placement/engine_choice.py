"""`engine=auto` of a run: decided once, before the run's checks, which depend on it."""

from __future__ import annotations

from typing import TypeVar

import chz

from actors.config import choose_engine, engine_note
from cluster.config.on_policy import RolloutConfig
from cluster.placement.starts_here import joins_cluster

Config = TypeVar("Config", bound=RolloutConfig)


def with_engine(config: Config) -> tuple[Config, str]:
    """The settings with a name for engine=auto, and a line that says why; else an empty one.

    A cluster that the run joins may have GPUs that this machine lacks, so SGLang is taken there.

    Raises:
        ConfigError: SGLang was asked for and is not installed; or another setting needs it.
    """
    joins = joins_cluster(local=config.local)
    device = "cuda" if joins and config.device == "auto" else config.device
    kind = choose_engine(config.engine, device)
    said = "" if config.rollouts is not None else engine_note(config.engine, kind)
    return chz.replace(config, engine=kind), said
