"""Layouts of named tensors, on which both sides of a transport agree before the values are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Name, dtype and shape of a tensor; `dtype` as torch calls it (`float32`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorLayout:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name=name, dtype=dtype, shape=tuple(tensor.shape))

    def rounded_to(self, dtype: torch.dtype) -> TensorLayout:
        """The same tensor in another precision."""
        return replace(self, dtype=str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize


def layout_digest(layouts: Iterable[TensorLayout]) -> str:
    """A name for these tensors in this order: two sides that agree on it agree on the layout."""
    told = "".join(f"{tensor.name}\t{tensor.dtype}\t{tensor.shape}\n" for tensor in layouts)
    return hashlib.sha256(told.encode()).hexdigest()


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity."""
    for name, tensor in tensors.items():
        # A sum is the cheapest pass there is. It can overflow; only then are all of them looked at.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None
