"""Named tensors as numpy buffers: what weights look like between processes.

Numpy buffers cross Ray's object store without a copy on the reading side; torch tensors do not.
numpy has no bfloat16, so every buffer is bytes and carries its torch dtype by name.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from distill.errors import DataError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
}


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


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    buffer: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """An immutable bundle of named tensors that pickles as plain buffers."""

    entries: Mapping[str, _Packed]

    @classmethod
    def pack(cls, tensors: Mapping[str, torch.Tensor]) -> PackedTensors:
        """Views where it can (contiguous, on the CPU), copies where it must.

        Raises:
            DataError: a dtype that has no name here.
        """
        entries = {}
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise DataError(f"tensor {name!r} has dtype {dtype}; known are {sorted(_DTYPES)}")
            flat = tensor.detach().to("cpu").contiguous().view(-1)
            entries[name] = _Packed(flat.view(torch.uint8).numpy(), dtype, tuple(tensor.shape))
        return cls(entries)

    def unpack(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) pairs. The tensors view read-only memory: copy from them, never into."""
        for name, entry in self.entries.items():
            with warnings.catch_warnings():
                # torch warns of read-only buffers; copying here would double the cost of a push.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
                flat = torch.from_numpy(entry.buffer)
            dtype = _DTYPES[entry.dtype]
            # torch refuses to view zero bytes as a wider type
            typed = flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)
            yield name, typed.view(entry.shape)

    @property
    def nbytes(self) -> int:
        return sum(entry.buffer.nbytes for entry in self.entries.values())


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity."""
    for name, tensor in tensors.items():
        # A sum is the cheapest pass there is. It can overflow; only then are all of them looked at.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None
