"""Weights lent to servers on the same GPUs, or the same machine: a bucket at a time, by handles.

    learner   asks every engine for its ranks (`weight_ranks`), at the first push, then calls
              `load_weights(LentWeights, version)` on each; it returns with the last bucket
    learner   gathers a bucket on each worker that has readers, while the engines pause
    both      `load_bucket(push, i, handles)`: a handle for each rank, on the bucket of the worker
              that is on that rank's GPU. The engine's server opens them, copies what each rank
              needs, and lets go; then the call returns
    learner   the next bucket, once all engines have answered; after the last its memory is free

So each GPU holds one bucket beside learner and engine. Engines are independent: one that fails
keeps no other waiting, and its next push begins anew. How memory is lent:
distill/weights/lending.py; what a server is sent: actors/sglang/lent_weights.py.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.handles import calls, errors
from cluster.handles.failures import root_cause
from cluster.weights.transport import Transport, collect
from cluster.weights.ways import Place, lenders_of
from distill.engine import LentWeights
from distill.errors import EngineError
from distill.weights.lending import LenderPlace, LentByWorkers
from distill.weights.model_weights import (
    BUCKET_BYTES,
    TensorLayout,
    Weights,
    names_of,
    plan_buckets,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.25


class IpcTransport(Transport):
    """The learner's end: lends what its workers gather.

    Args:
        places: of the engines.
        lenders: of the learner's workers, by rank.
        timeout_s: longest that a push may not get on.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        places: Mapping[str, Place],
        lenders: Sequence[LenderPlace],
        *,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(engines)
        self._places, self._lenders = places, lenders
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._ranks: Mapping[str, int] = {}  # of each engine, once it was asked
        self._lending: _Lending | None = None

    def describe(self) -> str:
        how = "CUDA IPC" if self._lenders[0].gpu is not None else "lent main memory"
        return f"{how}, in buckets"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """The engines' acknowledgements to be, by name; the lending goes on in a thread.

        Raises:
            ConfigError: an engine has ranks that no worker can lend to.
            EngineError: an engine is not ready.
        """
        assert isinstance(weights, LentByWorkers), "weights that the learner's workers hold"
        if not self._ranks:
            asked = {name: engine.weight_ranks.remote() for name, engine in self.engines.items()}
            self._ranks = collect(asked, self._timeout_s).require("preparing to lend weights")
        sources = {
            name: lenders_of(name, self._places[name], ranks, self._lenders)
            for name, ranks in self._ranks.items()
        }
        order = LentWeights(
            push=secrets.token_hex(8),
            buckets=plan_buckets(weights.layouts, self._bucket_bytes),
            timeout_s=self._timeout_s,
        )
        pending = {
            name: engine.load_weights.remote(order, version)
            for name, engine in self.engines.items()
        }
        self._lending = _Lending(self.engines, order, weights, sources, len(self._lenders))
        self._lending.thread.start()
        return pending

    @property
    def sent(self) -> int:
        """Buckets of this push that every engine has loaded."""
        return 0 if self._lending is None else self._lending.sent

    def problem(self) -> str | None:
        """Reason why this side could not lend, if so."""
        return None if self._lending is None else self._lending.problem

    def finish(self) -> None:
        """Call when every engine has acknowledged: the bucket's memory is free when it returns."""
        assert self._lending is not None
        self._lending.thread.join(self._timeout_s)
        if problem := self._lending.problem:
            self.abort()
            raise EngineError(problem)

    def abort(self) -> None:
        """Ends the push; returns when this side uses the learner's workers no more."""
        if self._lending is not None:
            self._lending.abandon()
            self._lending.thread.join(self._timeout_s)
        self._lending = None


class _Lending:
    """One push: bucket after bucket, to the engines that have taken all before."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        order: LentWeights,
        weights: LentByWorkers,
        sources: Mapping[str, Sequence[int]],
        workers: int,
    ) -> None:
        """
        Args:
            sources: the worker that lends to each rank, by engine.
            workers: the learner's.
        """
        self._engines, self._order, self._weights = dict(engines), order, weights
        self._sources, self._workers = sources, workers
        self.sent = 0  # buckets
        self._abandoned = threading.Event()
        self.problem: str | None = None
        # A daemon: a learner that gave up ends although an engine keeps this thread waiting.
        self.thread = threading.Thread(target=self._run, name="weight-lending", daemon=True)

    def abandon(self) -> None:
        """Has this side lend nothing more."""
        self._abandoned.set()

    def _run(self) -> None:
        try:
            for number, bucket in enumerate(self._order.buckets):
                if not self._engines or self._abandoned.is_set():
                    break
                self._lend(number, bucket)
                self.sent += 1
        except Exception as error:  # of the learner's workers: torch raises its own, of many kinds
            first = (str(error).splitlines() or [""])[0]
            self.problem = f"the learner could not lend its weights: {first}"
        try:
            self._weights.take_back()
        except Exception as error:
            self.problem = self.problem or f"the learner's memory is not free again: {error}"
        if self.problem or self._abandoned.is_set():
            why = self.problem or "the learner gave the push up"
            for engine in self._engines.values():
                engine.end_push.remote(self._order.push, why)

    def _lend(self, number: int, bucket: Sequence[TensorLayout]) -> None:
        """Lends a bucket to all engines that are left, and waits for them."""
        readers = Counter(lender for name in self._engines for lender in self._sources[name])
        lent = self._weights.lend(names_of(bucket), [readers[i] for i in range(self._workers)])
        unused = [iter(handles) for handles in lent]
        pending = {
            engine.load_bucket.remote(
                self._order.push, number, [next(unused[i]) for i in self._sources[name]]
            ): name
            for name, engine in self._engines.items()
        }
        deadline = time.monotonic() + self._order.timeout_s
        while pending:
            late = time.monotonic() > deadline
            if late or self._abandoned.is_set():
                self.problem = f"bucket {number} was not loaded in time" if late else None
                self._abandoned.set()
                return
            ready, _ = calls.wait(list(pending), num_returns=len(pending), timeout=_POLL_S)
            for reference in ready:
                name = pending.pop(reference)
                try:
                    calls.get(reference)
                except errors.RayError as error:  # why, its load says; it is out of this push
                    logger.warning("%s left the push: %s", name, root_cause(error))
                    del self._engines[name]
