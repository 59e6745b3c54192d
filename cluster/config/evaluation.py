"""Settings of evaluations: the serving decoder, and a run's evaluations of its own policy."""

from __future__ import annotations

from typing import ClassVar

import chz

from cluster.config.rows import ROWS, unweighted_sources
from distill.errors import ConfigError
from distill.rules import above, at_least, at_most, needs, not_with, setting
from distill.sampling import EvalSampling
from distill.settings import ESSENTIAL, MAY_CHANGE, Section

_NO_ENGINES = "such a run has no engines; evaluate its checkpoints with python -m cluster.evaluate"


@chz.chz
class LengthSettings:
    """Length limit of a response."""

    section: ClassVar[Section] = Section.SAMPLING

    max_new_tokens: int = setting(
        at_least(1), default=256, doc="longest response, in tokens", metadata=ESSENTIAL
    )


@chz.chz
class DecoderSettings(LengthSettings):
    """Settings of the serving decoder. They do not affect training."""

    section: ClassVar[Section] = Section.EVALUATION

    eval_temperature: float = setting(
        at_least(0),
        default=0.0,
        doc="temperature of the serving decoder, for evaluations only; 0: greedy",
    )
    eval_top_p: float = setting(
        above(0),
        at_most(1),
        default=1.0,
        doc="top-p of the serving decoder, for evaluations only; 1: off",
    )
    eval_top_k: int = setting(
        at_least(0), default=0, doc="top-k of the serving decoder, for evaluations only; 0: off"
    )
    eval_samples: int = setting(
        at_least(1),
        needs("eval_temperature", remedy="greedy decoding gives the same response again"),
        default=1,
        doc="responses per prompt in evaluations; several give pass@k and a majority vote, and "
        "need eval_temperature above 0",
    )

    def longest_evaluation(self) -> int:
        """Largest length of a response in evaluation, tokens."""
        return self.max_new_tokens

    def eval_sampling(self) -> EvalSampling:
        return EvalSampling(
            temperature=self.eval_temperature,
            max_new_tokens=self.longest_evaluation(),
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
            num_samples=self.eval_samples,
        )


@chz.chz
class HeldOutSettings:
    """Held-out problems or rows of a run, and the interval between their evaluations."""

    section: ClassVar[Section] = Section.EVALUATION

    eval_every: int = setting(
        at_least(0),
        not_with("train_from", why=_NO_ENGINES),
        not_with("rollout_only", why="nothing is evaluated; python -m cluster.evaluate does it"),
        default=0,
        doc="steps between evaluations; 0: only at the start and the end",
        metadata=MAY_CHANGE,
    )

    eval_source: str | None = chz.field(
        default=None,
        doc="held-out problems (rows, pairs): sources in the format of prompts= (data=), without "
        "weights; default: eval_size of those are held out",
        metadata=ROWS,
    )
    eval_size: float = chz.field(
        default=64,
        doc="problems (rows, pairs) to hold out, by a seeded choice of prompts: a number, or their "
        "share below 1, for example 0.05; 0: none. In opd and rl a number holds out at most a "
        "tenth of all; with eval_source, it is how many of its problems are evaluated",
    )

    @chz.validate
    def _held_out_in_range(self) -> None:
        size = self.eval_size
        if size < 0 or not (size < 1 or float(size).is_integer()):
            raise ConfigError(
                f"eval_size={size:g} must be a whole number, 0 or above, or a share below 1",
                field="eval_size",
            )
        if self.eval_source is not None:
            unweighted_sources("eval_source", self.eval_source)


@chz.chz
class EvaluationSettings(DecoderSettings, HeldOutSettings):
    """A run's evaluations of its own policy."""

    section: ClassVar[Section] = Section.EVALUATION

    eval_max_new_tokens: int | None = setting(
        at_least(1),
        default=None,
        doc="longest response in evaluations, in tokens; default: max_new_tokens",
    )
    eval_engines: int = setting(
        at_least(0),
        needs("eval_every", remedy="give eval_every=, or leave it out"),
        default=0,
        doc="policy engines reserved for the evaluations of every eval_every steps, which then run "
        "concurrently with training, with the weights of their step; 0: evaluations run between "
        "two steps, on the policy's engines",
        metadata=MAY_CHANGE,
    )

    @chz.validate
    def _evaluation_in_range(self) -> None:
        idle = {"eval_every": self.eval_every, "eval_source": self.eval_source}
        if self.eval_size == 0 and (without := [name for name, value in idle.items() if value]):
            raise ConfigError(
                f"{without[0]}={idle[without[0]]} changes nothing with eval_size=0, which runs "
                "no evaluation; leave one of them out"
            )

    def longest_evaluation(self) -> int:
        if self.eval_max_new_tokens is None:
            return self.max_new_tokens
        return self.eval_max_new_tokens
