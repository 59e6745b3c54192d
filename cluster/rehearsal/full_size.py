"""Predictions that a small rehearsal cannot test: lengths, scored tokens, memory and disk space."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.placement.layout import describe_layout
from cluster.placement.roles import served_teachers
from cluster.recipes.plan import kept_line
from distill.data.feedback import Outcome
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.errors import ConfigError
from distill.models.loading import context_length, load_config

# Number of problems whose prompts are measured, evenly spaced over the data set.
_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSize:
    """Predictions for the full-size run.

    Attributes:
        warnings: problems that would make the run fail.
        lines: all other predictions.
    """

    warnings: list[str]
    lines: list[str]


def full_size(
    config: RolloutConfig, inputs: RolloutInputs, first_observations: Sequence[int]
) -> FullSize:
    """Predict the full-size run: lengths, tokens to score, evaluations, memory, checkpoints.

    Args:
        first_observations: numbers of tokens before the first turn of rehearsed episodes; used if
            prompts are not known without running the environment.
    """
    lengths = _prompt_lengths(config, inputs, _observed) or list(first_observations)
    context = context_length(load_config(config.model.path))
    warnings, lines = [], []
    if lengths:
        middle, high = np.quantile(lengths, [0.5, 0.99]).astype(int)
        lines.append(
            f"prompts   {len(lengths)} measured: median {middle} tokens, 99th percentile {high}, "
            f"maximum {max(lengths)}; context {context:,}"
        )
        shown = _prompt_lengths(config, inputs, partial(_shown_to_teacher, config)) or lengths
        lines += _teacher_lines(config, float(np.mean(shown)))
        lines += _reference_lines(config, float(np.mean(lengths)))
    lines += _evaluation_lines(config, len(inputs.held_out))
    try:
        lines.append(describe_layout(config, inputs.longest_row))
        lines.append(f"keeps    {kept_line(config, Path(config.out))}")
    except ConfigError as error:
        warnings.append(str(error))
    return FullSize(warnings=warnings, lines=lines)


def _prompt_lengths(
    config: RolloutConfig,
    inputs: RolloutInputs,
    length: Callable[[SingleTurnGroupBuilder], Awaitable[int]],
) -> list[int]:
    """Lengths of prompts; empty if they are not known without running the environment."""
    train = inputs.train
    if not isinstance(train.builder(0, config.sampling.group_size), SingleTurnGroupBuilder):
        return []
    chosen = np.unique(np.linspace(0, len(train) - 1, min(_PROMPTS, len(train))).astype(int))

    async def lengths() -> list[int]:
        builders = (train.builder(int(problem), config.sampling.group_size) for problem in chosen)
        return [await length(b) for b in builders if isinstance(b, SingleTurnGroupBuilder)]

    return asyncio.run(lengths())


async def _observed(builder: SingleTurnGroupBuilder) -> int:
    """Number of tokens that the policy sees before its turn."""
    [env, *_] = builder.make_envs({})
    observation_T = await env.initial_observation()
    return 0 if observation_T is None else len(observation_T)


async def _shown_to_teacher(config: RolloutConfig, builder: SingleTurnGroupBuilder) -> int:
    """Number of tokens that the teacher sees before a response of maximal length.

    Feedback of the environment is not counted, because its length is unknown.
    """
    if builder.teacher_tokens_T is not None:
        return len(builder.teacher_tokens_T)
    if builder.feedback is None:
        return await _observed(builder)
    without_feedback = len(builder.feedback.tokens_T(Outcome(reward=0.0)))
    repeats = "response" in builder.feedback.template.placeholders
    return without_feedback + config.sampling.max_new_tokens * repeats


def _teacher_lines(config: RolloutConfig, mean_prompt: float) -> list[str]:
    """Line on the maximal number of tokens that teachers score, if all responses are maximal."""
    if not config.teacher_models():
        return []
    live = config.teacher.moves and config.teacher_rule is None
    line = f"teacher   {_scored(config, mean_prompt)}"
    line += ", scored by the policy's engines" if live else ""
    if config.learner_is_teacher:
        line += "; and the same number again, by the learner (estimator=full)"
    return [line]


def _reference_lines(config: RolloutConfig, mean_prompt: float) -> list[str]:
    """Line on the tokens that the reference scores, if its scores are trained on."""
    if not (config.scored_by_reference or config.base_is_reference):
        return []
    line = f"reference {_scored(config, mean_prompt)}"
    return [line if config.scored_by_reference else f"{line}, by the learner without its adapter"]


def _scored(config: RolloutConfig, mean_prompt: float) -> str:
    """Largest number of tokens that one model scores in a step."""
    samples = config.data.batch_size * config.sampling.group_size
    tokens = samples * (mean_prompt + config.sampling.max_new_tokens)
    return (
        f"at most {tokens:,.0f} tokens per step ({samples} samples of up to {mean_prompt:.0f} + "
        f"{config.sampling.max_new_tokens})"
    )


def _evaluation_lines(config: RolloutConfig, problems: int) -> list[str]:
    """Line on the responses of the run's evaluations, before, during and after the steps."""
    if not problems:
        return []
    times = 2 + ((config.steps - 1) // config.eval.every if config.eval.every else 0)
    each = f"{problems} problems x {config.eval.samples} responses"
    once = ", and once for each teacher" if served_teachers(config) else ""
    kl = "; one more sample of each problem for the KL" if config.teacher_models() else ""
    return [f"evaluated {times} times: {each} of up to {config.sampling.max_new_tokens}{kl}{once}"]
