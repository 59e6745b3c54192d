"""Checks before an on-policy run, its dry run or its rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from actors.config import engine_note
from cluster.config.estimator import with_estimator
from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs, check_rollout
from cluster.placement.device_choice import with_device
from distill.settings import changed


def checked(
    config: RolloutConfig, print_line: Callable[[str], None]
) -> tuple[RolloutConfig, RolloutInputs]:
    """Replace settings that are `auto` (device, engine, estimator), and check the run.

    Args:
        print_line: prints a line for each choice.

    Raises:
        IsothermError: the run cannot work with these settings.
    """
    config, device = with_device(config)
    config, engine = with_engine(config)
    config, estimator = with_estimator(config)
    for line in filter(None, (device, engine, estimator)):
        print_line(line)
    return config, check_rollout(config)


Config = TypeVar("Config", bound=RolloutConfig)


def with_engine(config: Config) -> tuple[Config, str]:
    """Replace engine=auto by the kind of engine; return also a line with the reason.

    The line is empty if the kind is given. The device must already be chosen (`with_device`).

    Raises:
        ConfigError: SGLang is needed, by engine=sglang or another setting, and is not installed.
    """
    kind = config.engine.kind_on(config.cluster.device)
    notice = "" if config.train_from is not None else engine_note(config.engine.kind, kind)
    return changed(config, engine=kind), notice
