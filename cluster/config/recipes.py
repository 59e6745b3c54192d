"""Settings of a run, by the name of its recipe."""

from __future__ import annotations

from typing import Any, Literal, overload

import chz
from chz.blueprint._entrypoint import EntrypointException

from cluster.config.common import CommonConfig
from cluster.config.on_policy import OpdConfig, RlConfig
from cluster.config.presets import (
    OpdCondensedConfig,
    OpdToolsConfig,
    RlToolsConfig,
    SelfplayConfig,
)
from cluster.config.supervised import DpoConfig, RewardModelConfig, SftConfig
from distill.errors import ConfigError
from distill.lookup import known_names
from distill.settings import by_path

CONFIGS: dict[str, type[CommonConfig]] = {
    "opd": OpdConfig,
    "rl": RlConfig,
    "opd_tools": OpdToolsConfig,
    "rl_tools": RlToolsConfig,
    "selfplay": SelfplayConfig,
    "opd_condensed": OpdCondensedConfig,
    "sft": SftConfig,
    "dpo": DpoConfig,
    "reward_model": RewardModelConfig,
}


def config_of(recipe: str) -> type[CommonConfig]:
    """Class of a recipe's settings. Raises ConfigError for an unknown recipe."""
    if recipe not in CONFIGS:
        raise ConfigError(
            f"recipe={recipe} is unknown; {known_names(recipe, CONFIGS)}",
            field="recipe",
            value=recipe,
        )
    return CONFIGS[recipe]


@overload
def make(recipe: Literal["opd", "opd_tools", "opd_condensed"], /, **settings: Any) -> OpdConfig: ...
@overload
def make(recipe: Literal["rl", "rl_tools", "selfplay"], /, **settings: Any) -> RlConfig: ...
@overload
def make(recipe: Literal["sft"], /, **settings: Any) -> SftConfig: ...
@overload
def make(recipe: Literal["dpo"], /, **settings: Any) -> DpoConfig: ...
@overload
def make(recipe: Literal["reward_model"], /, **settings: Any) -> RewardModelConfig: ...
@overload
def make(recipe: str, /, **settings: Any) -> CommonConfig: ...


def make(recipe: str, /, **settings: Any) -> CommonConfig:
    """Make a run's settings from values; `by_path` says how they are named.

    Raises:
        ConfigError: the recipe or a name is unknown, a required setting is missing, or a value is
            refused.
        TypeError: a value has another type than its setting.
    """
    plan = chz.Blueprint(config_of(recipe)).apply(by_path(settings))
    try:
        return plan.make()
    except EntrypointException as error:
        raise ConfigError(" ".join(str(error).split())) from error
