"""Settings of a run, by the name of its recipe."""

from __future__ import annotations

from typing import Any, Literal, overload

from cluster.config.arguments import built
from cluster.config.common import CommonConfig
from cluster.config.files import by_name
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
    """Make a run's settings from values; a mapping gives the settings within one.

    Raises:
        ConfigError: the recipe or a name is unknown, a required setting is missing, or a value is
            refused.
    """
    kind = config_of(recipe)
    return built(kind, by_name(kind, settings))
