"""`routing_replay=`: on by default if the student is a mixture and all parts support it."""

from __future__ import annotations

from typing import TypeVar

from cluster.config.on_policy import RolloutConfig
from distill.errors import ConfigError
from distill.models.loading import load_config, meta_causal_lm
from distill.models.routers import routers_of
from distill.routing import MixtureShape
from distill.settings import changed

Config = TypeVar("Config", bound=RolloutConfig)


def with_routing_replay(config: Config) -> tuple[Config, str]:
    """Settings with True or False for routing_replay, and a line with the reason.

    The line is empty if the student is dense, or if routing_replay is given.

    Raises:
        ConfigError: routing_replay=True is not supported by the student, learner or engine.
        CheckpointError: the student has no readable config.
    """
    wanted = config.learner.routing_replay
    if wanted is False:
        return config, ""
    if wanted is None and MixtureShape.of(load_config(config.model.path)) is None:
        return changed(config, routing_replay=False), ""
    try:
        _check(config)
    except ConfigError as error:
        if wanted:
            raise
        return changed(config, routing_replay=False), f"routing_replay=False: {error}"
    if wanted:
        return config, ""
    line = "routing_replay=True: tokens are trained through the experts that engines sent them to"
    return changed(config, routing_replay=True), f"{line} (docs/learner.md)"


def _check(config: RolloutConfig) -> None:
    routers_of(meta_causal_lm(config.model.path))  # raises for routers that cannot replay
    if config.learner.compile:
        raise ConfigError(
            "learner.routing_replay=True with compile=True: routers inside compiled layers have "
            "not been seen to replay; leave one of them out"
        )
