"""The learner's `publish`: every policy engine holds the weights, and only then are slots freed.

    learner   Transport.start -> every engine acknowledges -> (again, to those that failed)
              -> Transport.finish -> free slots -> probe and proof
    engine    load_weights: pause, load, drop every cached prefix, new version, continue,
              acknowledge with the pause in seconds
    admit     the same to engines that join, with the present weights; no slot is freed
    join      the same while the learner computes, from the copy of the last push
    teach     the same, of a teacher that follows the policy, to its engines; no slot is freed
    lend      the same to engines that do not join: they hold these weights until they are lent
              others
    sleep     engines that share the learner's GPUs release their memory until the next push

Where every transport sends a copy of the weights (and `goes_on` is given), the learner goes on once
those are made: the rest, from the acknowledgements on, is a thread's. The queue is told at once, so
that the next step may be taken. There is one push at a time: whatever else is asked waits for it
first. What probe and proof compare with is computed before the learner goes on.

Slots are freed only when every engine has acknowledged, so no rollout starts on weights older than
the newest. A push that fails leaves an engine at its old weights, or says that it must be
restarted; it always ends generation's pause. An engine that does not take the weights twice is
ended before any slot is freed; its owner restarts it (cluster/supervision/supervise.py). Whether an
engine holds what it acknowledged is not believed but asked (checks.py). The ways there:
transports.py. Engines of a teacher that follows: teacher_pushes.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from cluster.handles import calls
from cluster.supervision.failures import dead_among
from cluster.weights.attempt import Attempt
from cluster.weights.background import Background, Turn, Turns
from cluster.weights.checks import Answers, PushChecks
from cluster.weights.gather import GatherResult, collect
from cluster.weights.push_settings import PushSettings
from cluster.weights.teacher_pushes import TeacherPushes
from cluster.weights.transport import Transport
from cluster.weights.transports import choose_transports
from distill.errors import EngineError
from distill.objective.batching import TrainingRow
from distill.pace import Progress
from distill.records import TrainedGroups
from distill.types import FloatArray
from distill.weights.lending import LenderPlace
from distill.weights.model_weights import Weights, total_bytes

logger = logging.getLogger(__name__)


class Credit(Protocol):
    """Receiver of the credit that a push frees: the queue."""

    def publish(self, version: int, trained: TrainedGroups) -> None:
        """Weights that account for `trained` are on every engine."""
        ...


class Publisher:
    """`publish(weights, version, trained)`: returns once slots are free, or a copy is made.

    For one thread, but for `join`: all but `check` waits for the push that goes on beside it.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        credit: Credit,
        settings: PushSettings,
        learner_logprobs: Callable[[Sequence[TrainingRow]], list[FloatArray]],
        goes_on: Callable[[int, TrainedGroups], None] | None = None,
        progress: Progress | None = None,
        teachers: Mapping[str, Any] = MappingProxyType({}),
        lenders: Sequence[LenderPlace] = (),
    ) -> None:
        """
        Args:
            engines: Ray handles of the policy engines, by the name to call them.
            learner_logprobs: of rows, under the learner's weights.
            goes_on: told of each push that goes on beside the next step; None: none does.
            progress: the learner's, who gets on while a push waits: that has its own deadlines.
            teachers: engines of the teacher that follows the policy, as `engines`.
            lenders: the learner's workers, by rank; none given: this process alone.
        """
        self._engines = dict(engines)
        self._credit, self._goes_on = credit, goes_on
        self._settings = settings
        self._lenders = lenders or [LenderPlace.own(settings.device)]
        self._transports: list[Transport] | None = None
        self._lent: tuple[dict[str, Any], list[Transport]] = ({}, [])  # engines, and ways there
        self._found: dict[str, float] = {}  # metrics for the next push to return
        self._beside = Background[dict[str, float]]()
        self._held_up_s = 0.0  # how long the learner has waited for that one
        self._progress = progress or Progress()
        # A push's, or of engines that join.
        self._turns = Turns(settings.timeout_s, self._progress)
        self._last: Attempt | None = None  # the push that all engines hold, and its copies
        self._answers = Answers(settings.timeout_s, self._progress)
        self._checks = PushChecks(
            self._engines, settings, learner_logprobs, self._answers, self._progress
        )
        self._teachers = TeacherPushes(teachers, settings, self._answers, self._progress)

    def describe(self) -> str:
        """Transport of each engine, for people to read."""
        return "; ".join(
            f"{transport.describe()} to {', '.join(transport.engines)}"
            for transport in self._transports or []
        )

    def __call__(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        """Returns `push/*` metrics: bytes, seconds, the engines' longest pause.

        Of the version before: the probe's gap, and the share of parameters that are proven; and, if
        this push goes on when this returns, seconds, pause and number of engines.

        Raises:
            CalibrationError: an engine does not hold the version before.
            EngineError: not one engine took the weights (or those of the push before), though they
                live.
            NonFiniteError: the weights hold a NaN or an infinity.
        """
        self.wait()
        metrics: dict[str, float] = {"push/bytes": total_bytes(weights)}
        metrics |= self._found | self._settled()
        self._found = {}
        with self._turns.next() as turn:
            started = time.perf_counter()
            attempt = self._begin(weights, version)
            if self._goes_beside(attempt):
                self._go_beside(attempt, weights, trained, started, turn)
                return metrics
            anew = partial(self._anew, weights, version)
            self._found = self._acknowledged(attempt, started, anew)
            metrics |= self._found
            self._credit.publish(version, trained)
            self._checks.ask(version, weights)
        return metrics

    def join(self, engines: Mapping[str, Any]) -> int | None:
        """`admit` beside the learner, whatever it computes: from the copy of the last push.

        For another thread than all else. Waits for a push under way. Returns the version; None: the
        last push left no copy that they can read.

        Raises:
            EngineError: one of them did not take the weights; none of them joins.
        """
        with self._turns.next():
            last = self._last
            answers = last and last.to_others(self._choose(engines), self._settings.timeout_s)
            if last is None or answers is None:
                return None
            self._add(engines, answers, last.version)
            return last.version

    def wait(self) -> None:
        """Waits for the push that goes on beside the learner, if one does; raises as a push does.

        Its metrics are part of the next push's.
        """
        if (ended := self._beside.wait()) is not None:
            seconds = ended.value["push/seconds"] - self._held_up_s - ended.waited_s
            self._found = ended.value | {"push/overlapped": max(0.0, seconds)}

    def check(self) -> None:
        """Raises as a push does if the one beside the learner has failed; waits for nothing."""
        self._beside.check()

    def admit(self, engines: Mapping[str, Any], weights: Weights, version: int) -> None:
        """Hands the present weights to engines that join; they are part of every later push.

        Raises:
            EngineError: one of them did not take the weights; none of them joins.
        """
        self.wait()
        with self._turns.next():
            self._add(engines, self._anew(weights, version, engines), version)

    def _add(self, engines: Mapping[str, Any], answers: GatherResult, version: int) -> None:
        if answers.failures:
            raise EngineError(f"pushing weights version {version} failed: {answers.complaint()}")
        self._engines |= engines
        self._transports = None

    def teach(self, weights: Weights, version: int) -> dict[str, float]:
        """Hands the teacher that follows the policy to its engines; ends those that do not take it.

        Returns `push/teacher_seconds`.

        Raises:
            CalibrationError: one does not hold what it was handed before.
        """
        self.wait()
        self._answers.begin()
        self._teachers.settle()
        with self._turns.next():
            return self._teachers.push(weights, version)

    def admit_teachers(self, engines: Mapping[str, Any], weights: Weights, version: int) -> None:
        """Hands the teacher to engines of its own that join; they are part of every later push.

        Raises:
            EngineError: one of them did not take the weights; none of them joins.
        """
        self.wait()
        with self._turns.next():
            self._teachers.admit(engines, weights, version)

    def lend(self, engines: Mapping[str, Any], weights: Weights, version: int) -> dict[str, str]:
        """Hands the present weights to engines that are part of no later push.

        Returns why an engine did not take them, by the names of those that did not.
        """
        self.wait()
        known, transports = self._lent
        try:
            with self._turns.next():
                if known != engines:
                    transports = self._choose(engines)
                attempt = Attempt.begin(transports, weights, version, self._progress.mark)
                failures = attempt.answers(self._settings.timeout_s).failures
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
        self.wait()
        self._found |= self._settled()  # a scoring that waits for the push would hold it up
        pending = {name: engine.sleep.remote() for name, engine in self._engines.items()}
        answers = collect(pending, self._settings.timeout_s, waiting=self._progress.mark)
        if not answers.failures:
            return
        # What it holds on to, the learner would lack in the middle of a step.
        logger.warning("after weights version %d: %s", version, answers.complaint())
        self._end(list(answers.failures), "did not release its memory")
        self._transports = None

    def dismiss(self, names: Sequence[str]) -> None:
        """Drops engines: they get no more weights."""
        self.wait()
        with self._turns.next():
            for name in names:
                self._engines.pop(name, None)
            self._transports = None
            self._teachers.dismiss(names)

    def _begin(self, weights: Weights, version: int) -> Attempt:
        self._last = None  # whose copies are written over, or let go
        if self._transports is None:
            self._drop(dead_among(self._engines), version)
            self._transports = self._choose(self._engines)
        return Attempt.begin(self._transports, weights, version, self._progress.mark)

    def _goes_beside(self, attempt: Attempt) -> bool:
        """The push may go on beside the learner: nothing of it needs the present weights."""
        return (
            self._goes_on is not None
            and not attempt.needs_weights
            and self._checks.can_prepare(attempt.version)
        )

    def _go_beside(
        self,
        attempt: Attempt,
        weights: Weights,
        trained: TrainedGroups,
        started: float,
        turn: Turn,
    ) -> None:
        version = attempt.version
        ask = self._checks.prepare(version, weights)

        def finish() -> dict[str, float]:
            try:
                again = partial(attempt.again, timeout_s=self._settings.timeout_s)
                metrics = self._acknowledged(attempt, started, again)
                self._credit.publish(version, trained)
                ask()
            finally:
                turn.end()
            return metrics

        assert self._goes_on is not None
        self._goes_on(version, trained)
        turn.goes_on = True
        self._beside.begin(finish)
        self._held_up_s = time.perf_counter() - started

    def _acknowledged(
        self,
        attempt: Attempt,
        started: float,
        again: Callable[[dict[str, Any]], GatherResult],
    ) -> dict[str, float]:
        """Metrics of a push, once all engines hold it. Those that are dead or fail twice are
        dropped."""
        pauses = self._pauses(attempt, again)
        self._last = attempt
        return {
            "push/seconds": time.perf_counter() - started,
            "push/pause": max(pauses.values(), default=0.0),
            "push/engines": len(pauses),
        }

    def _pauses(
        self, attempt: Attempt, again: Callable[[dict[str, Any]], GatherResult]
    ) -> dict[str, float]:
        version, answers = attempt.version, attempt.answers(self._settings.timeout_s)
        if not answers.failures:
            return answers.values
        logger.warning("weights version %d: %s; trying again", version, answers.complaint())
        failed = {name: self._engines[name] for name in answers.failures}
        dead = {*dead_among(failed), *answers.lost}
        self._drop(sorted(dead), version)  # at once: some may be in a collective that never ends
        repeated = again({name: engine for name, engine in failed.items() if name not in dead})
        self._transports = None
        if repeated.failures and not (answers.values or repeated.values or dead or repeated.lost):
            raise EngineError(f"pushing weights version {version} failed: {repeated.complaint()}")
        self._drop(list(repeated.failures), version)
        return answers.values | repeated.values

    def _anew(self, weights: Weights, version: int, engines: Mapping[str, Any]) -> GatherResult:
        """A push to some engines, over transports of their own."""
        attempt = Attempt.begin(self._choose(engines), weights, version, self._progress.mark)
        return attempt.answers(self._settings.timeout_s)

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
            EngineError: no engine took them.
        """
        self.wait()
        return self._settled().get("push/probe_gap")

    def _settled(self) -> dict[str, float]:
        self._answers.begin()
        found = self._checks.settle() | {"push/teacher_proven": self._teachers.settle()}
        return {name: value for name, value in found.items() if value is not None}

    def _choose(self, engines: Mapping[str, Any]) -> list[Transport]:
        return choose_transports(self._settings, engines, self._lenders)
