"""Supervised fine-tuning: the same learner, rows from a file instead of from rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.batching import Batch, TrainingRow
from distill.errors import CheckpointError
from distill.logprobs import TokenStats
from distill.losses import Metrics, cross_entropy
from distill.prompts import PromptStream
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.learner import Learner


class SftLoop:
    """Trains on `batch_size` rows a step, in a seeded order that a resumed run continues."""

    def __init__(
        self,
        *,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        rows_D: Sequence[TrainingRow],
        batch_size: int,
        seed: int,
        store: CheckpointStore,
        resume_from: Checkpoint | None = None,
    ) -> None:
        self.step_count = 0
        self.learner = learner
        self._tokenizer = tokenizer
        self._rows_D = rows_D
        self._batch_size = batch_size
        self._stream = PromptStream(len(rows_D), seed)
        self._store = store
        if resume_from:
            if resume_from.delivery.get("num_rows") != len(rows_D):
                raise CheckpointError(
                    f"the checkpoint was trained on {resume_from.delivery.get('num_rows')} rows, "
                    f"the data now has {len(rows_D)}; use the same file, or another out="
                )
            self.step_count = resume_from.step
            learner.load_trainer_state(resume_from.trainer_state())

    def step(self) -> dict[str, float]:
        """One optimizer step on the next `batch_size` rows."""
        started = time.perf_counter()
        first = self.step_count * self._batch_size
        rows_D = [
            self._rows_D[self._stream.index(position)]
            for position in range(first, first + self._batch_size)
        ]
        metrics = self.learner.step(rows_D, _cross_entropy)
        self.step_count += 1
        seconds = time.perf_counter() - started
        return metrics | {
            "step": self.step_count,
            "time/step": seconds,
            "tokens_per_s": metrics["train/tokens"] / seconds,
        }

    def save(self) -> Checkpoint:
        """Writes a checkpoint of this very state."""
        return self._store.save(
            step=self.step_count,
            model=self.learner.model,
            tokenizer=self._tokenizer,
            trainer_state=self.learner.trainer_state(),
            delivery={"num_rows": len(self._rows_D)},
        )


def _cross_entropy(stats: TokenStats, batch: Batch, num_tokens: int) -> tuple[Tensor, Metrics]:
    return cross_entropy(stats.logprobs_N, batch.weights_N, num_tokens)
