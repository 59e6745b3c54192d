"""Settings classes by name of the recipe, including variants of opd and rl for an environment."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, overload

import chz

from cluster.config.arguments import built
from cluster.config.common import CommonConfig
from cluster.config.env import env_field
from cluster.config.files import by_name
from cluster.config.on_policy import RlConfig
from cluster.config.opd import OpdConfig
from cluster.config.supervised import DpoConfig, RewardModelConfig, SftConfig
from distill.envs.base import EnvConfig
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError
from distill.lookup import known_names


@chz.chz
class OpdToolsConfig(OpdConfig):
    """recipe=opd_tools: OPD on questions that are answered with tools (env=ToolUse)."""

    recipe: ClassVar[str] = "opd_tools"
    summary: ClassVar[str] = "opd on questions answered with tools"

    env: EnvConfig = env_field(ToolUse)


@chz.chz
class RlToolsConfig(RlConfig):
    """recipe=rl_tools: GRPO on questions that are answered with tools (env=ToolUse)."""

    recipe: ClassVar[str] = "rl_tools"
    summary: ClassVar[str] = "rl on questions answered with tools"

    env: EnvConfig = env_field(ToolUse)


@chz.chz
class SelfplayConfig(RlConfig):
    """recipe=selfplay: the policy plays against itself, tic-tac-toe for a start."""

    recipe: ClassVar[str] = "selfplay"
    summary: ClassVar[str] = "rl on games of two, both seats trained"

    env: EnvConfig = env_field(TicTacToeGames)


@chz.chz
class OpdCondensedConfig(OpdConfig):
    """recipe=opd_condensed: OPD on documents longer than the context (env=Reading)."""

    recipe: ClassVar[str] = "opd_condensed"
    summary: ClassVar[str] = "opd on documents longer than the context"

    env: EnvConfig = env_field(Reading)


CONFIGS: dict[str, type[CommonConfig]] = {
    kind.recipe: kind
    for kind in (
        OpdConfig, RlConfig, OpdToolsConfig, RlToolsConfig, SelfplayConfig, OpdCondensedConfig,
        SftConfig, DpoConfig, RewardModelConfig,
    )
}  # fmt: skip


def config_of(recipe: str) -> type[CommonConfig]:
    """Class of a recipe's settings. Raises ConfigError for an unknown recipe."""
    if recipe not in CONFIGS:
        raise ConfigError(
            f"recipe={recipe} is unknown; {known_names(recipe, CONFIGS)}",
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
    """Make a run's settings from values by name; nested settings are a mapping.

    Raises:
        ConfigError: the recipe or a name is unknown, a required setting is missing, or a value is
            invalid.
    """
    kind = config_of(recipe)
    return built(kind, by_name(kind, settings))
