"""A model's weights, sharded or not: the layout of every tensor, and full tensors on request.

The learner provides `Weights`; each transport gathers them in buckets of the size that it needs. So
no process holds a second full copy only because a model is sharded or an adapter is merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Name, dtype and shape of a tensor; `dtype` is torch's name for it (`float32`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorLayout:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name=name, dtype=dtype, shape=tuple(tensor.shape))

    def rounded_to(self, dtype: torch.dtype) -> TensorLayout:
        """Layout of the same tensor in another precision."""
        return replace(self, dtype=str(dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    def view(self, data: Tensor) -> Tensor:
        """The tensor whose bytes are `data`."""
        return data.view(self.torch_dtype).view(self.shape)


def first_non_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor that contains a NaN or an infinity; None if none does."""
    for name, tensor in tensors.items():
        # A sum is the cheapest test. Finite values can overflow it, so a sum that is not finite is
        # followed by a test of every element.
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None


# Largest bucket that is sent to engines: large enough to amortise a request, small for a model.
BUCKET_BYTES = 1 << 30
# Largest bucket that is gathered and copied without a request to an engine: small for a host.
COPY_BYTES = 128 << 20
# Largest file of a checkpoint; its tensors are in main memory while it is written.
_FILE_BYTES = 2 << 30


class Weights(Protocol):
    """Weights to push and save: each stored tensor once; a tied lm_head is left out."""

    @property
    def layouts(self) -> Sequence[TensorLayout]:
        """Layout of every tensor, in the order of the buckets."""
        ...

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Full tensors by name. They may be the weights themselves: never write to them."""
        ...

    def first_non_finite(self) -> str | None:
        """Name of the first tensor that contains a NaN or an infinity; None if none does."""
        ...


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights whose full tensors are in this process."""

    tensors: Mapping[str, Tensor]

    @property
    def layouts(self) -> list[TensorLayout]:
        return [TensorLayout.of(name, tensor) for name, tensor in self.tensors.items()]

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.tensors[name].detach() for name in names}

    def first_non_finite(self) -> str | None:
        return first_non_finite(self.tensors)


@dataclass(frozen=True, slots=True)
class _Joined:
    parts: tuple[Weights, ...]

    @property
    def layouts(self) -> list[TensorLayout]:
        return [layout for part in self.parts for layout in part.layouts]

    def gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for part in self.parts:
            own = {layout.name for layout in part.layouts}
            if asked := [name for name in names if name in own]:
                made |= part.gather(asked)
        return made

    def first_non_finite(self) -> str | None:
        return next(filter(None, (part.first_non_finite() for part in self.parts)), None)


def joined(*parts: Weights) -> Weights:
    """Combine weights whose names are disjoint."""
    return _Joined(parts)


def by_dtype(layouts: Iterable[TensorLayout]) -> list[TensorLayout]:
    """Group layouts by dtype, each group in order, so that `plan_buckets` makes few buckets.

    The routers of a mixture, one per layer, stay in float32 when other weights are rounded. In the
    original order, each router would end a bucket.
    """
    grouped: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        grouped.setdefault(layout.dtype, []).append(layout)
    return [layout for group in grouped.values() for layout in group]


def plan_buckets(
    layouts: Sequence[TensorLayout], bucket_bytes: int = BUCKET_BYTES
) -> list[list[TensorLayout]]:
    """Split tensors into buckets, in order.

    A bucket ends when it is full or the dtype changes, which keeps offsets aligned.
    """
    buckets: list[list[TensorLayout]] = []
    size, dtype = 0, None
    for layout in layouts:
        if not buckets or layout.dtype != dtype or size + layout.nbytes > bucket_bytes:
            buckets.append([])
            size, dtype = 0, layout.dtype
        buckets[-1].append(layout)
        size += layout.nbytes
    return buckets


def split_bucket(flat: Tensor, bucket: Sequence[TensorLayout]) -> dict[str, Tensor]:
    """Views of a bucket's tensors in `flat`, which holds their bytes one after the other."""
    parts = flat.split([layout.nbytes for layout in bucket])
    return {layout.name: layout.view(part) for layout, part in zip(bucket, parts, strict=True)}


def names_of(bucket: Sequence[TensorLayout]) -> list[str]:
    return [layout.name for layout in bucket]


def total_bytes(weights: Weights) -> int:
    return sum(layout.nbytes for layout in weights.layouts)


def save_weights(path: Path, weights: Weights) -> None:
    """Write safetensors files under Hugging Face's names: one file, or several with an index.

    Raises:
        OSError, SafetensorError: the files could not be written.
    """
    files = plan_buckets(weights.layouts, _FILE_BYTES)
    where: dict[str, str] = {}
    for i, bucket in enumerate(files, start=1):
        name = f"model-{i:05d}-of-{len(files):05d}" if len(files) > 1 else "model"
        tensors = weights.gather(names_of(bucket))
        whole = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
        save_file(whole, path / f"{name}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(whole, f"{name}.safetensors")
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes(weights)}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
