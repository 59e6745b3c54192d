"""Buckets of weights that a process lends to others of its machine: written once, read in place.

    lender    lend(...): the bucket's tensors in one block of memory, and a handle on it a reader
    reader    opens its handle, copies what it needs, lets go, and says so
    lender    the next bucket, once every reader has said so; take_back() after the last

So one bucket is in memory beside the model, whatever the model. On a CPU the block is of memory
without a name (`distill.weights.shared_memory`). On CUDA it is one of torch's allocations, lent by
CUDA's inter-process handles: torch keeps the allocation until every process that was given a
handle has let go of it, each handle counts once (so each reader needs its own), and it is given
back only by `torch.cuda.ipc_collect`. A reader lets go after its own copies have ended on the GPU,
which may be a moment after it has said so: `take_back` waits for that.
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
from distill.weights.model_weights import Weights
from distill.weights.shared_memory import (
    SharedBlock,
    SharedTensors,
    block_bytes,
    views_of,
)
from distill.weights.tensors import TensorLayout

logger = logging.getLogger(__name__)

# Longest that readers may take to let go of a GPU's memory after they have said that they read it.
RELEASE_S = 30.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderPlace:
    """Where a lender's memory is.

    Attributes:
        host: name of its machine.
        gpu: id of its GPU there, None on a CPU.
    """

    host: str
    gpu: str | None

    @classmethod
    def own(cls, device: str) -> LenderPlace:
        """That of this process."""
        gpus = visible_gpus() if device.startswith("cuda") else []
        index = int(device.partition(":")[2] or 0)
        return cls(host=os.uname().nodename, gpu=gpus[index] if index < len(gpus) else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaMemory:
    """A handle on a block of a GPU's memory, for one reader: what torch's own reductions send.

    Attributes:
        layouts: of the tensors, as they lie in the block (`views_of`).
        device: the GPU by its UUID, for processes number GPUs as they please.
        handle, size, offset: of the allocation that the block is in; the block's own bytes.
        counter, counter_offset: where the reader counts itself out.
        event, synchronises: what the reader waits for on the GPU.
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
class Lends(Protocol):
    """Weights that several workers hold, of which each can lend out whole buckets."""

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        """Handles on these tensors, by worker, as many as it has readers: `BucketLender.lend`."""
        ...

    def take_back(self) -> None:
        """As `BucketLender.take_back`, on every worker."""
        ...


class BucketLender:
    """One process's buckets, one at a time, on its device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._block: SharedBlock | None = None
        self._flat: Tensor | None = None

    @torch.no_grad()
    def lend(
        self, layouts: Sequence[TensorLayout], tensors: Iterable[tuple[str, Tensor]], readers: int
    ) -> list[LentBucket]:
        """Handles on one bucket, one a reader. The bucket before is written over, or given back.

        Args:
            layouts: of the bucket's tensors.
            tensors: those by name; each is needed for no longer than it takes to copy it.

        Raises:
            EngineError: there is no room for the bucket in main memory.
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
        """Gives the bucket's memory back; on a GPU, once its readers have let go of it."""
        self._block = None  # a reader that has it open keeps it
        if self._flat is not None:
            self._release()
            torch.cuda.empty_cache()  # the readers' now

    def _release(self) -> None:
        """Lets go of the block on the GPU, and waits until torch may use its memory again."""
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
            "a reader has not let go of %d MiB of weights within %.0f s (it has ended?): this GPU "
            "lacks them as long as this process lives",
            size >> 20,
            RELEASE_S,
        )


def _exported(flat: Tensor, layouts: tuple[TensorLayout, ...], uuid: str) -> CudaMemory:
    """A handle of its own, as torch's reductions ask for one: torch counts one reader for each."""
    shared: Any = flat.untyped_storage()._share_cuda_()
    _, handle, size, offset, counter, counter_offset, event, synchronises = shared
    return CudaMemory(
        layouts=layouts, device=uuid, handle=handle, size=size, offset=offset, counter=counter,
        counter_offset=counter_offset, event=event, synchronises=synchronises,
    )  # fmt: skip


class OwnWeights:
    """`Lends` of weights that one process has, or gathers."""

    def __init__(self, weights: Weights, device: str) -> None:
        self._weights, self._lender = weights, BucketLender(device)
        self._layouts = {layout.name: layout for layout in weights.layouts}

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        """See `Lends`."""
        assert not any(readers[1:]), "there are no other workers"
        layouts = [self._layouts[name] for name in names]
        gathered = ((name, self._weights.gather([name])[name]) for name in names)
        return [self._lender.lend(layouts, gathered, readers[0]), *([] for _ in readers[1:])]

    def take_back(self) -> None:
        """See `Lends`."""
        self._lender.take_back()
