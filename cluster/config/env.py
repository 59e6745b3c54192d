"""Settings of environments and rewards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import chz

from actors.envs.agent import Agent
from actors.envs.verifiers_env import Verifiers
from distill.envs.base import EnvConfig
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from distill.envs.single_turn import SingleTurn
from distill.envs.tool_use import ToolUse
from distill.errors import ConfigError
from distill.lookup import known_names, resolve
from distill.rewards.model_reward import ModelReward
from distill.rewards.registry import (
    DEFAULT_REWARD,
    REWARD_TIMEOUT_S,
    CheckedReward,
    Reward,
    load_reward,
)
from distill.rules import above, setting
from distill.settings import ESSENTIAL, MAY_CHANGE, Section, section_field

# chz finds a class by its bare name only if its module is imported, as for these classes.
BUILT_IN: tuple[type[EnvConfig], ...] = (
    SingleTurn,
    ToolUse,
    Reading,
    TicTacToeGames,
    Agent,
    Verifiers,
)


class _EnvFactory(chz.factories.subclass):
    """Finds the class of an environment by its name, or by its path."""

    def from_string(self, factory: str) -> Callable[..., Any]:
        """Class of the given name or path. Raise ConfigError if it is not an environment."""
        names = [env.__name__ for env in BUILT_IN]
        if not re.fullmatch(r"[\w.]+(:[\w.]+)?", factory):
            raise ConfigError(
                f"env={factory} is not the name of a class; write env=ToolUse env.tools=python, "
                "with each field of the environment as a setting of its own"
            )
        if ":" in factory or "." in factory:
            path = factory if ":" in factory else ":".join(factory.rpartition(".")[::2])
            found = resolve("env", path, names)
        else:
            try:
                found = super().from_string(factory)
            except chz.factories.MetaFromString as error:
                raise ConfigError(
                    f"env={factory} is neither built in nor package.module:Class; "
                    f"{known_names(factory, names)}"
                ) from error
        if not (isinstance(found, type) and issubclass(found, EnvConfig)):
            raise ConfigError(
                f"env={factory} is not a subclass of EnvConfig (docs/environments.md)"
            )
        if "__chz_fields__" not in vars(found):
            raise ConfigError(
                f"env={factory} lacks its decorator; write @chz.chz above class {found.__name__}"
            )
        return found


def env_field(default: type[EnvConfig] = SingleTurn) -> Any:
    """A chz field for the settings of an environment."""
    names = ", ".join(env.__name__ for env in BUILT_IN)
    return chz.field(
        meta_factory=_EnvFactory(EnvConfig, default_cls=default),
        default_factory=default,
        doc=f"environment: {names}, or package.module:Class; env.field=value sets its fields "
        "(docs/environments.md)",
    )


@chz.chz
class RewardSettings:
    """Reward of a response."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "reward."
    main: ClassVar[str] = "function"

    function: str | None = chz.field(
        default=None,
        doc="reward of a response. exact_match (the default), last_number, math_equal and contains "
        "compare it with `answer`; unit_tests runs the tests in `answer` on a program, in a "
        "sandbox; matches and json_schema take a pattern or schema from `answer`; "
        "package.module:function of (response, answer); model:DIR is the score by a reward model "
        "(recipe=reward_model makes one)",
        metadata=ESSENTIAL,
    )
    timeout_s: float = setting(
        above(0),
        default=REWARD_TIMEOUT_S,
        doc="time limit in seconds of a call of reward=package.module:function; a longer call "
        "fails its group",
        metadata=MAY_CHANGE,
    )

    def load(self) -> Reward:
        """Load the reward. Raises ConfigError, see `load_reward`."""
        return load_reward(self.name, self.timeout_s)

    @property
    def name(self) -> str:
        """Name of the reward, the default if none is given."""
        return self.function or DEFAULT_REWARD


@chz.chz
class EnvSettings:
    """An environment, and the reward of environments that judge responses by a reward."""

    section: ClassVar[Section] = Section.MODEL

    env: EnvConfig = env_field()
    reward: RewardSettings = section_field(RewardSettings)

    @chz.validate
    def _reward_is_used(self) -> None:
        reward = self.reward.load()
        if self.reward.function is not None and not self.env.judges:
            raise ConfigError(
                f"reward={self.reward.function} changes nothing: env={type(self.env).__name__} has "
                "rewards of its own; leave it out",
                field="reward.function",
            )
        if self.reward.timeout_s != REWARD_TIMEOUT_S and not self.runs_user_code:
            raise ConfigError(
                f"reward.timeout_s={self.reward.timeout_s:g} changes nothing: it limits custom "
                f"functions, and reward={self.reward.name} is built in; leave it out"
            )
        if isinstance(reward, ModelReward) and not self.env.takes_reward_model:
            raise ConfigError(
                f"reward={self.reward.function} with env={type(self.env).__name__}: a reward model "
                "scores responses of env=SingleTurn, chats of env=ToolUse, and those of "
                "env=actors.envs.judge_env:Judged env.reward_model=DIR",
                field="reward.function",
            )

    @property
    def runs_user_code(self) -> bool:
        """False if rollouts run only built-in code: SingleTurn with a built-in reward."""
        return type(self.env) is not SingleTurn or isinstance(self.reward.load(), CheckedReward)

    @property
    def reward_model(self) -> str | None:
        """Checkpoint of the reward model that the run hosts, if it needs one."""
        reward = self.reward.load()
        return reward.path if isinstance(reward, ModelReward) else self.env.own_reward_model

    @property
    def judge(self) -> str:
        """Display name of the reward or environment that judges responses."""
        return self.reward.name if self.env.judges else type(self.env).__name__
