"""Environments that request samples themselves, instead of being stepped."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from distill.engine import Sample
from distill.envs.base import Env, Episode, StepResult
from distill.sampling import Sampling
from distill.types import TokenArray


class Ask(Protocol):
    """The policy of one episode, with the episode's sampling. Calls may be concurrent."""

    @property
    def sampling(self) -> Sampling: ...

    def __call__(
        self, observation_T: TokenArray, *, num_samples: int = 1, max_new_tokens: int | None = None
    ) -> Coroutine[Any, Any, Sequence[Sample]]:
        """Sample `num_samples` continuations of one observation.

        Args:
            max_new_tokens: limit on a sample's length, if below that of the episode's sampling.

        Raises:
            EngineError: the engine failed or aborted a sample; the episode cannot continue.
            DataError: the observation fills the context.
        """
        ...


class AskingEnv(Env):
    """Environment that runs its own episode, and requests samples in any order.

    The episode has one turn for each sample that the environment used, in the order of arrival.
    """

    starts = False

    @abstractmethod
    async def play(self, ask: Ask) -> Episode: ...

    async def initial_observation(self) -> None:
        """None: the environment is not stepped."""

    async def step(self, sample: Sample) -> StepResult:
        raise AssertionError("call play() of an AskingEnv, not step()")
