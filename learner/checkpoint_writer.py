"""Writer of a training loop's checkpoints: in the caller's thread, or concurrently with training.

    save      writes the state; returns the checkpoint
    begin     copies the state and returns; a thread writes the copy
    written   returns the checkpoint of the last `begin`    waits for: the thread, with `wait=True`

One checkpoint is written at a time, completely or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from distill.types import Tokenizer
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.learner import Learner
from learner.sharded_model import StateCopy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Checkpoint that was written concurrently with training, and the seconds that it took."""

    checkpoint: Checkpoint
    seconds: float


class CheckpointWriter:
    """Writes the checkpoints of one training loop."""

    def __init__(self, learner: Learner, tokenizer: Tokenizer, store: CheckpointStore) -> None:
        self._learner, self._tokenizer, self._store = learner, tokenizer, store
        self._warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._latest: Future[Written] | None = None

    def save(self, step: int, delivery: Mapping[str, Any]) -> Checkpoint:
        """Write the current state. First wait until the thread has written its copy, if any.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._wait()
        write = partial(self._learner.save, tokenizer=self._tokenizer)
        return self._store.save(step=step, write=write, delivery=delivery)

    def begin(self, step: int, delivery: Mapping[str, Any]) -> Checkpoint | None:
        """Copy the current state, start a thread that writes the copy, and return None.

        First wait until the previous copy is written. If a copy would take more than half of the
        free memory, the same as `save`.

        Raises:
            CheckpointError: the state was not copied, and the checkpoint could not be written.
        """
        self._wait()
        self._latest = None
        if not self._copies():
            return self.save(step, delivery)
        copy = self._learner.copied(self._tokenizer)
        self._latest = self._thread.submit(self._write, copy, step, dict(delivery))
        return None

    def written(self, *, wait: bool) -> Written | None:
        """Checkpoint of the last `begin`; None if there is none, or it is not written yet.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._latest is None or not (wait or self._latest.done()):
            return None
        return self._latest.result()

    def _write(self, copy: StateCopy, step: int, delivery: Mapping[str, Any]) -> Written:
        began = time.perf_counter()
        try:
            made = self._store.save(step=step, write=copy.write, delivery=delivery)
        finally:
            copy.drop()
        return Written(checkpoint=made, seconds=time.perf_counter() - began)

    def _wait(self) -> None:
        if self._latest is not None:
            wait([self._latest])

    def _copies(self) -> bool:
        fits = self._learner.has_room_for_copy()
        if not fits and not self._warned:
            self._warned = True
            logger.warning(
                "steps wait while checkpoints are written, because a copy of the state would "
                "need more than half of the free memory"
            )
        return fits
