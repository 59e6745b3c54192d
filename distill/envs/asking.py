"""Environments that ask for samples themselves, instead of being stepped."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from distill.engine import Sample
from distill.envs.base import Env, Episode, StepResult
from distill.sampling import Sampling
from distill.types import TokenArray


class Ask(Protocol):
    """The policy of one episode, at the episode's own sampling. Calls may be concurrent."""

    @property
    def sampling(self) -> Sampling: ...

    def __call__(
        self, observation_T: TokenArray, *, num_samples: int = 1, max_new_tokens: int | None = None
    ) -> Coroutine[Any, Any, Sequence[Sample]]:
        """`num_samples` samples behind the same observation.

        Args:
            max_new_tokens: longest sample, if it is below that of the episode's sampling.

        Raises:
            EngineError: the engine failed or aborted a sample; the episode cannot go on.
            DataError: the observation fills the context.
        """
        ...


class AskingEnv(Env):
    """Environment that plays its episode by itself: it asks for samples in any order.

    Its episode has a turn for each sample that it used, in the order in which they came.
    """

    starts = False

    @abstractmethod
    async def play(self, ask: Ask) -> Episode: ...

    async def initial_observation(self) -> None:
        """None: no turn is asked of it."""

    async def step(self, sample: Sample) -> StepResult:
        raise AssertionError("an AskingEnv is played, not stepped")
