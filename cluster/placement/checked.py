"""Checks of an on-policy run before it: of the run itself, of its dry run and of its rehearsal."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config.estimator import with_estimator
from cluster.config.on_policy import OpdConfig, RolloutConfig
from cluster.config.rollout_checks import RolloutInputs, check_rollout
from cluster.placement.device_choice import with_device
from cluster.placement.engine_choice import with_engine


def checked(
    config: RolloutConfig, say: Callable[[str], None]
) -> tuple[RolloutConfig, RolloutInputs]:
    """Choose what is set to `auto` (device, engine, estimator), and check the run.

    Args:
        say: prints a line for each choice.

    Raises:
        IsothermError: the run cannot work as it is set.
    """
    config, device = with_device(config)
    config, engine = with_engine(config)
    estimator = None
    if isinstance(config, OpdConfig):
        config, estimator = with_estimator(config)
    for line in filter(None, (device, engine, estimator)):
        say(line)
    return config, check_rollout(config)
