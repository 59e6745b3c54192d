"""What a rehearsal in small cannot meet: lengths, memory, bytes and hours of the run in full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.config.on_policy import RolloutConfig
from cluster.config.rollout_checks import RolloutInputs
from cluster.placement.roles import describe_layout
from distill.envs.single_turn import SingleTurnGroupBuilder
from distill.errors import ConfigError
from distill.models.loading import context_length, load_config

# Problems whose prompts are measured, evenly spaced among all.
_PROMPTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSize:
    """What can be said before it runs.

    Attributes:
        warnings: what would break.
        lines: the rest.
    """

    warnings: list[str]
    lines: list[str]


def full_size(
    config: RolloutConfig, inputs: RolloutInputs, first_observations: Sequence[int]
) -> FullSize:
    """
    Args:
        first_observations: tokens before the first turn, of episodes that were rehearsed; used
            where the environment's prompts are not known without playing.
    """
    lengths = _prompt_lengths(config, inputs) or list(first_observations)
    context = context_length(load_config(config.student))
    warnings, lines = [], []
    if lengths:
        middle, high = np.quantile(lengths, [0.5, 0.99]).astype(int)
        lines.append(
            f"prompts   of {len(lengths)} looked at, {middle} tokens in the middle, {high} at the "
            f"99th percentile, {max(lengths)} at most; context {context:,}"
        )
        lines += _teacher_lines(config, float(np.mean(lengths)))
    try:
        lines.append(describe_layout(config))
    except ConfigError as error:
        warnings.append(str(error))
    return FullSize(warnings=warnings, lines=lines)


def _prompt_lengths(config: RolloutConfig, inputs: RolloutInputs) -> list[int]:
    """Of prompts that are there without an environment being played; none of others."""
    train = inputs.train
    if not isinstance(train.builder(0, config.group_size), SingleTurnGroupBuilder):
        return []
    chosen = np.unique(np.linspace(0, len(train) - 1, min(_PROMPTS, len(train))).astype(int))

    async def length(problem: int) -> int:
        [env, *_] = train.builder(problem, config.group_size).make_envs({})
        observation_T = await env.initial_observation()
        return 0 if observation_T is None else len(observation_T)

    async def lengths() -> list[int]:
        return [await length(int(problem)) for problem in chosen]

    return asyncio.run(lengths())


def _teacher_lines(config: RolloutConfig, mean_prompt: float) -> list[str]:
    """Tokens that teachers score, at most: every response as long as it may be."""
    if not config.teacher_models():
        return []
    samples = config.prompts_per_step * config.group_size
    tokens = samples * (mean_prompt + config.max_new_tokens)
    line = f"teacher   at most {tokens:,.0f} tokens a step ({samples} samples of up to "
    line += f"{mean_prompt:.0f} + {config.max_new_tokens})"
    if (rate := config.rehearse_tokens_per_s) is not None:
        seconds = tokens / rate
        hours = seconds * config.steps / 3600
        line += f": {seconds:,.1f} s a step, {hours:,.2f} h in all at {rate:g} tokens/s"
    else:
        line += "; rehearse_tokens_per_s= says how long that takes"
    return [line]
