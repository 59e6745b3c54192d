"""Evaluation of the policy's accuracy, and of its distance from the teacher.

`eval/*` metrics, with R responses per problem. Reward metrics are over problems that have a judge:

    eval/accuracy         mean reward, with its 95 % interval in _low and _high; also
                          /source=NAME if there are several sources of problems
    eval/pass@k           mean best reward of k responses, k = 2, 4, ... up to R; if R > 1
    eval/majority@R       mean reward of the most frequent answer; if R > 1 and the reward can
                          extract the answer of a response
    eval/response_length  mean number of tokens
    eval/eos_share        share of responses that end with a stop token
    eval/turns            mean number of turns of an episode, if any episode has several
    eval/NAME             metrics of the environment

Accuracy is measured with `EvalSampling` (greedy by default), and KL(p_T || q_T) with the run's
`TrainSampling`. The two sampling types are separate on purpose: neither setting affects the other.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from actors.rollout.episode import EpisodesFailed, UserCode, play_group, rollout_group
from actors.rollout.teacher import score_group, teacher_of
from actors.rollout.user_code_file import UserCodeFile
from distill.chat.responses import read_response
from distill.chat.token_text import decode
from distill.engine import ScoringModel
from distill.envs.base import EnvDataset, EnvGroupBuilder, Episode
from distill.errors import DataError, EngineError, IsothermError, described
from distill.rewards.accuracy import interval, majority, pass_at_k, ratio_interval
from distill.sampling import EvalSampling, TrainSampling
from distill.types import StopReason, Tokenizer

# Seed of the samples of every evaluation, so that two evaluations of the same weights agree.
_SEED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedResponse:
    """The policy's response to one problem, and its reward.

    Attributes:
        line: row of the problem in its source, or its index.
        prompt: text of the first observation, special tokens included.
        sample: index of the response among those to its problem.
        text: text of the last turn, with the marks around its thinking.
        num_tokens: number of sampled tokens in all turns.
        num_turns: number of turns.
        correct: reward; None if the problem has no judge.
        metrics: metrics of the environment.
        source: source of the problem; empty if there is only one.
        answer: reference answer; None if unknown.
        final_text: text of the last turn without its thinking.
    """

    line: int
    prompt: str
    sample: int
    text: str
    stop_reason: StopReason
    num_tokens: int
    num_turns: int
    correct: float | None
    metrics: Mapping[str, float]
    source: str = ""
    answer: str | None = None
    final_text: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`eval/*` metrics, and the responses that are kept for inspection."""

    metrics: dict[str, float]
    responses: list[EvaluatedResponse]


def _all_failed(failures: Sequence[str]) -> EpisodesFailed:
    return EpisodesFailed(f"every episode of an evaluation failed; the first: {failures[0]}")


class Evaluator:
    """Evaluates an engine on a fixed list of held-out problems.

    Args:
        user_code_file: path of the `UserCodeFile` that records which problems run user code; None:
            no record.
    """

    def __init__(
        self,
        problems: EnvDataset,
        tokenizer: Tokenizer,
        user_code_file: str | None = None,
    ) -> None:
        self._problems = problems
        self._tokenizer = tokenizer
        self._user_code_file = (
            None if user_code_file is None else UserCodeFile(user_code_file, len(problems))
        )

    async def respond(
        self, engine: ScoringModel, sampling: EvalSampling, models: Mapping[str, Any] | None = None
    ) -> list[EvaluatedResponse]:
        """Play `sampling.num_samples` episodes per problem; return the responses in order.

        Args:
            models: models that environments may use besides the engine, by name.

        Raises:
            EpisodesFailed: all episodes of all problems failed.
        """
        failures: list[str] = []

        async def one(p: int) -> list[EvaluatedResponse]:
            builder = self._problems.builder(p, sampling.num_samples)
            episodes = await play_group(
                engine,
                builder,
                sampling,
                group_id=p,
                seed=_SEED,
                models=models,
                user_code=self._user_code(p),
            )
            failures.extend(episode.failure for episode in episodes if episode.failure)
            return [
                self._response(p, number, episode, builder)
                for number, episode in enumerate(episodes)
                if episode.turns or episode.failure
            ]

        made_P = await asyncio.gather(*(one(p) for p in range(len(self._problems))))
        responses = [response for made in made_P for response in made]
        if failures and len(failures) == len(responses):
            raise _all_failed(failures)
        return responses

    def _user_code(self, problem: int) -> UserCode:
        """Context manager around user code, which adds the problem and the place to errors.

        An evaluation cannot set groups aside as training does: one such error ends it.
        """
        noted = (
            nullcontext
            if self._user_code_file is None
            else partial(self._user_code_file.entered, problem)
        )

        @asynccontextmanager
        async def entered() -> AsyncIterator[None]:
            try:
                async with noted():
                    yield
            except DataError as error:  # from a reward; the message already names the reward
                raise DataError(
                    f"evaluation: {error}, in problem {self._problems.label(problem)}",
                    field=error.field,
                ) from error
            except (IsothermError, EngineError):
                raise
            except Exception as error:  # user code may raise anything
                raise DataError(
                    f"evaluation: {described(error)}, in the environment or reward of problem "
                    f"{self._problems.label(problem)}"
                ) from error

        return entered

    def _response(
        self, problem: int, number: int, episode: Episode, builder: EnvGroupBuilder
    ) -> EvaluatedResponse:
        prompt = text = final_text = ""
        if episode.turns:  # otherwise the episode failed before its first turn
            first, last = episode.turns[0], episode.turns[-1]
            prompt = decode(self._tokenizer, first.observation_T)
            response = read_response(self._tokenizer, last.observation_T, last.sample)
            text, final_text = response.text, response.answer
        return EvaluatedResponse(
            line=self._problems.line(problem),
            prompt=prompt,
            sample=number,
            text=text,
            final_text=final_text,
            stop_reason=episode.stop_reason,
            num_tokens=sum(len(turn.sample.tokens_T) for turn in episode.turns),
            num_turns=len(episode.turns),
            correct=episode.reward if builder.judged else None,
            metrics=episode.metrics,
            source=self._problems.source(problem),
            answer=builder.answer,
        )

    async def evaluate(
        self,
        engine: ScoringModel,
        sampling: EvalSampling,
        models: Mapping[str, Any] | None = None,
        keep: int | None = 0,
    ) -> Evaluation:
        """Evaluate the engine; keep the responses to the first `keep` problems (None: to all)."""
        responses = await self.respond(engine, sampling, models)
        problems = list(dict.fromkeys((each.source, each.line) for each in responses))[:keep]
        kept = [each for each in responses if (each.source, each.line) in problems]
        return Evaluation(self.summarise(responses), kept)

    def summarise(self, responses: Sequence[EvaluatedResponse]) -> dict[str, float]:
        """`eval/*` metrics of responses."""
        return summarise(responses, self._problems.answer)

    async def reverse_kl(
        self,
        policy: ScoringModel,
        teachers: Mapping[str, ScoringModel],
        sampling: TrainSampling,
        num_samples: int = 1,
        models: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Estimate KL(p_T || q_T) from samples, as the metric `eval/reverse_kl`.

        The metric is the mean per token over `num_samples` new episodes per problem; `_low` and
        `_high` are its 95 % interval over problems. Episodes are scored as in training: by the
        teacher of the problem, with its privileged context. Problems whose episodes all failed are
        left out.

        Raises:
            ConfigError: a problem names a teacher that `teachers` does not contain.
            EpisodesFailed: all episodes of all problems failed.
        """
        failures: list[str] = []

        async def one(p: int) -> np.ndarray:
            builder = self._problems.builder(p, num_samples)
            try:
                group = await rollout_group(
                    policy,
                    builder,
                    sampling,
                    group_id=p,
                    seed=_SEED,
                    models=models,
                    user_code=self._user_code(p),
                )
            except EpisodesFailed as error:
                failures.append(str(error))
                return np.empty(0)
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

        scored_P = await asyncio.gather(*(one(p) for p in range(len(self._problems))))
        gaps = [gaps_N for gaps_N in scored_P if len(gaps_N)]
        if failures and not gaps:
            raise _all_failed(failures)
        sums_P = [float(gaps_N.sum(dtype=np.float64)) for gaps_N in gaps]
        counts_P = list(map(len, gaps))
        metrics = {"eval/reverse_kl": sum(sums_P) / sum(counts_P)}
        if (bounds := ratio_interval(sums_P, counts_P)) is not None:
            metrics["eval/reverse_kl_low"], metrics["eval/reverse_kl_high"] = bounds
        return metrics


def summarise(
    responses: Sequence[EvaluatedResponse], answer: Callable[[str], Hashable | None] | None = None
) -> dict[str, float]:
    """`eval/*` metrics of responses.

    All problems have the same number of responses, except that players of a game without a turn
    have none.

    Args:
        answer: extracts the answer from a response, for the majority vote; None: no majority vote.
    """
    metrics = {
        "eval/response_length": fmean(response.num_tokens for response in responses),
        "eval/eos_share": fmean(response.stop_reason is StopReason.EOS for response in responses),
    }
    if any(response.num_turns > 1 for response in responses):
        metrics["eval/turns"] = fmean(response.num_turns for response in responses)
    for name in sorted({name for response in responses for name in response.metrics}):
        metrics[f"eval/{name}"] = fmean(
            response.metrics[name] for response in responses if name in response.metrics
        )
    judged_P: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
    for response in responses:
        if response.correct is not None:
            of = response.source, response.line
            judged_P[of].append((response.final_text, response.correct))
    if not judged_P:
        return metrics
    rewards_PN = [[reward for _, reward in judged] for judged in judged_P.values()]
    means_P = [fmean(rewards_N) for rewards_N in rewards_PN]
    metrics["eval/accuracy"] = fmean(means_P)
    by_source: dict[str, list[float]] = defaultdict(list)
    for (source, _), mean in zip(judged_P, means_P, strict=True):
        by_source[source].append(mean)
    for source in sorted(filter(None, by_source)):
        metrics[f"eval/accuracy/source={source}"] = fmean(by_source[source])
    if (bounds := interval(rewards_PN)) is not None:
        metrics["eval/accuracy_low"], metrics["eval/accuracy_high"] = bounds
    num_samples = max(map(len, rewards_PN))
    k = 2
    while k <= num_samples:
        enough = [rewards_N for rewards_N in rewards_PN if len(rewards_N) >= k]
        metrics[f"eval/pass@{k}"] = fmean(pass_at_k(rewards_N, k) for rewards_N in enough)
        k *= 2
    if num_samples > 1 and answer is not None:
        chosen_P = [majority([answer(text) for text, _ in judged]) for judged in judged_P.values()]
        metrics[f"eval/majority@{num_samples}"] = fmean(
            0.0 if chosen is None else rewards_N[chosen]
            for chosen, rewards_N in zip(chosen_P, rewards_PN, strict=True)
        )
    return metrics
