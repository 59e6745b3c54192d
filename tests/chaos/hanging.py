"""Environment in which one in so many episodes hangs, but not when its group restarts."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import chz

from distill.engine import Sample, SamplingModel
from distill.envs.base import Env, EnvConfig, EnvContext, StepResult
from distill.envs.single_turn import (
    PromptDataset,
    SingleTurn,
    SingleTurnEnv,
    SingleTurnGroupBuilder,
)

# Far longer than any other episode or step.
_HANG_S = 30.0
_ONE_IN = 40


def hanging(tickets: Path) -> dict[str, object]:
    """Settings of a run with this environment and `on_stale=restart`."""
    return {
        "env": "tests.chaos.hanging:Hanging", "env.tickets": tickets, "on_stale": "restart",
    }  # fmt: skip


class HangingEnv(SingleTurnEnv):
    """Environment in which every `_ONE_IN`th episode of all processes hangs.

    When the episode is played again, it has another number.
    """

    def __init__(self, tickets: str, *given: Any) -> None:
        super().__init__(*given)
        self._tickets = tickets

    async def step(self, sample: Sample) -> StepResult:
        if _draw(self._tickets) % _ONE_IN == 0:
            await asyncio.sleep(_HANG_S)
        return await super().step(sample)


def _draw(path: str) -> int:
    """Next number of a counter that all processes share."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, b".")
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


@dataclass(frozen=True, kw_only=True)
class _HangingGroupBuilder(SingleTurnGroupBuilder):
    tickets: str

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        given = (self.prompt, self.tokenizer, self.reward, self.format, models)
        return [HangingEnv(self.tickets, *given) for _ in range(self.group_size)]


class _HangingDataset(PromptDataset):
    tickets = ""

    def builder(self, problem: int, group_size: int) -> SingleTurnGroupBuilder:
        plain = super().builder(problem, group_size)
        given = {field.name: getattr(plain, field.name) for field in fields(plain)}
        return _HangingGroupBuilder(**given, tickets=self.tickets)


@chz.chz
class Hanging(SingleTurn):
    """env=tests.chaos.hanging:Hanging; evaluations do not hang."""

    tickets: str = chz.field(doc="file that counts the episodes of all processes")

    def evaluation(self) -> EnvConfig:
        return SingleTurn()

    def __call__(self, path: str | None, setting: EnvContext) -> PromptDataset:
        plain = super().__call__(path, setting)
        made = _HangingDataset(plain.problems_P, setting.tokenizer, setting.reward)
        made.tickets = self.tickets
        return made
