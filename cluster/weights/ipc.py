"""Weights lent to servers on the same GPUs, or the same machine: a bucket at a time, by handles.

    learner   calls `load_weights(LentWeights, version)` on each engine; the call returns after the
              last bucket
    learner   gathers a bucket on each worker that has readers, while the engines pause
    both      `load_bucket(push, i, handles)`: a handle for each rank, on the bucket of the worker
              that is on that rank's GPU. The engine's server opens the handles, copies what each
              rank needs, and releases them; then the call returns
    learner   the next bucket, once all engines have answered; frees its memory after the last

So each GPU holds one bucket in addition to learner and engine. Engines are independent: an engine
that fails, or does not load a bucket in half of `timeout_s`, leaves the push, and its next push
starts from the first bucket. Memory is lent by distill/weights/lending.py; requests to servers are
in actors/sglang/lent_weights.py.
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
    """Transport that lends buckets which the learner's workers gather.

    Args:
        sources: the workers that lend to each of an engine's ranks, by engine.
        lenders: locations of the learner's workers, by rank.
        timeout_s: longest time without progress of a push, seconds.
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
        assert isinstance(weights, LentByWorkers), "weights that the learner's workers hold"
        order = LentWeights(
            push=secrets.token_hex(8),
            buckets=plan_buckets(weights.layouts, self._bucket_bytes),
            timeout_s=self._timeout_s,
        )
        pending = self.share(order, version)
        self.sending = _Lending(self.engines, order, weights, self._sources, len(self._lenders))
        self.sending.start()
        return pending

    def abort(self) -> None:
        """End a push that failed; return when it no longer uses the learner's workers."""
        sending = self.sending
        super().abort()
        if sending is not None:
            sending.join()


class _Lending(Sending):
    """One push: lends each bucket to the engines that have loaded all earlier buckets."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        order: LentWeights,
        weights: LentByWorkers,
        sources: Mapping[str, Sequence[int]],
        workers: int,
    ) -> None:
        """Args: as of `IpcTransport`; `workers` is the number of the learner's workers."""
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
        except Exception as error:  # of the learner's workers: torch raises many types
            self.problem = f"the learner could not lend its weights: {first_line(error)}"
        try:
            with self._own_work():
                self._weights.take_back()
        except Exception as error:
            self.problem = self.problem or f"the learner's memory was not released: {error}"
        if self.problem:
            self._remove(list(self._engines), self.problem)

    def _lend(self, number: int, bucket: Sequence[TensorLayout]) -> None:
        """Lend a bucket to all remaining engines, and wait until they have loaded it."""
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
        # Half, because the other engines and the push wait `timeout_s` for the next bucket.
        answers = collect(pending, self._timeout_s / 2, waiting=self._require_wanted)
        for name, why in answers.failures.items():
            logger.warning("%s left the push: %s", name, why)
        self._remove(list(answers.failures), f"bucket {number} was not loaded in time")

    def _remove(self, names: Sequence[str], why: str) -> None:
        """Remove engines from the push, and end their loads if they still wait for a bucket."""
        for name in names:
            self._engines.pop(name).end_push.remote(self._order.push, why)
