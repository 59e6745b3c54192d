"""Weights lent to servers on the same GPUs, or the same machine: a bucket at a time, by handles.

    learner   calls `load_weights(LentWeights, version)` on each; it returns with the last bucket
    learner   gathers a bucket on each worker that has readers, while the engines pause
    both      `load_bucket(push, i, handles)`: a handle for each rank, on the bucket of the worker
              that is on that rank's GPU. The engine's server opens them, copies what each rank
              needs, and lets go; then the call returns
    learner   the next bucket, once all engines have answered; after the last its memory is free

So each GPU holds one bucket beside learner and engine. Engines are independent: one that fails, or
does not load a bucket in half of `timeout_s`, leaves the push, and its next push begins anew. How
memory is lent: distill/weights/lending.py; what a server is sent: actors/sglang/lent_weights.py.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.weights.transport import Sending, Transport, collect
from distill.engine import LentWeights
from distill.errors import first_line
from distill.weights.lending import LenderPlace, LentByWorkers
from distill.weights.model_weights import (
    BUCKET_BYTES,
    TensorLayout,
    Weights,
    names_of,
    plan_buckets,
)

logger = logging.getLogger(__name__)


class IpcTransport(Transport):
    """The learner's end: lends what its workers gather.

    Args:
        sources: by engine, the worker that lends to each of its ranks.
        lenders: of the learner's workers, by rank.
        timeout_s: longest that a push may not get on.
    """

    def __init__(
        self,
        engines: Mapping[str, Any],
        sources: Mapping[str, Sequence[int]],
        lenders: Sequence[LenderPlace],
        *,
        timeout_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(engines)
        self._sources, self._lenders = sources, lenders
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes

    def describe(self) -> str:
        how = "CUDA IPC" if self._lenders[0].gpu is not None else "lent main memory"
        return f"{how}, in buckets"

    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        """The engines' acknowledgements to be, by name; the lending goes on in a thread."""
        assert isinstance(weights, LentByWorkers), "weights that the learner's workers hold"
        order = LentWeights(
            push=secrets.token_hex(8),
            buckets=plan_buckets(weights.layouts, self._bucket_bytes),
            timeout_s=self._timeout_s,
        )
        pending = {
            name: engine.load_weights.remote(order, version)
            for name, engine in self.engines.items()
        }
        self.sending = _Lending(self.engines, order, weights, self._sources, len(self._lenders))
        self.sending.start()
        return pending

    def abort(self) -> None:
        """End a push that failed; returns when this side uses the learner's workers no more."""
        sending = self.sending
        super().abort()
        if sending is not None:
            sending.join()


class _Lending(Sending):
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
        super().__init__(order.timeout_s)
        self._engines, self._order, self._weights = dict(engines), order, weights
        self._sources, self._workers = sources, workers

    def _run(self) -> None:
        try:
            for number, bucket in enumerate(self._order.buckets):
                if not self._engines:
                    break
                self._lend(number, bucket)
                self.sent += 1
        except Exception as error:  # of the learner's workers: torch raises its own, of many kinds
            self.problem = f"the learner could not lend its weights: {first_line(error)}"
        try:
            with self._own_work():
                self._weights.take_back()
        except Exception as error:
            self.problem = self.problem or f"the learner's memory is not free again: {error}"
        if self.problem:
            self._dismiss(list(self._engines), self.problem)

    def _lend(self, number: int, bucket: Sequence[TensorLayout]) -> None:
        """Lend a bucket to all engines that are left, and wait for them."""
        self._require_wanted()
        readers = Counter(lender for name in self._engines for lender in self._sources[name])
        with self._own_work():
            lent = self._weights.lend(names_of(bucket), [readers[i] for i in range(self._workers)])
        unused = [iter(handles) for handles in lent]
        pending = {
            name: engine.load_bucket.remote(
                self._order.push, number, [next(unused[i]) for i in self._sources[name]]
            )
            for name, engine in self._engines.items()
        }
        # The other engines, and the push, wait `timeout_s` for the next bucket.
        answers = collect(pending, self._timeout_s / 2, waiting=self._require_wanted)
        for name, why in answers.failures.items():
            logger.warning("%s left the push: %s", name, why)
        self._dismiss(list(answers.failures), f"bucket {number} was not loaded in time")

    def _dismiss(self, names: Sequence[str], why: str) -> None:
        """Lend nothing more to engines, and end their loads if they still wait for a bucket."""
        for name in names:
            self._engines.pop(name).end_push.remote(self._order.push, why)
