"""Weight probe: after every push, the policy engines must hold the weights that were sent.

    publisher    push version v -> acknowledged -> probe.ask(v) ........ next push: probe.settle()
    engine                                         scores two rows, beside its rollouts

The answers are collected before the next push (or at the end of the run), when they have long been
there: a push waits for nothing. Knows neither Ray nor the transport; see the two callables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.handshake.handshake import probe_row
from distill.engine import EngineInfo, Score, ScoreRequest
from distill.errors import CalibrationError
from distill.handshake.comparison import compare, concatenated, looser, probe_prompts
from distill.objective.batching import TrainingRow
from distill.types import FloatArray

NUM_ROWS = 2

Engine = TypeVar("Engine")
Pending = TypeVar("Pending")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked(Generic[Pending]):
    version: int
    learnt_N: FloatArray
    answers: dict[str, Pending]


class WeightProbe(Generic[Engine, Pending]):
    """Compares every policy engine with the learner on two fixed rows, version by version.

    It finds an engine that serves other weights than it acknowledged, and prefixes cached under old
    ones: the rows are the same every time. What it cannot see is a step that moves log-probs by
    less than the tolerance of the engine's dtype.
    """

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        info: EngineInfo,
        temperature: float,
        learner: Callable[[Sequence[TrainingRow]], list[FloatArray]],
        submit: Callable[[Engine, list[ScoreRequest]], Pending],
        collect: Callable[[Pending], list[Score] | None],
        learner_dtype: str,
    ) -> None:
        """
        Args:
            engines: the policy engines, by the name to call them, in whatever form `submit` takes.
            info: of any of them; they serve one model.
            learner: log-probs of rows under the learner's weights.
            submit: asks an engine to `score`, without waiting.
            collect: waits for what `submit` returned; None if the engine is gone.
            learner_dtype: what the learner computes in.
        """
        prompts = probe_prompts(info.vocab_size, info.context_length)
        # The longest: a cached prefix of old weights has to have something to be cached of.
        chains = sorted(prompts, key=len)[-NUM_ROWS:]
        self._rows = [probe_row(c, max(1, len(c) // 2), temperature) for c in chains]
        self._requests = [
            ScoreRequest(
                tokens_T=row.tokens_T, start=row.first_trained, temperatures=(row.temperature,)
            )
            for row in self._rows
        ]
        self._engines, self._temperature = engines, temperature
        self._learner, self._submit, self._collect = learner, submit, collect
        self._dtype = looser(info.dtype, learner_dtype)
        self._asked: _Asked[Pending] | None = None

    def learnt(self) -> FloatArray:
        """The learner's log-probs of the rows, under its present weights."""
        return concatenated(self._learner(self._rows))

    def ask(self, version: int, learnt_N: FloatArray | None = None) -> None:
        """Call when every engine has acknowledged `version`.

        Args:
            learnt_N: what was `learnt` of that version; None: the learner has it still.
        """
        assert self._asked is None, "settle() comes first: an engine would answer for newer weights"
        answers = {name: self._submit(e, self._requests) for name, e in self._engines.items()}
        self._asked = _Asked(version, self.learnt() if learnt_N is None else learnt_N, answers)

    def settle(self) -> float | None:
        """Call before the next push and at the end. The largest gap; None if nobody answered.

        Raises:
            CalibrationError: an engine does not hold the weights that it acknowledged.
        """
        if self._asked is None:
            return None
        asked, self._asked = self._asked, None
        gaps = [
            self._gap(asked, name, scores)
            for name, answer in asked.answers.items()
            if (scores := self._collect(answer)) is not None
        ]
        return max(gaps, default=None)

    def _gap(self, asked: _Asked[Pending], name: str, scores: Sequence[Score]) -> float:
        comparison = compare(
            name,
            concatenated([score.logprobs_by_temperature[0] for score in scores]),
            "learner",
            asked.learnt_N,
            temperature=self._temperature,
            dtype=self._dtype,
        )
        if not comparison.agrees:
            raise CalibrationError(
                f"{name} does not hold weights version {asked.version}: its log-probs are up to "
                f"{comparison.max_gap:.3g} nats from the learner's on {comparison.num_tokens} "
                f"tokens (mean {comparison.mean_gap:.3g}; allowed {comparison.tolerance:.3g}, mean "
                f"{comparison.mean_tolerance:.3g}). The push did not arrive whole, or prefixes "
                "cached under older weights were kept"
            )
        return comparison.max_gap
