"""A text-only teacher: texts from an endpoint, converted into samples of the student's tokens.

The teacher's log-probs and weights are unknown, so it cannot score. Its samples are trained on by
cross-entropy (`distill.group_share`), which needs neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from actors.rollout.text_endpoint import (
    AnswerLimits,
    EndpointAddress,
    TextEndpoint,
    text_endpoint,
)
from actors.together import together
from distill.data.example_encoder import ExampleEncoder
from distill.data.prompts import Prompt
from distill.data.written_answers import written_sample
from distill.engine import GenerateRequest, Sample
from distill.types import TrajectoryGroup

T = TypeVar("T")

# Limit of one attempt in seconds. A slower one is repeated while the deadline allows it.
_ATTEMPT_S = 600.0
# Maximum number of concurrent requests of one rollout worker.
_MOST_AT_ONCE = 32
TICK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTeacher:
    """A teacher's endpoint and the encoder of its texts. Instances can be pickled."""

    address: EndpointAddress
    encoder: ExampleEncoder
    deadline_s: float

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[NewTextSampler]:
        """Context manager for an open connection to the teacher; yields the maker of samplers.

        Raises:
            ConfigError: see `text_endpoint`.
        """
        limits = AnswerLimits(
            attempt_s=min(_ATTEMPT_S, self.deadline_s / 2), all_s=self.deadline_s / 2
        )
        async with text_endpoint(
            self.address, limits=limits, max_concurrent=_MOST_AT_ONCE
        ) as endpoint:
            yield partial(TextSampler, endpoint, self.encoder)


@dataclass(frozen=True, slots=True, eq=False)
class TextSampler:
    """Sampler of responses to one prompt; the prompt tokens of a request are ignored.

    `alive` is called periodically while an answer is awaited.
    A wait ends when the endpoint's `AnswerLimits` are exhausted. An answer shows no progress before
    it is complete, so the calls of `alive` report only that the wait continues.
    """

    endpoint: TextEndpoint
    encoder: ExampleEncoder
    prompt: Prompt
    alive: Callable[[], None]

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """Sample responses. Raises the errors of `TextEndpoint.answer` and `written_sample`."""
        sampled = (self._sample(request) for _ in range(request.num_samples))
        return await _ticking(together(*sampled), self.alive)

    async def _sample(self, request: GenerateRequest) -> Sample:
        sampling = request.sampling
        answer = await self.endpoint.answer(self.prompt.for_text_teacher, sampling)
        return written_sample(
            self.encoder,
            self.prompt,
            answer.text,
            ended=answer.ended,
            max_new_tokens=sampling.max_new_tokens,
        )

    @staticmethod
    def mark_sampled(group: TrajectoryGroup) -> TrajectoryGroup:
        """The group, marked as sampled by the teacher, as text."""
        return replace(group, by_teacher=True, as_text=True)


# Makes a sampler from a prompt and `TextSampler.alive`.
NewTextSampler: TypeAlias = Callable[[Prompt, Callable[[], None]], TextSampler]


async def _ticking(waited_for: Coroutine[Any, Any, T], tick: Callable[[], None]) -> T:
    """Await a coroutine and return its result, calling `tick` every `TICK_S` seconds meanwhile."""
    task = asyncio.ensure_future(waited_for)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=TICK_S)
            tick()
        return task.result()
    finally:
        task.cancel()
