"""Buckets of weights that a process lends to others on its machine: written once, read in place.

    lender    lend(...): the bucket's tensors in one block of memory, and one handle per reader
    reader    opens its handle, copies what it needs, releases it, and acknowledges
    lender    the next bucket, once every reader has acknowledged; take_back() after the last

So only one bucket is in memory in addition to the model, whatever the model's size. On a CPU the
block is anonymous memory (`distill.weights.shared_memory`). On CUDA it is a torch allocation, lent
through CUDA's inter-process handles. Torch counts each handle once, so each reader needs its own,
and keeps the allocation until every handle is released; `torch.cuda.ipc_collect` then frees the
memory. A reader releases its handle when its own copies have finished on the GPU, which may be
shortly after its acknowledgement: `take_back` waits for the release.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from distill.gpu import visible_gpus
from distill.weights.model_weights import TensorLayout, Weights
from distill.weights.shared_memory import (
    SharedBlock,
    SharedTensors,
    block_bytes,
    views_of,
)

logger = logging.getLogger(__name__)

# Longest time for readers to release a GPU's memory after they have acknowledged reading it.
RELEASE_S = 30.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderPlace:
    """Location of a lender's memory.

    Attributes:
        host: name of the machine.
        gpu: id of the GPU on that machine; None on a CPU.
    """

    host: str
    gpu: str | None

    @classmethod
    def own(cls, device: str) -> LenderPlace:
        """Location of this process's memory on `device`."""
        gpus = visible_gpus() if device.startswith("cuda") else []
        index = int(device.partition(":")[2] or 0)
        return cls(host=os.uname().nodename, gpu=gpus[index] if index < len(gpus) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMemory:
    """Handle on a block of GPU memory for one reader: the fields that torch's own reductions send.

    Attributes:
        layouts: layouts of the tensors in the block (`views_of`).
        device: UUID of the GPU, because processes may number GPUs differently.
        handle: handle of the allocation that contains the block.
        size, offset: size of the block and its offset in the allocation, bytes.
        counter, counter_offset: location of the reference count that the reader decrements.
        event, synchronises: event on the GPU, and True if the reader must wait for it.
    """

    layouts: tuple[TensorLayout, ...]
    device: str
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    synchronises: bool


LentBucket: TypeAlias = SharedTensors | CudaMemory


@runtime_checkable
class LentByWorkers(Weights, Protocol):
    """Protocol of weights held by several workers, each of which can lend whole buckets."""

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        """Handles on the named tensors by worker, one per reader of the worker (`BucketLender`)."""
        ...

    def take_back(self) -> None:
        """Call `BucketLender.take_back` on every worker."""
        ...


class BucketLender:
    """Lender of one process's buckets, one at a time."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._block: SharedBlock | None = None
        self._flat: Tensor | None = None

    @torch.no_grad()
    def lend(
        self, layouts: Sequence[TensorLayout], tensors: Iterable[tuple[str, Tensor]], readers: int
    ) -> list[LentBucket]:
        """Handles on one bucket, one per reader. The previous bucket is overwritten or released.

        Args:
            layouts: layouts of the bucket's tensors.
            tensors: those tensors by name; each is needed only while it is copied.

        Raises:
            EngineError: main memory has no room for the bucket.
        """
        if self._device.type == "cuda":
            return self._lend_on_gpu(layouts, tensors, readers)
        if self._block is None:
            self._block = SharedBlock()
        self._block.fill(layouts, tensors)
        return [self._block.share()] * readers

    def _lend_on_gpu(
        self, layouts: Sequence[TensorLayout], tensors: Iterable[tuple[str, Tensor]], readers: int
    ) -> list[LentBucket]:
        self._release()
        flat = torch.empty(block_bytes(layouts), dtype=torch.uint8, device=self._device)
        views = views_of(flat, layouts)
        for name, tensor in tensors:
            views[name].copy_(tensor)
        torch.cuda.synchronize(self._device)
        self._flat = flat
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return [_exported(flat, tuple(layouts), uuid) for _ in range(readers)]

    def take_back(self) -> None:
        """Free the bucket's memory; on a GPU, once its readers have released it."""
        self._block = None  # a reader that has the block open keeps its memory
        if self._flat is not None:
            self._release()
            torch.cuda.empty_cache()  # so that the readers can use the memory

    def _release(self) -> None:
        if self._flat is None:
            return
        left = torch.cuda.memory_allocated(self._device) - self._flat.nbytes
        size, self._flat = self._flat.nbytes, None
        deadline = time.monotonic() + RELEASE_S
        while True:
            torch.cuda.ipc_collect()
            if torch.cuda.memory_allocated(self._device) <= left:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        logger.warning(
            "a reader did not release %d MiB of weights within %.0f s (it may have ended): they "
            "occupy this GPU until this process ends",
            size >> 20,
            RELEASE_S,
        )


def _exported(flat: Tensor, layouts: tuple[TensorLayout, ...], uuid: str) -> CudaMemory:
    """New handle for one reader, made by torch's reductions: torch counts one reader per handle."""
    shared: Any = flat.untyped_storage()._share_cuda_()
    _, handle, size, offset, counter, counter_offset, event, synchronises = shared
    return CudaMemory(
        layouts=layouts, device=uuid, handle=handle, size=size, offset=offset, counter=counter,
        counter_offset=counter_offset, event=event, synchronises=synchronises,
    )  # fmt: skip
