"""The learner's `publish`: every policy engine holds the weights, and only then are slots freed.

    learner   Transport.start -> every engine acknowledges -> (again, to those that failed)
              -> Transport.finish -> free slots -> probe and proof
    engine    load_weights: pause, load, drop every cached prefix, new version, continue,
              acknowledge with the pause in seconds
    admit     the same to engines that join, with the present weights; no slot is freed
    lend      the same to engines that do not join: they hold these weights until they are lent
              others
    sleep     engines that share the learner's GPUs release their memory until the next push

Slots are freed only when every engine has acknowledged, so no rollout starts on weights older than
the newest. A push that fails leaves an engine at its old weights, or says that it must be
restarted; it always ends generation's pause. An engine that does not take the weights twice is
ended before any slot is freed; its owner restarts it (cluster/supervision/supervise.py). Whether an
engine holds what it acknowledged is not believed but asked: what it makes of it
(cluster/weights/weight_probe.py), and its bits (cluster/weights/proof.py). The ways there:
cluster/weights/transports.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ray.exceptions import GetTimeoutError, RayError

from cluster.config.pools import WeightsChoice
from cluster.handles import calls
from cluster.supervision.failures import dead_among
from cluster.weights.delta import DeltaSender
from cluster.weights.gather import GatherResult, collect, values
from cluster.weights.proof import PushProof
from cluster.weights.transport import Transport
from cluster.weights.transports import choose_transports
from cluster.weights.weight_probe import WeightProbe
from distill.delivery import TrainedGroups
from distill.errors import EngineError
from distill.objective.batching import TrainingRow
from distill.types import FloatArray
from distill.weights.model_weights import BUCKET_BYTES, Weights, total_bytes

logger = logging.getLogger(__name__)


class Credit(Protocol):
    """Receiver of the credit that a push frees: the queue."""

    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Weights that account for `trained` are on every engine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Settings of a run's pushes. `choose_transports` explains most of it.

    Attributes:
        temperature: the run's; the probe scores at it.
        learner_dtype: what the learner computes in; how far it may be from an engine.
        probe_every, prove_every: versions between two that are probed, and proven; 0: none is.
        bucket_bytes: most that a collective sends at once.
        deltas: engines on other nodes are sent what changed.
        timeout_s: longest a push may take.
    """

    choice: WeightsChoice
    served: bool
    device: str
    directory: str
    model: str
    temperature: float
    learner_dtype: str
    probe_every: int
    prove_every: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES
    deltas: bool = False
    nodes: int = 1


class Publisher:
    """`publish(weights, version, trained)`: returns once slots are free."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        credit: Credit,
        settings: PushSettings,
        learner_logprobs: Callable[[Sequence[TrainingRow]], list[FloatArray]],
    ) -> None:
        """
        Args:
            engines: Ray handles of the policy engines, by the name to call them.
            learner_logprobs: of rows, under the weights that were just published.
        """
        self._engines = dict(engines)
        self._credit = credit
        self._settings = settings
        self._deltas = DeltaSender() if settings.deltas else None
        self._learner_logprobs = learner_logprobs
        self._transports: list[Transport] | None = None
        self._lent: tuple[dict[str, Any], list[Transport]] = ({}, [])  # engines, and ways there
        self._probe: WeightProbe[Any, Any] | None = None
        self._found: dict[str, float] = {}  # what was settled before the engines slept
        self._answers_due = 0.0  # until when probe and proof wait, for all engines together
        self._proof = PushProof[Any, Any](
            engines=self._engines,
            submit=lambda engine: engine.weight_checksums.remote(),
            collect=partial(self._collect, "say the checksums of its weights"),
        )

    def describe(self) -> str:
        """Transport of each engine, for people to read."""
        return "; ".join(
            f"{transport.describe()} to {', '.join(transport.engines)}"
            for transport in self._transports or []
        )

    def __call__(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        """Returns `push/*` metrics: bytes, seconds, the engines' longest pause.

        Of the version before: the probe's gap, and the share of parameters that are proven. With
        deltas: the share of values that changed, and the number of engines that got all of them.

        Raises:
            CalibrationError: an engine does not hold the version before.
            EngineError: not one engine took the weights, though they live.
            NonFiniteError: the weights hold a NaN or an infinity.
        """
        metrics, self._found = self._found | self._settled(), {}
        started = time.perf_counter()
        if self._deltas is not None:
            self._deltas.count()
        pauses = self._push(weights, version)
        metrics |= {
            "push/bytes": total_bytes(weights),
            "push/seconds": time.perf_counter() - started,
            "push/pause": max(pauses.values(), default=0.0),
            "push/engines": len(pauses),
        }
        if self._deltas is not None:
            metrics |= self._deltas.metrics(pauses, total_bytes(weights))
        self._credit.publish(version, trained)
        if _is_due(version, self._settings.probe_every):
            self._ask(version)
        self._answers_due = time.monotonic() + self._settings.timeout_s
        if _is_due(version, self._settings.prove_every):
            self._proof.ask(version, weights)
        return metrics

    def admit(self, engines: Mapping[str, Any], weights: Weights, version: int) -> None:
        """Hands the present weights to engines that join; they are part of every later push.

        Raises:
            EngineError: one of them did not take the weights; none of them joins.
        """
        answers = self._attempt(self._choose(engines), weights, version)
        if answers.failures:
            raise EngineError(f"pushing weights version {version} failed: {answers.complaint()}")
        self._engines |= engines
        self._transports = None

    def lend(self, engines: Mapping[str, Any], weights: Weights, version: int) -> dict[str, str]:
        """Hands the present weights to engines that are part of no later push.

        Returns why an engine did not take them, by the names of those that did not.
        """
        known, transports = self._lent
        try:
            if known != engines:
                transports = self._choose(engines)
            failures = self._attempt(transports, weights, version).failures
        except EngineError as error:  # one died before it was asked where it is
            failures = dict.fromkeys(engines, str(error))
        # A group is formed once; a block as large as the model is not kept in between.
        stays = not failures and any(transport.linked for transport in transports)
        self._lent = (dict(engines), transports) if stays else ({}, [])
        return failures

    def sleep(self, version: int) -> None:
        """Has every engine release its GPU memory until the next push; ends one that does not.

        Args:
            version: of the weights that they hold.

        Raises:
            CalibrationError: an engine does not hold that version.
        """
        self._found = self._settled()  # a scoring that waits for the push would hold it up
        pending = {name: engine.sleep.remote() for name, engine in self._engines.items()}
        answers = collect(pending, self._settings.timeout_s)
        if not answers.failures:
            return
        # What it holds on to, the learner would lack in the middle of a step.
        logger.warning("after weights version %d: %s", version, answers.complaint())
        self._end(list(answers.failures), "did not release its memory")
        self._transports = None

    def dismiss(self, names: Sequence[str]) -> None:
        """Drops engines: they get no more weights."""
        for name in names:
            self._engines.pop(name, None)
        self._transports = None

    def _push(self, weights: Weights, version: int) -> dict[str, float]:
        """Pushes; returns each engine's pause. Engines that are dead or fail twice are dropped."""
        if self._transports is None:
            self._drop(dead_among(self._engines), version)
            self._transports = self._choose(self._engines)
        answers = self._attempt(self._transports, weights, version)
        if not answers.failures:
            return answers.values
        logger.warning("weights version %d: %s; trying again", version, answers.complaint())
        failed = {name: self._engines[name] for name in answers.failures}
        dead = {*dead_among(failed), *answers.lost}
        self._drop(sorted(dead), version)  # at once: some may be in a collective that never ends
        alive = {name: engine for name, engine in failed.items() if name not in dead}
        again = self._attempt(self._choose(alive), weights, version)
        self._transports = None
        if again.failures and not (answers.values or again.values or dead or again.lost):
            raise EngineError(f"pushing weights version {version} failed: {again.complaint()}")
        self._drop(list(again.failures), version)
        return answers.values | again.values

    def _attempt(
        self, transports: Sequence[Transport], weights: Weights, version: int
    ) -> GatherResult:
        total = GatherResult()
        started: list[tuple[Transport, dict[str, Any]]] = []
        for transport in transports:
            try:
                started.append((transport, transport.start(weights, version)))
            except EngineError as error:
                transport.abort()
                total.failures |= dict.fromkeys(transport.engines, str(error))
        for transport, pending in started:
            answers = collect(
                pending,
                self._settings.timeout_s,
                linked=transport.linked,
                problem=transport.problem,
                give_up=transport.give_up,
            )
            try:
                if answers.failures or answers.problem:
                    transport.abort()
                else:
                    transport.finish()
            except EngineError as error:
                answers.problem = str(error)
            if answers.problem:
                late = pending.keys() - answers.values.keys() - answers.failures.keys()
                answers.failures |= dict.fromkeys(late, answers.problem)
            total.values |= answers.values
            total.failures |= answers.failures
            total.lost |= answers.lost
            total.problem = total.problem or answers.problem
        return total

    def _drop(self, names: Sequence[str], version: int) -> None:
        self._end(names, f"did not take weights version {version}")

    def _end(self, names: Sequence[str], why: str) -> None:
        for name in names:
            logger.warning("%s %s: it is ended", name, why)
            calls.kill(self._engines.pop(name))

    def settle(self) -> float | None:
        """Collects what the engines answered to probe and proof; call once more at a run's end.

        Returns the probe's gap.

        Raises:
            CalibrationError: an engine does not hold the weights that it acknowledged.
        """
        return self._settled().get("push/probe_gap")

    def _settled(self) -> dict[str, float]:
        self._answers_due = time.monotonic() + self._settings.timeout_s
        found = {
            "push/probe_gap": None if self._probe is None else self._probe.settle(),
            "push/proven": self._proof.settle(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _ask(self, version: int) -> None:
        if not self._engines:
            return
        if self._probe is None:
            name, engine = next(iter(self._engines.items()))
            try:
                answers = values({name: engine.info.remote()}, "asking", self._settings.timeout_s)
            except EngineError:
                return  # it has just died: the next version asks another
            self._probe = WeightProbe(
                engines=self._engines,
                info=answers[name],
                temperature=self._settings.temperature,
                learner=self._learner_logprobs,
                submit=lambda engine, requests: engine.score.remote(requests),
                collect=partial(self._collect, "answer the weight probe"),
                learner_dtype=self._settings.learner_dtype,
            )
        self._probe.ask(version)

    def _collect(self, what: str, reference: Any) -> Any:
        """What the engine answered; None if it did not."""
        try:
            left_s = max(0.0, self._answers_due - time.monotonic())
            return calls.get(reference, timeout=left_s)
        except (GetTimeoutError, RayError, EngineError) as error:
            logger.warning("a policy engine did not %s: %s", what, error)
            return None

    def _choose(self, engines: Mapping[str, Any]) -> list[Transport]:
        settings = self._settings
        if not engines:
            return []
        return choose_transports(
            settings.choice,
            engines,
            served=settings.served,
            device=settings.device,
            directory=settings.directory,
            model=settings.model,
            timeout_s=settings.timeout_s,
            bucket_bytes=settings.bucket_bytes,
            deltas=self._deltas,
            nodes=settings.nodes,
        )


def _is_due(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
