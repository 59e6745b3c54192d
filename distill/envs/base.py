"""Environments: what a policy acts in. Single use: make one, run one episode, drop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distill.interfaces import Sample
from distill.types import FloatArray, TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the environment answers to one sample.

    `observation_T` is everything the model sees next; None ends the episode. `reward` adds up over
    the episode. `bonuses_T` are rewards of the sampled tokens, one each; None: no such rewards.
    """

    reward: float
    observation_T: TokenArray | None = None
    bonuses_T: FloatArray | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode."""

    def initial_observation(self) -> TokenArray: ...

    async def step(self, sample: Sample) -> StepResult: ...


class EnvGroupBuilder(Protocol):
    """Makes the G single-use environments of one group. It pickles: workers may be elsewhere."""

    @property
    def teacher(self) -> str:
        """The name of the teacher that scores the group; empty where teachers have none."""
        ...

    @property
    def tag(self) -> str | None:
        """The kind of the group's prompt, for metrics by kind."""
        ...

    @property
    def teacher_tokens_T(self) -> TokenArray | None:
        """What the teacher sees in place of the initial observation; None: the same."""
        ...

    def make_envs(self) -> Sequence[Env]: ...
