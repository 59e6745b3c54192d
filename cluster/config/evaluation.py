"""Settings of evaluations: the serving decoder, and a run's evaluations of its own policy."""

from __future__ import annotations

from typing import ClassVar

import chz

from cluster.config.pools import MOST_ACTORS
from cluster.config.rows import ROWS, unweighted_sources
from distill.errors import ConfigError
from distill.rules import (
    IN_MEMORY,
    above,
    at_least,
    at_most,
    default_of,
    needs,
    not_with,
    setting,
)
from distill.sampling import EvalSampling, TrainSampling
from distill.settings import ESSENTIAL, MAY_CHANGE, Section, with_default

_NO_ENGINES = "such a run has no engines; evaluate its checkpoints with python -m cluster.evaluate"

_SAMPLED = needs("eval.temperature", remedy="greedy decoding has one response, the likeliest")


@chz.chz
class LengthSettings:
    """Length limit of a response."""

    section: ClassVar[Section] = Section.SAMPLING
    within: ClassVar[str] = "sampling."

    max_new_tokens: int = setting(
        at_least(1), default=256, doc="longest response, in tokens", metadata=ESSENTIAL
    )


@chz.chz
class TemperatureSettings:
    """The rollout temperature."""

    section: ClassVar[Section] = Section.SAMPLING
    within: ClassVar[str] = "sampling."

    temperature: float = setting(
        above(
            0,
            "rollouts are sampled from softmax(z/T). Greedy decoding (0) is for evaluation: "
            "eval.temperature=0",
        ),
        doc="rollout temperature T > 0, of sampling, teacher, learner and loss alike",
        metadata=ESSENTIAL,
    )


@chz.chz
class SamplingSettings(LengthSettings, TemperatureSettings):
    """Sampling of rollouts."""

    group_size: int = setting(
        at_least(1), IN_MEMORY, default=4, doc="samples per prompt", metadata=ESSENTIAL
    )

    def train(self) -> TrainSampling:
        """Sampling of rollouts that are trained on."""
        return TrainSampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)


@chz.chz
class DecoderSettings:
    """The serving decoder. It does not affect training."""

    section: ClassVar[Section] = Section.EVALUATION
    within: ClassVar[str] = "eval."

    temperature: float = setting(
        at_least(0),
        default=0.0,
        doc="temperature of the serving decoder, for evaluations only; 0: greedy",
    )
    top_p: float = setting(
        above(0),
        at_most(1),
        _SAMPLED,
        default=1.0,
        doc="top-p of the serving decoder, for evaluations only; 1: off",
    )
    top_k: int = setting(
        at_least(0),
        _SAMPLED,
        default=0,
        doc="top-k of the serving decoder, for evaluations only; 0: off",
    )
    samples: int = setting(
        at_least(1),
        IN_MEMORY,
        _SAMPLED,
        default=1,
        doc="responses per prompt in evaluations; several give pass@k and a majority vote",
    )

    def sampling(self, max_new_tokens: int) -> EvalSampling:
        """Sampling of responses of at most `max_new_tokens` tokens."""
        return EvalSampling(
            temperature=self.temperature,
            max_new_tokens=max_new_tokens,
            top_p=self.top_p,
            top_k=self.top_k,
            num_samples=self.samples,
        )


@chz.chz
class HeldOutSettings:
    """Held-out problems or rows of a run, and the interval between their evaluations."""

    section: ClassVar[Section] = Section.EVALUATION
    within: ClassVar[str] = "eval."

    every: int = setting(
        at_least(0),
        not_with("train_from", why=_NO_ENGINES),
        not_with("rollout_only", why="nothing is evaluated; python -m cluster.evaluate does it"),
        default=0,
        doc="steps between evaluations; 0: only at the start and the end",
        metadata=MAY_CHANGE,
    )

    source: str | None = chz.field(
        default=None,
        doc="held-out problems (rows, pairs): sources in the format of prompts= (data=), without "
        "weights; default: eval.size of those are held out",
        metadata=ROWS,
    )
    size: float = chz.field(
        default=64,
        doc="problems (rows, pairs) to hold out, by a seeded choice of prompts: a number, or their "
        "share below 1, for example 0.05; 0: none. In opd and rl a number holds out at most a "
        "tenth of all; with eval.source, it is how many of its problems are evaluated",
    )

    @chz.validate
    def _held_out_in_range(self) -> None:
        size = self.size
        if size < 0 or not (size < 1 or float(size).is_integer()):
            raise ConfigError(
                f"eval.size={size:g} must be a whole number, 0 or above, or a share below 1"
            )
        if self.source is not None:
            unweighted_sources("eval.source", self.source)


@chz.chz
class EvalSettings(DecoderSettings, HeldOutSettings):
    """A run's evaluations of its own policy."""

    max_new_tokens: int | None = setting(
        at_least(1),
        default=None,
        doc="longest response in evaluations, in tokens; default: that of rollouts",
    )
    engines: int = setting(
        at_least(0),
        at_most(MOST_ACTORS, "each is an actor"),
        needs("eval.every", remedy="give eval.every=, or leave it out"),
        default=0,
        doc="policy engines reserved for the evaluations of every eval.every steps, which then run "
        "concurrently with training, with the weights of their step; 0: evaluations run between "
        "two steps, on the policy's engines",
        metadata=MAY_CHANGE,
    )

    @chz.validate
    def _something_is_evaluated(self) -> None:
        for name, field in chz.chz_fields(type(self)).items():
            value = getattr(self, name)
            if self.size == 0 and name != "size" and value != default_of(field):
                raise ConfigError(
                    f"eval.{name}={value} changes nothing with eval.size=0, which runs no "
                    "evaluation; leave one of them out"
                )

    def sampling(self, max_new_tokens: int) -> EvalSampling:
        """Sampling of responses. The argument is the default of `eval.max_new_tokens`."""
        return super().sampling(self.max_new_tokens or max_new_tokens)


@chz.chz
class RowEvaluationSettings(HeldOutSettings):
    """A run's evaluations on held-out rows or pairs."""

    size: float = with_default(HeldOutSettings, "size", 0)

    @chz.validate
    def _rows_are_there(self) -> None:
        if self.size and self.source is not None:
            raise ConfigError(
                f"eval.size={self.size:g} and eval.source={self.source}: rows are held out of "
                "data=, or come from a source of their own; leave one of them out"
            )
        if self.every and not self.runs:
            raise ConfigError(
                f"eval.every={self.every} changes nothing without held-out rows; give "
                "eval.source=FILE or eval.size=0.05"
            )

    @property
    def runs(self) -> bool:
        """True if there are held-out rows."""
        return self.source is not None or self.size > 0
