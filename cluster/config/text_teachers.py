"""Teachers whose samples come from an endpoint: one test request, and checks of their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from actors.rollout.text_endpoint import (
    AnswerLimits,
    EndpointAddress,
    UnusableAnswer,
    text_endpoint,
)
from actors.rollout.text_teacher import TextTeacher
from cluster.config.on_policy import RolloutConfig
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.data.written_answers import written_sample
from distill.envs.base import EnvDataset
from distill.errors import ConfigError, DataError, EngineError
from distill.sampling import TrainSampling

# The endpoint may have to load its model before the first answer.
_LIMITS = AnswerLimits(attempt_s=120.0, all_s=180.0, attempts=3, max_unusable=1)
# Largest number of tokens of the test request's answer, which is not used.
_FEW = 16
# Number of prompts per teacher that are rendered with an answer: a template rejects all, or few.
_TRIED = 8


def text_teachers(
    config: RolloutConfig, encoder: ExampleEncoder, train: EnvDataset
) -> Mapping[str, TextTeacher]:
    """Teachers whose samples come from an endpoint, by name.

    Each endpoint receives one test request for a short answer to one of its prompts.

    Raises:
        ConfigError: an endpoint does not answer, or cannot answer a teacher's prompts.
    """
    made: dict[str, TextTeacher] = {}
    for name, address in config.text_endpoints().items():
        prompts = _prompts_of(config, address, train, name)
        for prompt in prompts[:_TRIED]:
            _check_turn(address, encoder, prompt, config.sampling.max_new_tokens)
        asyncio.run(_ask_once(address, prompts[0], config.sampling.train()))
        made[name] = TextTeacher(
            address=address, encoder=encoder, deadline_s=config.cluster.no_progress_s
        )
    return made


def _prompts_of(
    config: RolloutConfig, address: EndpointAddress, train: EnvDataset, teacher: str
) -> Sequence[Prompt]:
    """Prompts of a teacher, as texts or chats; at least one."""
    setting = f"{address.url_setting}={address.url}"
    prompts: list[Prompt] = []
    for problem in range(len(train)):
        builder = train.builder(problem, config.sampling.group_size)
        if builder.teacher != teacher:
            continue
        prompt, where = builder.single_prompt, f"{config.data.source}:{train.label(problem)}"
        if prompt is None:
            raise ConfigError(
                f"{setting} returns one text per prompt, but an episode of "
                f"env={type(config.env).__name__} has more than one turn; use env=SingleTurn, or "
                "leave it out, so that the teacher's engines sample"
            )
        if prompt.tools:
            raise ConfigError(
                f"{setting} returns text, which cannot contain tool calls, but {where} has "
                "`tools`; leave the field out of the row, or let the teacher's engines sample"
            )
        if address.completes and not isinstance(prompt.for_text_teacher, str):
            raise ConfigError(
                f"{setting} continues plain text, but {where} is a chat; give the address "
                "without /completions, or rows with `prompt`"
            )
        prompts.append(prompt)
    return prompts


def _check_turn(
    address: EndpointAddress, encoder: ExampleEncoder, prompt: Prompt, max_new_tokens: int
) -> None:
    """Raise ConfigError if the student's template cannot render an answer to the prompt."""
    try:
        written_sample(encoder, prompt, "ok", ended=True, max_new_tokens=max_new_tokens)
    except DataError as error:
        raise ConfigError(
            f"an answer of {address.url_setting}={address.url} to the prompt of line "
            f"{prompt.line} cannot be encoded as the student's tokens: {error}",
            field=address.url_setting,
        ) from error


async def _ask_once(address: EndpointAddress, prompt: Prompt, sampling: TrainSampling) -> None:
    short = TrainSampling(
        temperature=sampling.temperature, max_new_tokens=min(_FEW, sampling.max_new_tokens)
    )
    try:
        async with text_endpoint(address, limits=_LIMITS, max_concurrent=1) as endpoint:
            await endpoint.answer(prompt.for_text_teacher, short)
    except UnusableAnswer:
        pass  # a reasoning model has written no answer within so few tokens
    except EngineError as error:
        raise ConfigError(
            f"{error}. The run requests a sample before it starts: correct the cause, or leave "
            f"{address.url_setting} out",
            field=address.url_setting,
        ) from error
