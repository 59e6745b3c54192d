"""One prompt, one response, one reward: the smallest environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.bonuses import phrase_bonuses
from distill.envs.base import Env, StepResult
from distill.interfaces import Sample
from distill.prompts import Prompt, PromptStream
from distill.rewards import RewardFunction, exact_match, judge
from distill.types import TokenArray


class SingleTurnEnv:
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

    def initial_observation(self) -> TokenArray:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnGroupBuilder:
    """G environments on the same prompt."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    group_size: int
    reward: RewardFunction = exact_match

    @property
    def teacher(self) -> str:
        return self.prompt.teacher

    @property
    def tag(self) -> str | None:
        return self.prompt.tag

    @property
    def teacher_tokens_T(self) -> TokenArray | None:
        return self.prompt.teacher_tokens_T

    def make_envs(self) -> Sequence[Env]:
        return [
            SingleTurnEnv(self.prompt, self.tokenizer, self.reward) for _ in range(self.group_size)
        ]


class PromptDataset:
    """Group id -> environments of the prompt at that place in the run's stream."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        group_size: int,
        seed: int,
        reward: RewardFunction = exact_match,
    ) -> None:
        self._prompts_P = prompts_P
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._reward = reward
        self._stream = PromptStream(len(prompts_P), seed)

    def builder(self, group_id: int) -> SingleTurnGroupBuilder:
        return SingleTurnGroupBuilder(
            prompt=self._prompts_P[self._stream.index(group_id)],
            tokenizer=self._tokenizer,
            group_size=self._group_size,
            reward=self._reward,
        )
