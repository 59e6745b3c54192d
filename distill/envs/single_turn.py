"""One prompt, one response, one reward: the smallest environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.bonuses import phrase_bonuses
from distill.envs.base import (
    Env,
    EnvConfig,
    EnvDataset,
    EnvGroupBuilder,
    Setting,
    StepResult,
    require_path,
)
from distill.interfaces import Sample, Sampler
from distill.prompts import Prompt
from distill.rewards import RewardFunction, answer_of, exact_match, judge
from distill.types import TokenArray


class SingleTurnEnv(Env):
    """Pays `reward(response, answer)`, 0 where the prompt has no answer, and the prompt's bonuses.

    The response is the text of the sample without special tokens.

    A process computes one reward at a time (`distill.rewards.judge`), so n rollout workers check n
    responses at a time. Checks that take a core want `rollout_cpus=1` and so many workers
    as there are cores for them; those that wait (for a sandbox, a server) want more workers
    without CPUs, or an environment of their own whose `step` awaits.
    """

    def __init__(
        self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, reward: RewardFunction
    ) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._reward = reward

    async def initial_observation(self) -> TokenArray:
        return self._prompt.tokens_T

    async def step(self, sample: Sample) -> StepResult:
        bonuses = self._prompt.bonuses
        return StepResult(
            reward=await self._judge(sample),
            bonuses_T=phrase_bonuses(sample.tokens_T, self._tokenizer, bonuses)
            if bonuses
            else None,
        )

    async def _judge(self, sample: Sample) -> float:
        answer = self._prompt.answer
        if answer is None:
            return 0.0
        text = str(self._tokenizer.decode(sample.tokens_T.tolist(), skip_special_tokens=True))
        return await judge(self._reward, text, answer)


@dataclass(frozen=True, kw_only=True)
class SingleTurnGroupBuilder(EnvGroupBuilder):
    """G environments on the same prompt."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    group_size: int
    reward: RewardFunction = exact_match

    def make_envs(self, models: Mapping[str, Sampler]) -> Sequence[Env]:
        return [
            SingleTurnEnv(self.prompt, self.tokenizer, self.reward) for _ in range(self.group_size)
        ]


def facts_of(prompt: Prompt) -> dict[str, Any]:
    """What the prompt says of its group, as fields of `EnvGroupBuilder`."""
    return {
        "teacher": prompt.teacher,
        "tag": prompt.tag,
        "teacher_tokens_T": prompt.teacher_tokens_T,
        "judged": prompt.answer is not None,
        "pays_bonuses": bool(prompt.bonuses),
    }


class PromptDataset(EnvDataset):
    """A file of prompts; the responses to one answer alike where the reward can tell."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardFunction = exact_match,
    ) -> None:
        self.prompts_P = prompts_P
        self._tokenizer = tokenizer
        self._reward = reward
        self.answer = answer_of(reward)

    def __len__(self) -> int:
        return len(self.prompts_P)

    def builder(self, problem: int, group_size: int) -> SingleTurnGroupBuilder:
        prompt = self.prompts_P[problem]
        return SingleTurnGroupBuilder(
            **facts_of(prompt),
            prompt=prompt,
            tokenizer=self._tokenizer,
            group_size=group_size,
            reward=self._reward,
        )

    def line(self, problem: int) -> int:
        return self.prompts_P[problem].line


@chz.chz
class SingleTurn(EnvConfig):
    """env=SingleTurn, the default: a prompt, a response, and `reward` against the `answer`."""

    def __call__(self, path: str | None, setting: Setting) -> PromptDataset:
        prompts_P = setting.prompts(require_path(path, "SingleTurn"))
        return PromptDataset(prompts_P, setting.tokenizer, setting.reward)
