"""Evaluation: how the policy does at the serving decoder, and how far it is from the teacher.

The two use two sampling types on purpose. Accuracy is measured at `EvalSampling` (greedy unless
told otherwise); KL(p_T || q_T) at the run's `TrainSampling`. Neither changes the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.episode import rollout_group
from actors.teacher import score_group, teacher_of
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.interfaces import Engine, GenerateRequest
from distill.prompts import Prompt
from distill.rewards import RewardFunction, exact_match
from distill.sampling import EvalSampling, TrainSampling
from distill.types import StopReason

# Seed of every evaluation's samples: two evaluations of the same weights agree.
_SEED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the policy answered to one prompt, as text, and how it was judged."""

    line: int
    text: str
    stop_reason: StopReason
    num_tokens: int
    correct: float | None


class Evaluator:
    """Evaluates an engine on a fixed list of held-out prompts."""

    def __init__(
        self,
        prompts_P: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardFunction = exact_match,
    ) -> None:
        """`reward` judges a response by the prompt's answer, as `Response.correct`."""
        self._prompts_P = prompts_P
        self._tokenizer = tokenizer
        self._reward = reward

    async def respond(self, engine: Engine, sampling: EvalSampling) -> list[Response]:
        """One response a prompt, in order."""

        async def one(p: int, prompt: Prompt) -> Response:
            [sample] = await engine.generate(
                GenerateRequest(
                    prompt_tokens_T=prompt.tokens_T,
                    sampling=sampling,
                    num_samples=1,
                    seed=_SEED + p,
                )
            )
            text = str(self._tokenizer.decode(sample.tokens_T.tolist(), skip_special_tokens=True))
            return Response(
                line=prompt.line,
                text=text,
                stop_reason=sample.stop_reason,
                num_tokens=len(sample.tokens_T),
                correct=None if prompt.answer is None else self._reward(text, prompt.answer),
            )

        return await asyncio.gather(*(one(p, prompt) for p, prompt in enumerate(self._prompts_P)))

    async def evaluate(self, engine: Engine, sampling: EvalSampling) -> dict[str, float]:
        """`eval/*` metrics of the responses."""
        return summarise(await self.respond(engine, sampling))

    async def reverse_kl(
        self,
        policy: Engine,
        teachers: Mapping[str, Engine],
        sampling: TrainSampling,
        num_samples: int = 1,
    ) -> float:
        """Sampled KL(p_T || q_T), mean per token, over `num_samples` fresh samples a prompt.

        Scored as in training: by the teacher that the prompt names, after the context it gives.

        Raises:
            ConfigError: `teachers` lacks the one that a prompt names.
        """

        async def one(p: int, prompt: Prompt) -> np.ndarray:
            builder = SingleTurnGroupBuilder(
                prompt=prompt, tokenizer=self._tokenizer, group_size=num_samples
            )
            group = await rollout_group(policy, builder, sampling, group_id=p, seed=_SEED)
            group = await score_group(teacher_of(teachers, group.teacher), group)
            return np.concatenate(
                [
                    (segment.behaviour_logprobs_T - segment.teacher_logprobs_T)[
                        segment.action_mask_T
                    ]
                    for segment in group.segments()
                    if segment.teacher_logprobs_T is not None
                ]
            )

        gaps = await asyncio.gather(*(one(p, prompt) for p, prompt in enumerate(self._prompts_P)))
        return float(np.concatenate(gaps).mean())


def summarise(responses: Sequence[Response]) -> dict[str, float]:
    """`eval/*` metrics of some responses; `eval/accuracy` only where prompts have answers."""
    metrics = {
        "eval/response_length": fmean(response.num_tokens for response in responses),
        "eval/eos_share": fmean(response.stop_reason is StopReason.EOS for response in responses),
    }
    judged = [response.correct for response in responses if response.correct is not None]
    if judged:
        metrics["eval/accuracy"] = fmean(judged)
    return metrics
