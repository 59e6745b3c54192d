"""Checks of policy engines after a push, collected before the next one: probe and proof.

    within a step   push v -> acknowledged -> ask(v, weights) ............. next push: settle()
    beside it       ask_later = prepare(v, weights) -> the learner goes on
                    push v -> acknowledged -> ask_later() ................. next push: settle()

Both compare an engine with the pushed weights, so the learner's side is computed while the learner
still holds them. See weight_probe.py and proof.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cluster.handles import calls, errors
from cluster.weights.gather import values
from cluster.weights.proof import PushProof
from cluster.weights.push_settings import PushSettings
from cluster.weights.weight_probe import WeightProbe
from distill.errors import EngineError
from distill.objective.batching import TrainingRow
from distill.pace import Progress
from distill.types import FloatArray
from distill.weights.model_weights import Weights

logger = logging.getLogger(__name__)


class Answers:
    """Collects answers of several engines under one shared deadline."""

    def __init__(self, timeout_s: float, progress: Progress) -> None:
        self._timeout_s, self._progress = timeout_s, progress
        self._due = 0.0

    def begin(self) -> None:
        """Set the deadline to `timeout_s` from now."""
        self._due = time.monotonic() + self._timeout_s

    def collect(self, what: str, reference: Any) -> Any:
        """The engine's answer, or None if the call failed or missed the deadline.

        Args:
            what: the requested action, for the log.
        """
        self._progress.mark()
        try:
            return calls.get(reference, timeout=max(0.0, self._due - time.monotonic()))
        except (errors.RayError, EngineError) as error:
            logger.warning("a policy engine did not %s: %s", what, error)
            return None

    def proof(self, engines: Mapping[str, Any]) -> PushProof[Any, Any]:
        """A `PushProof` for these engines that collects its answers under this deadline."""
        return PushProof[Any, Any](
            engines=engines,
            submit=lambda engine: engine.weight_checksums.remote(),
            collect=partial(self.collect, "say the checksums of its weights"),
        )


class PushChecks:
    """Probe and proof of the policy engines, version by version."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        settings: PushSettings,
        learner_logprobs: Callable[[Sequence[TrainingRow]], list[FloatArray]],
        answers: Answers,
        progress: Progress,
    ) -> None:
        """
        Args:
            engines: live view of the engines that hold the pushed weights, by name.
            learner_logprobs: returns log-probs of rows under the learner's weights.
        """
        self._engines, self._settings, self._progress = engines, settings, progress
        self._learner_logprobs, self._answers = learner_logprobs, answers
        self._probe: WeightProbe[Any, Any] | None = None
        self._proof = answers.proof(engines)

    def ask(self, version: int, weights: Weights) -> None:
        """Send the checks of `version` to the engines.

        Call after every engine has acknowledged `version`, before the learner's next step.
        """
        self._progress.mark()
        if self._is_probed(version) and (probe := self._probe or self._first_probe()):
            self._probe = probe
            probe.ask(version)
        self._answers.begin()
        if self._settings.is_proven(version):
            self._proof.ask(version, weights)

    def can_prepare(self, version: int) -> bool:
        """True if `prepare` can run for this version.

        The first probe and the first proof determine what later ones request.
        """
        return (self._probe is not None or not self._is_probed(version)) and (
            self._proof.knows_recipes or not self._settings.is_proven(version)
        )

    def prepare(self, version: int, weights: Weights) -> Callable[[], None]:
        """Compute the learner's side of the checks of `version`.

        Returns:
            A function that sends the checks to the engines. Call it after all have acknowledged;
            the learner's weights may have changed by then.
        """
        learnt_N = digests = None
        if self._is_probed(version) and self._probe is not None:
            learnt_N = self._probe.learnt()
        if self._settings.is_proven(version):
            digests = self._proof.expected(weights)

        def ask() -> None:
            self._answers.begin()
            if learnt_N is not None and self._probe is not None:
                self._probe.ask(version, learnt_N)
            if digests is not None:
                self._proof.ask_for(version, digests)

        return ask

    def settle(self) -> dict[str, float | None]:
        """Collect the answers and return their metrics; None if no check was sent or answered.

        Raises:
            CalibrationError: an engine does not hold the weights that it acknowledged.
        """
        return {
            "push/probe_gap": None if self._probe is None else self._probe.settle(),
            "push/proven": self._proof.settle(),
        }

    def _is_probed(self, version: int) -> bool:
        return self._settings.is_probed(version) and bool(self._engines)

    def _first_probe(self) -> WeightProbe[Any, Any] | None:
        """Probe that is built from the first engine's info.

        None if that engine has just died; the next push tries again with another engine.
        """
        name, engine = next(iter(self._engines.items()))
        try:
            asked = {name: engine.info.remote()}
            info = values(asked, "asking", self._settings.timeout_s)[name]
        except EngineError:
            return None
        return WeightProbe(
            engines=self._engines,
            info=info,
            temperature=self._settings.temperature,
            learner=self._learner_logprobs,
            submit=lambda engine, requests: engine.score.remote(requests),
            collect=partial(self._answers.collect, "answer the weight probe"),
            learner_dtype=self._settings.learner_dtype,
        )
