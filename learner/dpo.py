"""Direct preference optimisation: pairs of rows, and a reference whose log-probs are taken once."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from distill.errors import CheckpointError
from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from distill.objective.objectives import dpo
from distill.types import FloatArray
from distill.whole_write import whole_write
from learner.forward import Forward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The `LossFunction` of DPO. Rows come in pairs, the chosen one first, with a reference.

    `sft_coef` adds the chosen response's mean negative log-likelihood per token, a mean over pairs
    (Pang et al. 2024): DPO alone may lower both sides' likelihood.
    """

    beta: float
    sft_coef: float = 0.0

    def __call__(
        self, forward: Forward, batch: Batch, counts: StepCounts
    ) -> tuple[Tensor, Metrics]:
        stats = forward(batch)
        assert batch.reference_logprobs_N is not None, "the rows lack the reference's log-probs"
        loss, metrics = dpo(
            batch.sum_by_row(stats.logprobs_N),
            batch.sum_by_row(batch.reference_logprobs_N),
            counts,
            beta=self.beta,
        )
        metrics["train/entropy"] = stats.entropy_N.sum() / counts.tokens
        chosen_nll_P = -batch.mean_by_row(stats.logprobs_N)[::2]
        nll = chosen_nll_P.sum() / (counts.sequences // 2)
        metrics["dpo/chosen_nll"] = nll.detach()
        return loss + self.sft_coef * nll, metrics


def with_reference(
    rows_D: Sequence[TrainingRow],
    path: Path,
    compute: Callable[[Sequence[TrainingRow]], list[FloatArray]],
    rows_per_portion: int = 512,
) -> list[TrainingRow]:
    """The rows with `reference_logprobs_T`, computed once and kept in `path` for a resumed run.

    Every portion is written as soon as it is scored: a run that ends meanwhile goes on behind it.

    Args:
        compute: the reference's log-probs of each row's trained tokens.

    Raises:
        CheckpointError: `path` is unreadable, or was written for other rows.
    """
    digest = _digest(rows_D)
    if path.exists():
        reference_N = _read(path, digest)
    else:
        reference_N = _score(rows_D, path, digest, compute, rows_per_portion)
    ends = np.cumsum([row.num_trained for row in rows_D])
    parts = np.split(reference_N, ends[:-1])
    return [_with(row, part_N) for row, part_N in zip(rows_D, parts, strict=True)]


def _score(
    rows_D: Sequence[TrainingRow],
    path: Path,
    digest: str,
    compute: Callable[[Sequence[TrainingRow]], list[FloatArray]],
    rows_per_portion: int,
) -> FloatArray:
    """All rows' log-probs, from where an earlier attempt came to; `path` has them at the end."""
    partial = path.with_name(f".{path.stem}.partial.npz")
    reference_N = np.zeros(0, np.float32)
    if partial.exists():
        with suppress(CheckpointError):  # begun for other rows, or cut short: begun again
            reference_N = _read(partial, digest)
    ends = np.cumsum([row.num_trained for row in rows_D])
    done = int(np.searchsorted(ends, len(reference_N), side="right"))
    path.parent.mkdir(parents=True, exist_ok=True)
    for first in range(done, len(rows_D), rows_per_portion):
        scored = compute(rows_D[first : first + rows_per_portion])
        reference_N = np.concatenate([reference_N, *scored])
        _write(partial, digest, reference_N)
        logger.info("the reference has scored %d of %d rows", first + len(scored), len(rows_D))
    partial.replace(path)
    return reference_N


def _write(path: Path, digest: str, logprobs_N: FloatArray) -> None:
    """Writes the file atomically: whole or not at all."""
    with whole_write(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, digest=np.array(digest), logprobs=logprobs_N)


def _digest(rows_D: Sequence[TrainingRow]) -> str:
    """Digest of all that the rows' log-probs depend on, besides the model."""
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
            f"{path} was written for other pairs than the data now holds; use the same file, or "
            "another out="
        )
    return logprobs_N


def _with(row: TrainingRow, reference_N: FloatArray) -> TrainingRow:
    reference_T = np.zeros(len(row), np.float32)
    reference_T[row.loss_mask_T] = reference_N
    return replace(row, reference_logprobs_T=reference_T)
