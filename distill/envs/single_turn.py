"""One prompt, one response, one reward: the smallest environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np

from distill.chat.responses import Response, read_response
from distill.data.prompts import FIELDS, Prompt, check_form, prompt_key
from distill.engine import Sample, SamplingModel
from distill.envs.base import (
    Env,
    EnvConfig,
    EnvContext,
    EnvGroupBuilder,
    ListedDataset,
    StepResult,
    require_path,
)
from distill.rewards.formats import Format, compiled, matches
from distill.rewards.model_reward import ModelReward, conversation, scores_of
from distill.rewards.registry import Reward, answer_of, exact_match, judge, verdict
from distill.rewards.token_rewards import phrase_bonuses
from distill.rewards.verdict import Verdict
from distill.rules import at_least, needs, readable_as, setting
from distill.types import FloatArray, TokenArray, Tokenizer

NO_FORMAT = Format(pattern=None, reward=0.0)


@dataclass(eq=False)
class SingleTurnEnv(Env):
    """Environment whose reward is `reward(response, answer)`, or 0 if the prompt has no answer.

    A reward model scores the response to its prompt, with or without an answer.

    Bonuses are added to the reward: each phrase of the prompt's `bonuses` pays the tokens that
    spell it, and `format.reward` is spread over all tokens of a response that has the format.

    The format applies to the whole response, including thinking that the prompt has opened; the
    reward judges the part that `distill.rewards.registry.judged_text` selects.

    A process computes one reward at a time (`distill.rewards.registry.judge`), so n rollout workers
    check n responses at a time. Checks that occupy a core need `rollout.cpus=1` and as many workers
    as there are cores for them. Checks that wait (for a sandbox, a server) need more workers
    without CPUs, or a custom environment whose `step` awaits.
    """

    prompt: Prompt
    tokenizer: Tokenizer
    reward: Reward
    format: Format
    models: Mapping[str, Any]

    async def initial_observation(self) -> TokenArray:
        return self.prompt.tokens_T

    async def step(self, sample: Sample) -> StepResult:
        response = read_response(self.tokenizer, self.prompt.tokens_T, sample)
        metrics = await format_of(response.text, self.format)
        earned = await self._verdict(response)
        return StepResult(
            reward=earned.reward,
            feedback=earned.feedback,
            bonuses_T=self._bonuses_T(sample, self.format.reward * metrics.get("format", 0.0)),
            metrics=metrics,
        )

    async def _verdict(self, response: Response) -> Verdict:
        prompt = self.prompt
        if isinstance(self.reward, ModelReward):
            answered = response.message if prompt.messages else response.sampled
            [score] = await scores_of(self.models, [conversation(prompt, answered)])
            return Verdict(reward=score)
        if prompt.answer is None:
            return Verdict(reward=0.0)
        return await verdict(self.reward, response, prompt.answer)

    def _bonuses_T(self, sample: Sample, of_format: float) -> FloatArray | None:
        bonuses = self.prompt.bonuses
        if not bonuses and not self.format.reward:
            return None
        length = len(sample.tokens_T)
        bonuses_T = np.full(length, of_format / length, np.float32)
        if bonuses:
            bonuses_T += phrase_bonuses(sample.tokens_T, self.tokenizer, bonuses)
        return bonuses_T


async def format_of(response: str, format: Format) -> dict[str, float]:
    """Metric `format`: 1 if the response has the format, else 0; empty without a format."""
    if format.pattern is None:
        return {}
    return {"format": await judge(matches, response, format.pattern)}


@dataclass(frozen=True, kw_only=True)
class SingleTurnGroupBuilder(EnvGroupBuilder):
    """Builder of G environments on the same prompt."""

    prompt: Prompt
    tokenizer: Tokenizer
    group_size: int
    reward: Reward = exact_match
    format: Format = NO_FORMAT

    @property
    def single_prompt(self) -> Prompt:
        return self.prompt

    @property
    def may_give_feedback(self) -> bool:
        """True if a reward function judges the response: it may return feedback as well."""
        return self.prompt.answer is not None and not isinstance(self.reward, ModelReward)

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return [
            SingleTurnEnv(self.prompt, self.tokenizer, self.reward, self.format, models)
            for _ in range(self.group_size)
        ]


def facts_of(prompt: Prompt, format: Format = NO_FORMAT) -> dict[str, Any]:
    """Fields of `EnvGroupBuilder` that the prompt determines."""
    return {
        "teacher": prompt.teacher,
        "tag": prompt.tag,
        "teacher_tokens_T": prompt.teacher_tokens_T,
        "feedback": prompt.feedback,
        "judged": prompt.answer is not None,
        "pays_bonuses": bool(prompt.bonuses) or format.reward > 0,
        "answer": prompt.answer,
        "prompt_key": prompt_key(prompt.tokens_T.tobytes()),
    }


class PromptDataset(ListedDataset):
    """Dataset of prompts. Responses can vote on an answer if the reward can extract it."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: Tokenizer,
        reward: Reward = exact_match,
        format: Format = NO_FORMAT,
    ) -> None:
        super().__init__(prompts_P)
        self._tokenizer = tokenizer
        self._reward = reward
        self._format = format
        self.answer = answer_of(reward)

    def builder(self, problem: int, group_size: int) -> SingleTurnGroupBuilder:
        prompt = self.problems_P[problem]
        facts = facts_of(prompt, self._format)
        if isinstance(self._reward, ModelReward):
            facts["judged"] = True
        return SingleTurnGroupBuilder(
            **facts,
            prompt=prompt,
            tokenizer=self._tokenizer,
            group_size=group_size,
            reward=self._reward,
            format=self._format,
        )

    def longest_row(self, max_new_tokens: int) -> int:
        longest = max((len(prompt.tokens_T) for prompt in self.problems_P), default=0)
        return longest + max_new_tokens


def format_field() -> Any:
    return setting(
        readable_as("regular expression", compiled, allows="a+", refuses="("),
        default=None,
        doc=r"regular expression that the whole response should match, such as "
        r"'<think>.*</think>\s*\d+' (a dot is any character); counted in env/format",
    )


def format_reward_field() -> Any:
    return setting(
        at_least(0),
        needs("format", remedy="give the regular expression that a response should match"),
        default=0.0,
        doc="reward of a response that matches env.format, spread over its tokens",
    )


@chz.chz
class SingleTurn(EnvConfig):
    """env=SingleTurn, the default: a prompt, a response, and `reward` against the `answer`."""

    row_fields = FIELDS
    check_row = staticmethod(check_form)
    takes_reward_model = True

    format: str | None = format_field()
    format_reward: float = format_reward_field()

    @property
    def metric_names(self) -> Collection[str]:
        return ["format"] if self.format else []

    def __call__(self, path: str | None, setting: EnvContext) -> PromptDataset:
        source = require_path(path, "SingleTurn")
        prompts_P = setting.prompts(source)
        if isinstance(setting.reward, ModelReward):
            from distill.rewards.conversations import accepted_prompts  # torch: not for workers

            prompts_P = accepted_prompts(
                setting.reward.path, source, prompts_P, setting.max_new_tokens, long=setting.long
            )
        format = Format(pattern=self.format, reward=self.format_reward)
        return PromptDataset(prompts_P, setting.tokenizer, setting.reward, format)
