"""Transports of weights: their settings, their base class, and the answers of their engines.

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
from cluster.handles.failures import is_death, root_cause
from distill.errors import EngineError, EngineLost
from distill.weights.model_weights import BUCKET_BYTES, Weights

# Time that linked engines have to leave their shared collective after one of them failed, seconds.
GRACE_S = 15.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Settings of the pushes to one pool of engines.

    Attributes:
        choice: the transport, or `auto`.
        served: the engines are SGLang servers.
        device: the learner's, cpu or cuda.
        directory: directory for `disk`, shared by all nodes.
        model: checkpoint that is trained.
        temperature: the run's; the check scores at it.
        dtype: compute precision of learner and engines, the looser of both; determines the check's
            tolerance.
        probe_every, prove_every: versions between two whose log-probs, and whose checksums, are
            checked; 0: none.
        timeout_s: longest time without progress: no engine answers, nothing is sent. Engines that
            load by themselves have it, and a second for each 100 MB.
        bucket_bytes: most bytes that a group or `ipc` sends at once.
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

        Its files are apart from the policy's, whose version may be the same. Nothing is lent to its
        engines: a worker has one bucket, which is the policy's. An adapter goes to them merged.

        Args:
            parallel: of each of the teacher's servers.
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

    `linked` engines receive together: one that fails keeps the others waiting.

    Attributes:
        sent: number of buckets that every engine has received.
        problem: reason why this side failed, if it did; engines may be the cause.
        error: an error of the learner's own work, with which engines have nothing to do.
    """

    linked: ClassVar[bool] = False

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is the longest wait of `join`."""
        self.sent = 0
        self.problem: str | None = None
        self.error: Exception | None = None
        self._timeout_s = timeout_s
        self._given_up = threading.Event()
        # A daemon: a learner that gave up ends although an engine keeps this thread waiting.
        self._thread = threading.Thread(target=self._run, name="weight-sending", daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Send all buckets, unless `_given_up` is set meanwhile; set `problem` if that fails."""

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._given_up.is_set():  # an engine that has failed may be the cause
                self.error = error
            raise

    def give_up(self) -> None:
        """Send nothing more, and keep no engine waiting."""
        self._given_up.set()

    def _require_wanted(self) -> None:
        """Raise EngineError if the push was given up."""
        if self._given_up.is_set():
            raise EngineError("the push was given up")

    def join(self) -> None:
        self._thread.join(self._timeout_s)


class Transport(ABC):
    """The learner's end of one way to some engines: Ray handles, by the name to call them.

    With `copies`, `start` leaves a copy of the weights, which lasts until the next one: engines
    load from that, whatever has become of the weights. Other transports begin a `sending`.
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
        """Start a push; returns by engine a Ray reference to its pause in seconds."""

    def finish(self) -> None:
        """End a push that every engine has acknowledged."""
        if self.sending is not None:
            self.sending.join()

    def abort(self) -> None:
        """End a push that failed."""
        if self.sending is not None:
            self.sending.give_up()
        self.sending = None

    def share(self, source: Any, version: int) -> dict[str, Any]:
        """Have every engine load the weights from a source that each can read."""
        self._source = source
        return self.load(self.engines, version)

    def load(self, engines: Mapping[str, Any], version: int) -> dict[str, Any]:
        """Have engines, others than its own too, load what was shared last."""
        assert self._source is not None, "nothing is shared"
        return {
            name: engine.load_weights.remote(self._source, version)
            for name, engine in engines.items()
        }


@dataclass(slots=True)
class Answers:
    """Values by engine, failures by engine, and a problem on the caller's side.

    `lost` names the failed engines that must be restarted: their actor or server is gone, or is
    stuck in a collective. `error` is one of the learner's own, which failed all of them.
    """

    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    problem: str | None = None
    error: Exception | None = None

    @property
    def any_failed(self) -> bool:
        return bool(self.failures or self.problem)

    def take(self, name: str, reference: Any) -> None:
        """Note the value or the failure of a call that has ended."""
        try:
            self.values[name] = calls.get(reference)
        except errors.RayError as error:
            self.failures[name] = "died" if is_death(error) else str(root_cause(error))
            if isinstance(error, EngineLost) or not isinstance(error, errors.RayTaskError):
                self.lost.add(name)

    def note(self, sending: Sending) -> None:
        """Note what has failed on the caller's side."""
        self.problem = self.problem or sending.problem
        self.error = self.error or sending.error

    def add(self, others: Answers) -> None:
        """Add the answers of other engines."""
        self.values |= others.values
        self.failures |= others.failures
        self.lost |= others.lost
        self.problem = self.problem or others.problem
        self.error = self.error or others.error

    def complaint(self) -> str:
        """One line that lists every failure and the problem on the caller's side."""
        own = [self.problem] if self.problem else []
        return "; ".join([f"{name}: {why}" for name, why in self.failures.items()] + own)

    def require(self, what: str) -> dict[str, Any]:
        """The values of all engines.

        Args:
            what: description of the calls, for the error.

        Raises:
            EngineError: an engine refused, died, or did not answer; the message names each.
        """
        if self.failures:
            raise EngineError(f"{what} failed: {self.complaint()}")
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
        timeout_s: longest time without an answer, and without progress of the sending, seconds.
        sending: the learner's part of the calls. Its own problem counts as a failure. If engines
            are linked, one engine's failure keeps the others from answering, so it gives up, and
            engines that do not answer within `GRACE_S` then are lost.
        waiting: called at every poll before the deadline.
    """
    names = {reference: name for name, reference in pending.items()}
    answers, sent = Answers(), 0
    left_by: str | None = None  # a linked engine that failed: the others are still in a collective
    deadline = time.monotonic() + timeout_s
    while names:
        if (left := deadline - time.monotonic()) <= 0:
            if left_by is not None:
                answers.lost.update(names.values())
            why = f"still in the collective that {left_by} left"
            if left_by is None:
                why = f"no answer in {timeout_s:.0f} s"
            answers.failures |= dict.fromkeys(names.values(), why)
            break
        # Poll all of them at intervals. Waking at each answer would scan N references N times.
        ready, _ = calls.wait(list(names), num_returns=len(names), timeout=min(_POLL_S, left))
        waiting()
        for reference in ready:
            answers.take(names.pop(reference), reference)
        progressed = bool(ready)
        if sending is not None:
            answers.note(sending)
            progressed |= sent != (sent := sending.sent)
        if left_by is None and progressed:
            deadline = time.monotonic() + timeout_s
        if left_by is None and sending and sending.linked and answers.any_failed:
            left_by = next(iter(answers.failures), "the learner")
            sending.give_up()
            deadline = time.monotonic() + min(GRACE_S, left)
    # In the order of `pending`, not of arrival.
    answers.values = {n: answers.values[n] for n in pending if n in answers.values}
    answers.failures = {n: answers.failures[n] for n in pending if n in answers.failures}
    return answers
