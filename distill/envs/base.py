"""Environments: what a policy acts in. Single use: make one, run one episode, drop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distill.interfaces import Sample
from distill.types import TokenArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the environment answers to one sample.

    `observation_T` is everything the model sees next; None ends the episode. `reward` adds up over
    the episode.
    """

    reward: float
    observation_T: TokenArray | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Env(Protocol):
    """One episode."""

    def initial_observation(self) -> TokenArray: ...

    async def step(self, sample: Sample) -> StepResult: ...


class EnvGroupBuilder(Protocol):
    """Makes the G single-use environments of one group. It pickles: workers may be elsewhere."""

    def make_envs(self) -> Sequence[Env]: ...
