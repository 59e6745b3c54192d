"""Base class of weight transports, settings of pushes, and collection of engines' answers.

The order of a push is the publisher's (cluster/weights/publisher.py).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from actors.sglang.parallelism import Parallelism
from cluster.config.pools import WeightsChoice
from cluster.handles import calls, errors
from distill.errors import EngineError, EngineLost
from distill.lookup import listed
from distill.weights.model_weights import BUCKET_BYTES, Weights

# Time that linked engines have to leave their shared collective after one of them failed, seconds.
GRACE_S = 15.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Settings of the pushes to one pool of engines.

    Attributes:
        served: the engines are SGLang servers.
        device: the learner's device, cpu or cuda.
        directory: directory for `disk`, shared by all nodes.
        model: checkpoint that is trained.
        temperature: the run's temperature, at which the check scores.
        dtype: compute precision of learner or engines, whichever is looser; determines the check's
            tolerance.
        probe_every, prove_every: number of versions between checks of log-probs and of checksums;
            0: no checks.
        timeout_s: longest time without progress (an answer, or a bucket sent), seconds. Engines
            that load by themselves have one second more for each 100 MB.
        bucket_bytes: largest bucket that a group or `ipc` sends.
        parallel: ranks, GPUs and nodes of each engine's server.
    """

    choice: WeightsChoice
    served: bool
    device: str
    directory: str
    model: str
    temperature: float
    dtype: str
    probe_every: int
    prove_every: int
    timeout_s: float
    bucket_bytes: int = BUCKET_BYTES
    parallel: Parallelism = field(default_factory=Parallelism)

    def for_teachers(self, parallel: Parallelism) -> PushSettings:
        """Settings of pushes to the engines of a lagged or EMA teacher, checked by checksums alone.

        The teacher's files are in a separate directory, because its versions may equal the
        policy's. Its engines are lent nothing, because a worker has one bucket, which is for the
        policy. An adapter is merged for them.
        """
        return replace(
            self,
            choice="auto" if self.choice in ("ipc", "adapter") else self.choice,
            directory=f"{self.directory}-teacher",
            probe_every=0,
            parallel=parallel,
        )


class Sending(ABC):
    """The learner's part, in a thread, of a push that engines receive while it is sent.

    `linked`: all engines receive a bucket together, so one that fails keeps the others waiting.

    Attributes:
        sent: number of buckets that every engine has received.
        problem: reason why this side failed, if it did; engines may be the cause.
        error: error of the learner's own work, which no engine caused.
    """

    linked: ClassVar[bool] = False

    def __init__(self, timeout_s: float) -> None:
        self.sent = 0
        self.problem: str | None = None
        self.error: Exception | None = None
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        # A daemon, so that the learner can exit while an engine keeps this thread waiting.
        self._thread = threading.Thread(target=self._run, name="weight-sending", daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Send all buckets, unless `_stopped` is set meanwhile; set `problem` if that fails."""

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._stopped.is_set():  # an engine that has failed may be the cause
                self.error = error
            raise

    def stop(self) -> None:
        """Stop sending, and release engines that wait."""
        self._stopped.set()

    def _require_wanted(self) -> None:
        """Raise EngineError if the push was given up."""
        if self._stopped.is_set():
            raise EngineError("the push was given up")

    def join(self) -> None:
        self._thread.join(self._timeout_s)


class Transport(ABC):
    """Base class of the learner's end of a transport to some engines: Ray handles by name.

    With `copies`, `start` makes a copy of the weights, which is valid until the next `start`:
    engines load the copy, so the weights may change. Other transports start a `sending`.
    """

    copies: ClassVar[bool] = False

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self.engines = engines
        self.sending: Sending | None = None
        self._source: Any = None

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """Start a push; return a Ray reference to each engine's pause in seconds, by name."""

    def finish(self) -> None:
        """End a push that every engine has acknowledged."""
        if self.sending is not None:
            self.sending.join()

    def abort(self) -> None:
        """End a push that failed."""
        if self.sending is not None:
            self.sending.stop()
        self.sending = None

    def share(self, source: Any, version: int) -> dict[str, Any]:
        """Make every engine load the weights from a source that all engines read."""
        self._source = source
        return self.load(self.engines, version)

    def load(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Make engines load the source shared last; they need not be this transport's own."""
        assert self._source is not None, "nothing is shared"
        return {
            name: engine.load_weights.remote(self._source, version)
            for name, engine in engines.items()
        }


@dataclass(slots=True)
class Answers:
    """Values by engine, failures by engine, and a problem on the caller's side.

    `lost` names the failed engines that must be restarted: their actor or server is gone, or is
    stuck in a collective. `error` is an error of the learner's own work, which no engine caused.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problem: str | None = None
    error: Exception | None = None

    @property
    def any_failed(self) -> bool:
        return bool(self.failures or self.problem)

    def record(self, name: str, reference: Any) -> None:
        """Record the value or the failure of a call that has ended."""
        try:
            self.values[name] = calls.get(reference)
        except errors.RayError as error:
            self.failures[name] = "died" if calls.is_death(error) else str(calls.root_cause(error))
            if isinstance(error, EngineLost) or not isinstance(error, errors.RayTaskError):
                self.lost.add(name)

    def record_sending(self, sending: Sending) -> None:
        self.problem = self.problem or sending.problem
        self.error = self.error or sending.error

    def add(self, others: Answers) -> None:
        self.values |= others.values
        self.failures |= others.failures
        self.lost |= others.lost
        self.problem = self.problem or others.problem
        self.error = self.error or others.error

    def describe_failures(self) -> str:
        own = [self.problem] if self.problem else []
        return "; ".join([f"{name}: {why}" for name, why in self.failures.items()] + own)

    def require(self, what: str) -> dict[str, Any]:
        """The values of all engines.

        Raises:
            EngineError: an engine refused, died, or did not answer `what`; the message names each.
        """
        if self.failures:
            raise EngineError(f"{what} failed: {self.describe_failures()}")
        return self.values


def collect(
    pending: Mapping[str, Any],
    timeout_s: float,
    sending: Sending | None = None,
    *,
    waiting: Callable[[], None] = lambda: None,
) -> Answers:
    """Wait for each engine's call and return answers and failures.

    Args:
        timeout_s: longest time without an answer and without progress of `sending`, seconds.
        sending: the learner's part of the calls, whose own problem counts as a failure. If it is
            linked, a failed engine keeps the others from answering. So `sending` then stops, and
            engines that do not answer within `GRACE_S` are lost.
        waiting: called at every poll before the deadline.
    """
    names = {reference: name for name, reference in pending.items()}
    answers, sent = Answers(), 0
    left_by: str | None = None  # a linked engine that failed: the others are still in a collective
    deadline = time.monotonic() + timeout_s
    while names:
        if (left := deadline - time.monotonic()) <= 0:
            break
        # Poll all of them at intervals. Waking at each answer would scan N references N times.
        ready, _ = calls.wait(list(names), num_returns=len(names), timeout=min(_POLL_S, left))
        waiting()
        for reference in ready:
            answers.record(names.pop(reference), reference)
        progressed = bool(ready)
        if sending is not None:
            answers.record_sending(sending)
            progressed |= sent != (sent := sending.sent)
        if left_by is None and progressed:
            deadline = time.monotonic() + timeout_s
        if left_by is None and sending and sending.linked and answers.any_failed:
            left_by = next(iter(answers.failures), "the learner")
            sending.stop()
            deadline = time.monotonic() + min(GRACE_S, left)
    stuck = f"no answer within {timeout_s:.0f} s"
    if left_by is not None:
        cause = listed(sorted(answers.lost) or [left_by])
        for name in answers.failures.keys() - answers.lost - {left_by}:
            answers.failures[name] = f"{cause} left the collective ({answers.failures[name]})"
        stuck = f"still in the collective that {cause} left"
        answers.lost.update(names.values())
    answers.failures |= dict.fromkeys(names.values(), stuck)
    # In the order of `pending`, not of arrival.
    answers.values = {n: answers.values[n] for n in pending if n in answers.values}
    answers.failures = {n: answers.failures[n] for n in pending if n in answers.failures}
    return answers
