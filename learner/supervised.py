"""Training on fixed data: SFT, DPO and reward models, one optimizer step per call.

DPO's reference scores every row once, before the first step (`with_reference`).
"""

from __future__ import annotations

import hashlib
import logging
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from distill.data.held_out import HeldOut
from distill.data.order import MixedPart, MixedStream
from distill.durable_files import whole_write
from distill.errors import CheckpointError
from distill.objective.batching import TrainingRow
from distill.types import FloatArray, Tokenizer
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.checkpoint_writer import CheckpointWriter
from learner.forward import LossFunction
from learner.learner import Learner
from learner.plan import Part
from learner.trace import NO_TRACE, Tracing

logger = logging.getLogger(__name__)


class RowStream:
    """Batches of units of rows, in a seeded order over repeated epochs.

    A unit is a row, or the two rows of a preference pair. `parts`: consecutive units of each
    source, with the sources' weights; None: there is one source.
    """

    def __init__(
        self,
        rows_D: Sequence[TrainingRow],
        *,
        batch_size: int,
        seed: int,
        rows_per_unit: int = 1,
        parts: Sequence[MixedPart] | None = None,
    ) -> None:
        self._rows_D = rows_D
        self._batch_size = batch_size
        self.rows_per_unit = rows_per_unit
        self.num_units = len(rows_D) // rows_per_unit
        self._parts = parts or [MixedPart(size=self.num_units)]
        assert sum(part.size for part in self._parts) == self.num_units
        self._order = MixedStream(self._parts, seed)

    def batch(self, index: int) -> list[TrainingRow]:
        """Rows of a batch, numbered from 0. With several sources, each row names its source."""
        return [row for position in self._positions(index) for row in self._unit(position)]

    def _unit(self, position: int) -> Sequence[TrainingRow]:
        first = self._order.index(position) * self.rows_per_unit
        rows = self._rows_D[first : first + self.rows_per_unit]
        if len(self._parts) == 1:
            return rows
        source = self._parts[self._order.source(position)].name
        return [replace(row, data_source=source) for row in rows]

    def source_shares(self, index: int) -> dict[str, float]:
        """`train/share/source=NAME` of a batch: the fraction of its units from each source."""
        if len(self._parts) == 1:
            return {}
        drawn = Counter(self._order.source(i) for i in self._positions(index))
        return {
            f"train/share/source={part.name}": drawn[number] / self._batch_size
            for number, part in enumerate(self._parts)
        }

    def _positions(self, index: int) -> range:
        return range(index * self._batch_size, (index + 1) * self._batch_size)


class SupervisedLoop:
    """Trains on a stream's batches with one loss. A resumed run continues the stream's order."""

    def __init__(
        self,
        *,
        learner: Learner,
        tokenizer: Tokenizer,
        stream: RowStream,
        loss: LossFunction,
        store: CheckpointStore,
        held_out: Sequence[HeldOut] = (),
        trace: Tracing = NO_TRACE,
        resume_from: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            held_out: rows for `evaluate`, by source; they are not trained.
        """
        self.step_count = 0
        self.learner = learner
        self._stream = stream
        self._loss = loss
        self.writer = CheckpointWriter(learner, tokenizer, store)
        self._held_out = held_out
        self._trace = trace
        if resume_from:
            trained_on = resume_from.delivery.get("num_rows")
            if trained_on != stream.num_units:
                raise CheckpointError(
                    f"the checkpoint was trained on {trained_on} rows (or pairs), the data now has "
                    f"{stream.num_units}; use the same file, or another out="
                )
            self.step_count = resume_from.step
            learner.load_trainer_state(resume_from.path)

    def step(self, waited_s: float = 0.0) -> dict[str, float]:
        """Take one optimizer step on the next batch; return its metrics.

        `waited_s`: seconds that the caller has already waited, which count as the step's time.
        """
        started = time.perf_counter() - waited_s
        with self._trace.around(self.step_count + 1):
            metrics = self.learner.step(self._next())
        metrics |= self._stream.source_shares(self.step_count)
        self.step_count += 1
        seconds = time.perf_counter() - started
        return metrics | {
            "step": self.step_count,
            "time/step": seconds,
            "tokens_per_s": metrics["train/tokens"] / seconds,
        }

    def evaluate(self) -> dict[str, float]:
        """`validation/*`: metrics of the loss on the held-out rows, with the current weights.

        With several sources, also the metrics of each: `validation/*/source=NAME`.
        """
        started = time.perf_counter()
        made = self._validated([row for source in self._held_out for row in source.rows_D])
        if len(self._held_out) > 1:
            for source in self._held_out:
                of_source = self._validated(source.rows_D)
                made |= {f"{name}/source={source.name}": of_source[name] for name in of_source}
        return made | {"time/validation": time.perf_counter() - started}

    def _validated(self, rows_D: Sequence[TrainingRow]) -> dict[str, float]:
        metrics = self.learner.evaluate(self._part(rows_D))
        return {f"validation/{name.partition('/')[2]}": metrics[name] for name in sorted(metrics)}

    def _next(self) -> Part:
        return self._part(self._stream.batch(self.step_count))

    def _part(self, rows_D: Sequence[TrainingRow]) -> Part:
        return Part(rows_D=rows_D, loss=self._loss, rows_per_unit=self._stream.rows_per_unit)

    def save(self) -> Checkpoint:
        """Write a checkpoint of the current state."""
        return self.writer.save(self.step_count, {"num_rows": self._stream.num_units})

    def begin_save(self) -> Checkpoint | None:
        """Begin a checkpoint of the current state: see `CheckpointWriter.begin`."""
        return self.writer.begin(self.step_count, {"num_rows": self._stream.num_units})


def with_reference(
    rows_D: Sequence[TrainingRow],
    path: Path,
    compute: Callable[[Sequence[TrainingRow]], list[FloatArray]],
    rows_per_portion: int = 512,
) -> list[TrainingRow]:
    """The rows with `reference_logprobs_T`, computed once and saved to `path` for a resumed run.

    Each portion is written when it is scored, so that an interrupted run resumes after it.

    Args:
        compute: returns the reference's log-probs of each row's trained tokens.

    Raises:
        CheckpointError: `path` is unreadable, or was written for other rows.
    """
    digest = _digest(rows_D)
    reference_N = _read(path, digest) if path.exists() else np.zeros(0, np.float32)
    ends = np.cumsum([row.num_trained for row in rows_D])
    done = int(np.searchsorted(ends, len(reference_N), side="right"))
    path.parent.mkdir(parents=True, exist_ok=True)
    while done < len(rows_D):
        # Portions grow, because each write rewrites the whole file.
        scored = compute(rows_D[done : done + max(rows_per_portion, done // 8)])
        done += len(scored)
        reference_N = np.concatenate([reference_N, *scored])
        with whole_write(path) as unfinished, unfinished.open("wb") as file:
            np.savez(file, digest=np.array(digest), logprobs=reference_N)
        logger.info("the reference has scored %d of %d rows", done, len(rows_D))
    parts = np.split(reference_N, ends[:-1])
    return [_with(row, part_N) for row, part_N in zip(rows_D, parts, strict=True)]


def _digest(rows_D: Sequence[TrainingRow]) -> str:
    """Digest of everything except the model that the rows' log-probs depend on."""
    digest = hashlib.sha256()
    for row in rows_D:
        digest.update(f"{len(row)} {row.temperature} ".encode())
        digest.update(row.tokens_T.astype("<i4").tobytes())
        digest.update(row.loss_mask_T.tobytes())
    return digest.hexdigest()


def _read(path: Path, digest: str) -> FloatArray:
    try:
        with np.load(path, allow_pickle=False) as file:
            written_for, logprobs_N = str(file["digest"]), file["logprobs"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} is unreadable ({error}); remove it, and the reference is scored again"
        ) from error
    if written_for != digest:
        raise CheckpointError(
            f"{path} was written for other pairs than those of data=; use the same file, or "
            "another out="
        )
    return logprobs_N


def _with(row: TrainingRow, reference_N: FloatArray) -> TrainingRow:
    reference_T = np.zeros(len(row), np.float32)
    reference_T[row.loss_mask_T] = reference_N
    return replace(row, reference_logprobs_T=reference_T)
