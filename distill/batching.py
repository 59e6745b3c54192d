"""From segments to tensors: training rows, and batches of rows under a token budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distill.errors import DataError
from distill.sampling import check_temperature
from distill.types import BoolArray, FloatArray, TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One token chain ready for a loss. All `_T` arrays have the same length.

    Attributes:
        tokens_T: token ids.
        loss_mask_T: True where the token is trained; never at position 0.
        weights_T: the loss's per-token weight: an advantage, or 1 for supervised rows.
        behaviour_logprobs_T: of the policy that sampled the token; 0 for supervised rows.
        temperature: the T of the learner's log-probs.
        source: where the row came from, for error messages and the dump of bad rows.

    Raises:
        DataError: unequal lengths, nothing to train on, or a non-finite number on a trained token.
    """

    tokens_T: TokenArray
    loss_mask_T: BoolArray
    weights_T: FloatArray
    behaviour_logprobs_T: FloatArray
    temperature: float
    source: str

    def __post_init__(self) -> None:
        check_temperature(self.temperature, f"temperature of {self.source}")
        for name in ("loss_mask_T", "weights_T", "behaviour_logprobs_T"):
            if len(getattr(self, name)) != len(self.tokens_T):
                raise DataError(
                    f"{self.source}: {name} has {len(getattr(self, name))} entries for "
                    f"{len(self.tokens_T)} tokens"
                )
        if len(self.tokens_T) < 2 or self.loss_mask_T[0] or not self.loss_mask_T.any():
            raise DataError(
                f"{self.source}: a row needs a context token and a token to train after it"
            )
        for name in ("weights_T", "behaviour_logprobs_T"):
            if not np.isfinite(getattr(self, name)[self.loss_mask_T]).all():
                raise DataError(f"{self.source}: {name} is not finite on a trained token")

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def first_trained(self) -> int:
        """Index of the first trained token, at least 1."""
        return int(np.argmax(self.loss_mask_T))

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Right-padded rows and the flat view of their trained positions.

    `position_N` indexes the flattened (B*T) hidden states one *before* each trained token: the
    position whose logits predict it. Padding is known by length, never by token id.
    """

    tokens_BT: Tensor
    position_N: Tensor
    tokens_N: Tensor
    weights_N: Tensor
    behaviour_logprobs_N: Tensor
    temperature_N: Tensor
    rows: tuple[TrainingRow, ...]


def split_by_token_budget(
    rows_D: Sequence[TrainingRow], token_budget: int
) -> Iterator[list[TrainingRow]]:
    """Micro-batches of rows of similar length whose padded size is at most `token_budget` tokens.

    Rows with the same context stay together, so that it can be run once for them. A single row
    longer than the budget is a batch by itself. Every row appears exactly once.
    """
    batch: list[TrainingRow] = []
    width = 0
    for row in _by_context_and_length(rows_D):
        width = max(width, len(row))
        if batch and (len(batch) + 1) * width > token_budget:
            yield batch
            batch, width = [], len(row)
        batch.append(row)
    if batch:
        yield batch


def _by_context_and_length(rows_D: Sequence[TrainingRow]) -> Iterator[TrainingRow]:
    """Rows grouped by context; groups, and the rows of each, from short to long."""
    groups: dict[bytes, list[TrainingRow]] = defaultdict(list)
    for row in rows_D:
        groups[row.tokens_T[: row.first_trained].tobytes()].append(row)
    for group in sorted(groups.values(), key=lambda group: max(map(len, group))):
        yield from sorted(group, key=len)


def collate(rows: Sequence[TrainingRow], device: str = "cpu") -> Batch:
    """Right-pads rows to a common width (with id 0: after its end a causal row sees nothing)."""
    width = max(len(row) for row in rows)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    positions = []
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row.tokens_T
        positions.append(b * width + np.flatnonzero(row.loss_mask_T) - 1)
    trained = [(row, row.loss_mask_T) for row in rows]

    def gather(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=dtype)

    return Batch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        position_N=gather(positions, torch.long),
        tokens_N=gather([row.tokens_T[mask] for row, mask in trained], torch.long),
        weights_N=gather([row.weights_T[mask] for row, mask in trained], torch.float32),
        behaviour_logprobs_N=gather(
            [row.behaviour_logprobs_T[mask] for row, mask in trained], torch.float32
        ),
        temperature_N=gather(
            [np.full(row.num_trained, row.temperature) for row in rows], torch.float32
        ),
        rows=tuple(rows),
    )
