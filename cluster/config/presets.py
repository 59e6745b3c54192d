"""Recipes that are opd or rl with an environment of their own: settings with other defaults."""

from __future__ import annotations

import chz

from cluster.config.env import env_field
from cluster.config.on_policy import OpdConfig, RlConfig
from distill.envs.base import EnvConfig
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.tool_use import ToolUse


@chz.chz
class OpdToolsConfig(OpdConfig):
    """recipe=opd_tools: OPD on questions that are answered with tools (env=ToolUse)."""

    env: EnvConfig = env_field(ToolUse)

    @property
    def recipe(self) -> str:
        return "opd_tools"


@chz.chz
class RlToolsConfig(RlConfig):
    """recipe=rl_tools: GRPO on questions that are answered with tools (env=ToolUse)."""

    env: EnvConfig = env_field(ToolUse)

    @property
    def recipe(self) -> str:
        return "rl_tools"


@chz.chz
class SelfplayConfig(RlConfig):
    """recipe=selfplay: the policy plays against itself, tic-tac-toe for a start."""

    env: EnvConfig = env_field(TicTacToeGames)

    @property
    def recipe(self) -> str:
        return "selfplay"


@chz.chz
class OpdCondensedConfig(OpdConfig):
    """recipe=opd_condensed: OPD on documents longer than the context (env=Reading)."""

    env: EnvConfig = env_field(Reading)

    @property
    def recipe(self) -> str:
        return "opd_condensed"
