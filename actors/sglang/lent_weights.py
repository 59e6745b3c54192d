"""Lent weights at a server's owner: the buckets of a push, and what the server's ranks are sent.

    learner    load_bucket(push, i, handles) ----> give: waits until the bucket is loaded
    load       next(i) <-------------------------- the handles; loaded() is the learner's answer
    learner    end_push(push, why)  -------------> close: who waits is told why

A load that waits is closed by whatever comes after it, so that a learner that is gone holds up
nothing. The handles become payloads, one a rank, and a format that reads them:

    SharedTensors    where the memory is, for isotherm's own loader (plugin/weight_loader.py)
    CudaMemory       a pickle in SGLang's flattened format: a flat tensor of bytes, and where each
                     tensor lies in it. The flat tensor is pickled as torch's own reductions do it:
                     a handle on memory, with the GPU by its UUID, of which SGLang makes an index

A rank's unpickler knows few names (`SafeUnpickler` of SGLang), and all that is used here are among
them. Nothing is unpickled on this side: the learner's handles are plain data.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from actors.sglang.flags import LOADER
from actors.sglang.plugin.weight_loader import serialized_order
from distill.errors import EngineError
from distill.weights.lending import CudaMemory, LentBucket
from distill.weights.shared_memory import block_bytes, starts_of


class _Given(NamedTuple):
    number: int
    handles: Sequence[LentBucket]
    loaded: asyncio.Future[None]


class LentBuckets:
    """One push's; made by whichever of load and first bucket comes first."""

    def __init__(self, push: str) -> None:
        self.push = push
        self._queue: asyncio.Queue[_Given] = asyncio.Queue()
        self._under_way: _Given | None = None
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def give(self, number: int, handles: Sequence[LentBucket]) -> None:
        """Returns when the bucket has been loaded, and nobody reads it any more.

        Raises:
            EngineError: it was not, and will not be.
        """
        given = _Given(number, handles, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(given)
        await asyncio.wait([given.loaded, self._closed], return_when=asyncio.FIRST_COMPLETED)
        if not given.loaded.done():
            raise EngineError(self._closed.result())

    async def next(self, number: int, timeout_s: float, ranks: int) -> Sequence[LentBucket]:
        """Handles of the bucket of this number, one for each of the server's ranks.

        Raises:
            EngineError: it does not come, or for another number of ranks.
        """
        coming = asyncio.ensure_future(self._queue.get())
        await asyncio.wait(
            [coming, self._closed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._closed.done() or not coming.done():
            coming.cancel()
            why = self._closed.result() if self._closed.done() else f"none in {timeout_s:.0f} s"
            raise EngineError(f"bucket {number} did not come: {why}")
        self._under_way = coming.result()
        if self._under_way.number != number:
            raise EngineError(f"bucket {self._under_way.number} came in place of {number}")
        if len(handles := self._under_way.handles) != ranks:
            raise EngineError(f"{len(handles)} handles came for {ranks} ranks")
        return handles

    def loaded(self) -> None:
        """Called when the bucket that came last has been loaded."""
        assert self._under_way is not None
        self._under_way.loaded.set_result(None)

    def close(self, why: str) -> None:
        """Ends the push for both sides, unless it has ended."""
        if not self._closed.done():
            self._closed.set_result(why)


class Lendings:
    """The push that is under way, or was last; no other can come back."""

    def __init__(self) -> None:
        self._buckets: LentBuckets | None = None
        self._over: deque[str] = deque(maxlen=16)  # calls that are late name no older ones

    def of(self, push: str) -> LentBuckets:
        """That push, which may be about to begin, or be closed.

        Raises:
            EngineError: another has begun since.
        """
        if push in self._over:
            raise EngineError("this push is over: another has begun")
        if self._buckets is None or self._buckets.push != push:
            if self._buckets is not None:
                self._buckets.close("another push has begun")
                self._over.append(self._buckets.push)
            self._buckets = LentBuckets(push)
        return self._buckets

    async def give(self, push: str, number: int, handles: Sequence[LentBucket]) -> None:
        """Provide a bucket of a push, and return when it is loaded, and nobody reads it any more.

        Raises:
            EngineError: the bucket was not loaded.
        """
        await self.of(push).give(number, handles)

    def end(self, why: str, push: str | None = None) -> None:
        """Closes the push that is under way, if it is this one (None: whichever)."""
        if self._buckets is not None and push in (None, self._buckets.push):
            self._buckets.close(why)


@contextmanager
def rank_payloads(handles: Sequence[LentBucket]) -> Iterator[tuple[list[bytes], str]]:
    """Payloads and their `load_format`, valid in the context.

    Args:
        handles: handle of each rank, all in main memory or all on GPUs.

    Raises:
        EngineError: a bucket's memory is gone.
    """
    with ExitStack() as opened:
        payloads, formats = [], set()
        for handle in handles:
            if isinstance(handle, CudaMemory):
                payloads.append(cuda_payload(handle))
                formats.add("flattened_bucket")
            else:  # opened here first: a server that cannot open it would end
                payloads.append(serialized_order(opened.enter_context(handle.held())))
                formats.add(LOADER)
        [load_format] = formats
        yield payloads, load_format


class _Call(NamedTuple):
    """Pickled as the call of a function, which the unpickler makes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def cuda_payload(memory: CudaMemory) -> bytes:
    """Pickle for the rank on the GPU of this memory."""
    size = block_bytes(memory.layouts)
    flat = _Call(
        reductions.rebuild_cuda_tensor,
        (
            torch.Tensor, torch.Size([size]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
            memory.device, memory.handle, memory.size, memory.offset, False, memory.counter,
            memory.counter_offset, memory.event, memory.synchronises,
        ),
    )  # fmt: skip
    metadata = [
        SimpleNamespace(
            name=layout.name,
            shape=torch.Size(layout.shape),
            dtype=layout.torch_dtype,
            start_idx=start,
            end_idx=start + layout.nbytes,
            numel=layout.nbytes,  # of bytes, as SGLang has it
        )
        for layout, start in zip(memory.layouts, starts_of(memory.layouts), strict=True)
    ]
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
