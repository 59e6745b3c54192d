"""Hidden states that a model's vocabulary projection turns into distributions, as numpy arrays.

A teacher's engine returns the hidden states at the trained positions, and the learner applies the
teacher's head to them (`learner.teachers.TeacherHead`). Transferring one state per trained token
thus gives log q_T at every token of the vocabulary, at any T.

numpy has no bfloat16, so values of 16 bits are stored as uint16 together with the name of their
dtype. Rollout workers forward states without torch, so only functions with tensors import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from distill.errors import DataError
from distill.types import BoolArray

if TYPE_CHECKING:
    from torch import Tensor

# dtype of a model -> dtype of the array that stores its values.
_STORED = {"float32": np.dtype(np.float32)} | dict.fromkeys(
    ("bfloat16", "float16"), np.dtype(np.uint16)
)


@dataclass(frozen=True, slots=True, eq=False)
class HiddenStates:
    """The last hidden state at each of N positions, after the final norm: the input of the head.

    Attributes:
        values_NH: float32, or the bits of bfloat16 or float16 as uint16.
        dtype: dtype of the values: float32, bfloat16 or float16.

    Raises:
        DataError: another dtype, or values that are not stored in its form.
    """

    values_NH: np.ndarray
    dtype: str

    def __post_init__(self) -> None:
        stored = _STORED.get(self.dtype)
        if stored is None or self.values_NH.dtype != stored or self.values_NH.ndim != 2:
            raise DataError(
                f"hidden states in {self.dtype!r} of shape {self.values_NH.shape}, stored as "
                f"{self.values_NH.dtype}; they must be (positions, hidden size) in "
                f"{', '.join(_STORED)}"
            )

    @classmethod
    def of(cls, states_NH: Tensor) -> HiddenStates:
        """Copy of a tensor of one of these dtypes, on any device."""
        import torch

        states_NH = states_NH.detach().cpu().contiguous()
        dtype = str(states_NH.dtype).removeprefix("torch.")
        if states_NH.element_size() == 2:
            states_NH = states_NH.view(torch.int16)
        values_NH = states_NH.numpy()
        return cls(values_NH.view(_STORED.get(dtype, values_NH.dtype)).copy(), dtype)

    @classmethod
    def from_bytes(cls, content: bytes, dtype: str, rows: int) -> HiddenStates:
        """States of `rows` positions from their little-endian bytes.

        Raises:
            DataError: the dtype is unknown, or the number of bytes does not fit.
        """
        stored = _STORED.get(dtype)
        if stored is None or not rows or not content or len(content) % (rows * stored.itemsize):
            raise DataError(
                f"{len(content)} bytes are not hidden states of {rows} positions in {dtype!r}"
            )
        return cls(np.frombuffer(content, stored.newbyteorder("<")).reshape(rows, -1), dtype)

    @classmethod
    def rounded(cls, values_NH: np.ndarray, dtype: str) -> HiddenStates:
        """States from float32 numbers that are exact in the model's dtype, converted to it."""
        import torch

        states_NH = torch.from_numpy(np.ascontiguousarray(values_NH, np.float32))
        return cls.of(states_NH.to(getattr(torch, dtype)))

    @property
    def hidden_size(self) -> int:
        return self.values_NH.shape[1]

    def at(self, positions_N: BoolArray) -> HiddenStates:
        """States of some positions, given by a mask over all N."""
        return replace(self, values_NH=self.values_NH[positions_N])


def joined(parts: Sequence[HiddenStates], device: str) -> Tensor:
    """Concatenate the states of several rows, in their own dtype: shape (N, H)."""
    import torch

    [dtype] = {part.dtype for part in parts}
    values_NH = np.concatenate([part.values_NH for part in parts])  # a copy: parts are read-only
    if dtype != "float32":
        return torch.from_numpy(values_NH.view(np.int16)).view(getattr(torch, dtype)).to(device)
    return torch.from_numpy(values_NH).to(device)
