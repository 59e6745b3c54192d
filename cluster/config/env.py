"""The setting `env=`, wherever it stands; the environments that are named by their class alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chz

from distill.envs.base import EnvConfig
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.lookup import current_name

# chz finds a class by its name alone once its module is imported; these are, wherever `env=` is.
BUILT_IN: tuple[type[EnvConfig], ...] = (SingleTurn, ToolUse, Reading, TicTacToeGames)


class _EnvFactory(chz.factories.subclass):
    """Finds an environment's class by its name, or by a path, former ones included."""

    def from_string(self, factory: str) -> Callable[..., Any]:
        return super().from_string(current_name(factory))


def env_field(default: type[EnvConfig] = SingleTurn) -> Any:
    """A chz field of an environment's settings."""
    names = ", ".join(env.__name__ for env in BUILT_IN)
    return chz.field(
        meta_factory=_EnvFactory(EnvConfig, default_cls=default),
        default_factory=default,
        doc=f"what the model acts in: {names}, or package.module:Class; env.field=value sets its "
        "fields. docs/environments.md says what they are, and how to write one",
    )
