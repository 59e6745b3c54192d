"""Weights from the learner to every policy engine, through Ray's object store.

    learner   weights() -> ray.put once -> load_weights on every engine -> wait for all -> release
    engine    between two decode steps: load, drop every cached prefix, acknowledge

Both ends of the transport are in this file's one class: the learner holds a `Publisher`; an engine
receives `PackedTensors` that Ray reads from shared memory without a copy. Slots are released last,
so no rollout starts on weights older than the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from cluster.queue import GroupQueue
from distill.errors import EngineError
from distill.tensors import PackedTensors


class Publisher:
    """`publish(weights, version)`: returns once every engine holds them and slots are free."""

    def __init__(
        self, engines: Sequence[Any], queue: GroupQueue, groups_per_step: int, timeout_s: float
    ) -> None:
        """`engines` are Ray handles of policy engines."""
        self._engines = engines
        self._queue = queue
        self._groups_per_step = groups_per_step
        self._timeout_s = timeout_s
        self._published: int | None = None

    def __call__(self, weights: PackedTensors, version: int) -> None:
        """Raises EngineError if an engine does not acknowledge within the deadline."""
        reference = ray.put(weights)
        acknowledgements = [
            engine.load_weights.remote(reference, version) for engine in self._engines
        ]
        try:
            ray.get(acknowledgements, timeout=self._timeout_s)
        except GetTimeoutError:
            done, _ = ray.wait(acknowledgements, num_returns=len(acknowledgements), timeout=0)
            late = len(acknowledgements) - len(done)
            raise EngineError(
                f"{late} of {len(acknowledgements)} policy engines did not acknowledge version "
                f"{version} within {self._timeout_s:.0f} s"
            ) from None
        if self._published is not None:  # the first publication follows no step: nothing to free
            self._queue.release(self._groups_per_step)
        self._published = version
