"""Pushes of weights to a pool of engines; slots are freed only when every engine holds them.

    learner   Transport.start -> every engine acknowledges -> (again, to those that failed)
              -> Transport.finish -> free slots -> check
    engine    load_weights: pause, load, drop every cached prefix, new version, continue,
              acknowledge with the pause in seconds
    admit     a push of the present weights to engines that join; frees no slot
    join      `admit` while the learner computes, from the copy of the last push
    lend      a push to engines that do not join: they keep these weights until the next `lend`
    sleep     engines that share the learner's GPUs release their memory until the next push

A run has a `Publisher` for its policy engines and, with a lagged or EMA teacher, a second one for
the teacher's engines, which frees no slots.

If every transport sends a copy of the weights (and `on_overlap` is given), the learner continues
once the copies are made and the check's expected answers are computed; a thread does the rest, from
the acknowledgements on. `on_overlap` informs the queue immediately, so that the next step may be
taken. Only one push is in progress at a time: every other request waits for it first.

An error of the learner's own work (gathering, lending) is raised unchanged, and no engine is
terminated because of it. A push that fails leaves an engine at its old weights, or the engine must
be restarted; it always ends the pause of generation. An engine that fails twice is terminated
before any slot is freed; its owner restarts it (cluster/supervision/supervise.py).
An acknowledgement does not prove that an engine uses the weights: cluster/weights/check.py does.
The transports are in cluster/weights/transports.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from cluster.handles import calls
from cluster.weights.check import Logprobs, PushCheck
from cluster.weights.transport import Answers, PushSettings, Transport, collect
from cluster.weights.transports import choose_transports
from distill.durable_files import with_retries
from distill.errors import EngineError, NonFiniteError
from distill.pace import Progress, loading_s
from distill.records import TrainedGroups
from distill.weights.lending import LenderPlace
from distill.weights.model_weights import Weights, total_bytes

logger = logging.getLogger(__name__)

# Callback: receives a version of the weights, and the groups that it accounts for.
VersionCallback: TypeAlias = Callable[[int, TrainedGroups], None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A push that has been started on its transports.

    Attributes:
        started: transports, each with the pending acknowledgements by engine name.
        failures: reason that a transport could not start, by engine name.
        timeout_s: longest wait without an answer, including what loading this many bytes may take.
        waiting: called repeatedly while answers are outstanding.
    """

    version: int
    started: list[tuple[Transport, dict[str, Any]]]
    failures: dict[str, str]
    timeout_s: float
    waiting: Callable[[], None]

    @classmethod
    def begin(
        cls,
        transports: Sequence[Transport],
        weights: Weights,
        version: int,
        timeout_s: float,
        waiting: Callable[[], None] = lambda: None,
    ) -> Attempt:
        """Start the push on all transports. Transports by copy have made their copy on return.

        Raises:
            NonFiniteError: the weights hold a NaN or an infinity, with which a server would crash.
            CheckpointError: the weights cannot be written, or the disk stays full.
        """
        if (bad := weights.first_non_finite()) is not None:
            raise NonFiniteError(f"{bad!r} is not finite: version {version} is not pushed")
        begun = cls(version, [], {}, timeout_s + loading_s(total_bytes(weights)), waiting)
        for transport in transports:
            try:
                start = partial(transport.start, weights, version)
                begun.started.append((transport, with_retries(start, waiting)))
            except EngineError as error:
                transport.abort()
                begun.failures.update(dict.fromkeys(transport.engines, str(error)))
        return begun

    @property
    def has_copies(self) -> bool:
        """True if the rest of the push, a retry included, does not read the learner's weights."""
        return not self.failures and all(transport.copies for transport, _ in self.started)

    def answers(self) -> Answers:
        """Wait for every engine, then finish or abort the push on each transport.

        Raises: an error of the learner's own work, which no engine caused.
        """
        total = Answers(failures=dict(self.failures))
        for transport, pending in self.started:
            sending = transport.sending
            answers = collect(pending, self.timeout_s, sending, waiting=self.waiting)
            if not answers.any_failed:
                transport.finish()
                if sending is not None:
                    answers.record_sending(sending)
            if answers.any_failed:
                transport.abort()
            total.add(answers)
        if total.error is not None:
            raise total.error
        return total

    def load_copies(
        self, engines: Mapping[str, Any], transports: Iterable[Transport]
    ) -> Answers | None:
        """Load the existing copies into engines; None if an engine can read none of the copies.

        Args:
            transports: transports by which these engines receive weights.
        """
        made = {type(transport): transport for transport, _ in self.started if transport.copies}
        copies = {
            name: made[type(transport)]
            for transport in transports
            for name in transport.engines
            if name in engines and type(transport) in made
        }
        if copies.keys() != engines.keys():
            return None
        pending: dict[str, Any] = {}
        for name, copy in copies.items():
            pending |= copy.load({name: engines[name]}, self.version)
        return collect(pending, self.timeout_s, waiting=self.waiting)


class Publisher:
    """Publisher of weights to one pool of engines, Ray handles by name.

    Only `join` may be called from a second thread.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        settings: PushSettings,
        learner_logprobs: Logprobs,
        *,
        base_logprobs: Logprobs | None = None,
        credit: VersionCallback | None = None,
        on_overlap: VersionCallback | None = None,
        progress: Progress | None = None,
        lenders: Sequence[LenderPlace] = (),
    ) -> None:
        """
        Args:
            learner_logprobs: log-probs of rows under the weights that are pushed.
            base_logprobs: log-probs of rows without the adapter, if adapters alone are pushed.
            credit: called when all engines hold a version; None: nothing is called.
            on_overlap: called for each push that overlaps the next step; None: no push overlaps it.
            progress: the learner's, marked while a push waits, which has its own deadlines.
            lenders: locations of the learner's workers that may lend, by rank.
        """
        self._engines, self._settings = dict(engines), settings
        self._credit, self._on_overlap = credit, on_overlap
        self._progress = progress or Progress()
        self._lenders = lenders
        self._check = PushCheck(
            self._engines, settings, learner_logprobs, self._progress, base_logprobs
        )
        self._transports: list[Transport] | None = None
        self._last: Attempt | None = None  # the push whose weights all engines hold, and its copies
        self._turn_lock = threading.Lock()  # held during a push or a `join`
        self._overlapping: Future[dict[str, float]] | None = None  # the push that overlaps the step
        # Seconds for which the learner waited for that push, and the time at which it continued.
        self._held_up_s = self._continued_at = 0.0
        self._found: dict[str, float] = {}  # metrics for the next push to return

    def describe(self) -> str:
        return "; ".join(
            f"{transport.describe()} to {', '.join(transport.engines)}"
            for transport in self._transports or []
        )

    def __call__(self, weights: Weights, version: int, trained: TrainedGroups) -> dict[str, float]:
        """Push; return once slots are freed or, if the push overlaps the step, copies are made.

        Returns `push/*` metrics: bytes; seconds, the engines' longest pause and number; and what
        the check of the version before found. If this push continues after the return, seconds,
        pause and number of engines are those of the version before.

        Raises:
            CalibrationError: an engine does not hold the version before.
            EngineError: no engine loaded the weights (or those of the push before), though all are
                alive.
            CheckpointError, NonFiniteError: as `Attempt.begin`.
        """
        self.wait()
        metrics = {"push/bytes": total_bytes(weights), **self._found, **self._check.settle()}
        self._found = {}
        with ExitStack() as stack:
            stack.enter_context(self._turn())
            started = time.perf_counter()
            attempt = self._begin(weights, version)
            if self._on_overlap is None or not (
                attempt.has_copies and self._check.is_ready(version)
            ):
                self._found = self._finish(attempt, weights, trained, started)
                self._check.ask(self._check.expect(version, weights))
                return metrics | self._found
            expected = self._check.expect(version, weights)
            self._on_overlap(version, trained)
            turn = stack.pop_all()  # the thread ends it

            def finish() -> dict[str, float]:
                with turn:
                    found = self._finish(attempt, weights, trained, started)
                    self._check.ask(expected)
                    return found

            self._overlapping = calls.in_thread(finish, "push")
            self._continued_at = time.perf_counter()
            self._held_up_s = self._continued_at - started
        return metrics

    def wait(self) -> None:
        """Wait for a push that overlaps the step, and raise its error, if any."""
        if self._overlapping is None:
            return
        began = time.perf_counter()
        found = self._overlapping.result()
        self._overlapping = None
        overlapped = min(found["push/seconds"] - self._held_up_s, began - self._continued_at)
        self._found = found | {"push/overlapped": max(0.0, overlapped)}

    def check(self) -> None:
        """Raise the error of a push that overlaps the step, if it has failed; does not wait."""
        if self._overlapping is not None and self._overlapping.done():
            self._overlapping.result()

    def settle(self) -> float | None:
        """Finish the last check, at the end of a run; return the gap of log-probs, nats, if any.

        Raises: as `__call__`.
        """
        self.wait()
        return self._check.settle().get("push/probe_gap")

    def admit(self, engines: Mapping[str, Any], weights: Weights, version: int) -> None:
        """Push the present weights, and every later version, to engines that join.

        Raises:
            EngineError: an engine did not load the weights; then none of these engines joins.
        """
        self.wait()
        with self._turn():
            self._add(engines, self._repush(weights, version, engines), version)

    def join(self, engines: Mapping[str, Any]) -> int | None:
        """`admit` while the learner computes, from the copy of the last push; for another thread.

        Waits for a push in progress. Returns the version, or None if the last push left no copy
        that these engines can read. Raises as `admit`.
        """
        with self._turn():
            last = self._last
            answers = last and last.load_copies(engines, self._choose(engines))
            if last is None or answers is None:
                return None
            self._add(engines, answers, last.version)
            return last.version

    def lend(self, engines: Mapping[str, Any], weights: Weights, version: int) -> dict[str, str]:
        """Push the present weights to engines that are part of no later push.

        Returns the reasons why engines did not load the weights, by name.
        """
        self.wait()
        try:
            with self._turn():
                return self._repush(weights, version, engines).failures
        except EngineError as error:  # an engine died before it reported its place
            return dict.fromkeys(engines, str(error))

    def sleep(self, version: int) -> None:
        """Make every engine release its GPU memory until the next push; terminate one that fails.

        Raises:
            CalibrationError: an engine does not hold `version`.
        """
        self.wait()
        # The next push would wait for a pending scoring, and the scoring for that push.
        self._found |= self._check.settle()
        pending = {name: engine.sleep.remote() for name, engine in self._engines.items()}
        answers = collect(pending, self._settings.timeout_s, waiting=self._progress.mark)
        if answers.failures:  # the learner would lack this memory in the middle of a step
            logger.warning("after weights version %d: %s", version, answers.describe_failures())
            self._terminate(list(answers.failures), "did not release its memory")

    def remove_engines(self, names: Sequence[str]) -> None:
        self.wait()
        with self._turn():
            for name in names:
                self._engines.pop(name, None)
            self._replace_ways()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other push or `join` is in progress, and exclude others.

        Raises:
            EngineError: the other one made no progress.
        """
        seen = self._progress.count
        while not self._turn_lock.acquire(timeout=self._settings.timeout_s):
            if seen == (seen := self._progress.count):
                raise EngineError(
                    f"waited {self._settings.timeout_s:.0f} s for other engines to load their "
                    "weights"
                )
        try:
            yield
        finally:
            self._turn_lock.release()

    def _begin(self, weights: Weights, version: int) -> Attempt:
        self._last = None  # its copies are overwritten, or released
        if self._transports is None:
            self._drop(calls.dead_among(self._engines), version)
            self._transports = self._choose(self._engines)
        return self._attempt(self._transports, weights, version)

    def _finish(
        self, attempt: Attempt, weights: Weights, trained: TrainedGroups, started: float
    ) -> dict[str, float]:
        """Complete a push, from the acknowledgements until slots are freed; return its metrics.

        If the attempt `has_copies`, the weights may have changed since.
        """
        pauses = self._pauses(attempt, weights)
        self._last = attempt
        metrics = {
            "push/seconds": time.perf_counter() - started,
            "push/pause": max(pauses.values(), default=0.0),
            "push/engines": len(pauses),
        }
        if self._credit is not None:
            self._credit(attempt.version, trained)
        return metrics

    def _pauses(self, attempt: Attempt, weights: Weights) -> dict[str, float]:
        """Pause of each engine that loaded the weights, at the first or second attempt.

        Terminates the others.
        """
        version, answers = attempt.version, attempt.answers()
        if not answers.failures:
            return answers.values
        logger.warning("weights version %d: %s; trying again", version, answers.describe_failures())
        failed = {name: self._engines[name] for name in answers.failures}
        dead = {*calls.dead_among(failed), *answers.lost}
        self._drop(sorted(dead), version)  # first: some may be in a collective that never ends
        left = {name: engine for name, engine in failed.items() if name not in dead}
        retried = attempt.load_copies(left, (transport for transport, _ in attempt.started))
        if retried is None:
            retried = Answers()
            for name, engine in left.items():  # one by one: a failure delays no other
                retried.add(self._repush(weights, version, {name: engine}))
        self._replace_ways()
        if retried.failures and not (answers.values or retried.values or dead or retried.lost):
            raise EngineError(
                f"pushing weights version {version} failed: {retried.describe_failures()}"
            )
        self._drop(list(retried.failures), version)
        return answers.values | retried.values

    def _repush(self, weights: Weights, version: int, engines: Mapping[str, Any]) -> Answers:
        """Push to some engines over new transports."""
        transports = self._choose(engines)
        try:
            return self._attempt(transports, weights, version).answers()
        finally:
            _leave(transports)

    def _attempt(self, transports: Sequence[Transport], weights: Weights, version: int) -> Attempt:
        timeout_s, waiting = self._settings.timeout_s, self._progress.mark
        return Attempt.begin(transports, weights, version, timeout_s, waiting)

    def _choose(self, engines: Mapping[str, Any]) -> list[Transport]:
        return choose_transports(self._settings, engines, self._lenders)

    def _add(self, engines: Mapping[str, Any], answers: Answers, version: int) -> None:
        answers.require(f"pushing weights version {version}")
        self._engines |= engines
        self._replace_ways()

    def _drop(self, names: Sequence[str], version: int) -> None:
        self._terminate(names, f"did not take weights version {version}")

    def _terminate(self, names: Sequence[str], why: str) -> None:
        for name in names:
            logger.warning("%s %s and is terminated", name, why)
            calls.kill(self._engines.pop(name))
            self._replace_ways()

    def _replace_ways(self) -> None:
        """Make the next push choose its transports again, because the engines have changed."""
        transports, self._transports = self._transports or (), None
        _leave(transports)


def _leave(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.abort()
