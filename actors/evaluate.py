"""Evaluation: how the policy does at the serving decoder, and how far it is from the teacher.

`eval/*` metrics, of R responses a prompt; rewards are those of prompts that have an answer:

    eval/accuracy         the mean reward, and its 95 % interval: _low and _high
    eval/pass@k           the mean best reward of k responses, k = 2, 4, ... up to R; R > 1
    eval/majority@R       the mean reward of the answer that most responses give; R > 1, and a
                          reward that knows what a response answers
    eval/response_length  tokens; eval/eos_share: responses that end by themselves

The two use two sampling types on purpose. Accuracy is measured at `EvalSampling` (greedy unless
told otherwise); KL(p_T || q_T) at the run's `TrainSampling`. Neither changes the other.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.episode import rollout_group
from actors.teacher import score_group, teacher_of
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.evaluation import interval, majority, pass_at_k
from distill.interfaces import Engine, GenerateRequest
from distill.prompts import Prompt
from distill.rewards import RewardFunction, answer_of, exact_match, judge
from distill.sampling import EvalSampling, TrainSampling
from distill.types import StopReason

# Seed of every evaluation's samples: two evaluations of the same weights agree.
_SEED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the policy answered to one prompt, as text, and how it was judged.

    Attributes:
        line: the prompt's row in its file.
        sample: which of the prompt's responses, from 0.
        correct: its reward; None where the prompt has no answer.
    """

    line: int
    sample: int
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
        """`sampling.num_samples` responses a prompt, in order."""

        async def one(p: int, prompt: Prompt) -> list[Response]:
            samples = await engine.generate(
                GenerateRequest(
                    prompt_tokens_T=prompt.tokens_T,
                    sampling=sampling,
                    num_samples=sampling.num_samples,
                    seed=_SEED + p,
                )
            )
            responses = []
            for number, sample in enumerate(samples):
                tokens = sample.tokens_T.tolist()
                text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
                correct = None
                if prompt.answer is not None:
                    correct = await judge(self._reward, text, prompt.answer)
                responses.append(
                    Response(
                        line=prompt.line,
                        sample=number,
                        text=text,
                        stop_reason=sample.stop_reason,
                        num_tokens=len(tokens),
                        correct=correct,
                    )
                )
            return responses

        made_P = await asyncio.gather(*(one(p, prompt) for p, prompt in enumerate(self._prompts_P)))
        return [response for made in made_P for response in made]

    async def evaluate(self, engine: Engine, sampling: EvalSampling) -> dict[str, float]:
        """`eval/*` metrics of the responses."""
        return self.summarise(await self.respond(engine, sampling))

    def summarise(self, responses: Sequence[Response]) -> dict[str, float]:
        """`eval/*` metrics of some responses."""
        return summarise(responses, answer_of(self._reward))

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


def summarise(
    responses: Sequence[Response], answer: Callable[[str], Hashable | None] | None = None
) -> dict[str, float]:
    """`eval/*` metrics of some responses, the same number to each prompt.

    Args:
        answer: finds what a response answers, for the majority's vote; None: there is no vote.
    """
    metrics = {
        "eval/response_length": fmean(response.num_tokens for response in responses),
        "eval/eos_share": fmean(response.stop_reason is StopReason.EOS for response in responses),
    }
    judged_P: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for response in responses:
        if response.correct is not None:
            judged_P[response.line].append((response.text, response.correct))
    if not judged_P:
        return metrics
    rewards_PN = [[reward for _, reward in judged] for judged in judged_P.values()]
    means_P = [fmean(rewards_N) for rewards_N in rewards_PN]
    metrics["eval/accuracy"] = fmean(means_P)
    if (bounds := interval(means_P)) is not None:
        metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = bounds
    num_samples = len(rewards_PN[0])
    k = 2
    while k <= num_samples:
        metrics[f"eval/pass@{k}"] = fmean(pass_at_k(rewards_N, k) for rewards_N in rewards_PN)
        k *= 2
    if num_samples > 1 and answer is not None:
        chosen_P = [majority([answer(text) for text, _ in judged]) for judged in judged_P.values()]
        metrics[f"eval/majority@{num_samples}"] = fmean(
            0.0 if chosen is None else rewards_N[chosen]
            for chosen, rewards_N in zip(chosen_P, rewards_PN, strict=True)
        )
    return metrics
