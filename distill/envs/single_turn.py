"""One prompt, one response, one reward: the smallest environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.envs.base import Env, StepResult
from distill.interfaces import Sample
from distill.prompts import Prompt, PromptStream
from distill.rewards import exact_match
from distill.types import TokenArray


class SingleTurnEnv:
    """The reward is `exact_match` with the prompt's answer, and 0 where it has none."""

    def __init__(self, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer

    def initial_observation(self) -> TokenArray:
        return self._prompt.tokens_T

    async def step(self, sample: Sample) -> StepResult:
        if self._prompt.answer is None:
            return StepResult(reward=0.0)
        text = str(self._tokenizer.decode(sample.tokens_T.tolist(), skip_special_tokens=True))
        return StepResult(reward=exact_match(text, self._prompt.answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTurnGroupBuilder:
    """G environments on the same prompt."""

    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    group_size: int

    def make_envs(self) -> Sequence[Env]:
        return [SingleTurnEnv(self.prompt, self.tokenizer) for _ in range(self.group_size)]


class PromptDataset:
    """Group id -> environments of the prompt at that place in the run's stream."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        group_size: int,
        seed: int,
    ) -> None:
        self._prompts_P = prompts_P
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._stream = PromptStream(len(prompts_P), seed)

    def builder(self, group_id: int) -> SingleTurnGroupBuilder:
        return SingleTurnGroupBuilder(
            prompt=self._prompts_P[self._stream.index(group_id)],
            tokenizer=self._tokenizer,
            group_size=self._group_size,
        )
