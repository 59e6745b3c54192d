"""Lent weights in the engine that hosts a server: the buckets of a push, and the ranks' payloads.

    learner    load_bucket(push, i, handles) ----> give: waits until the bucket is loaded
    load       loading(i) <----------------------- the handles; at its end, `put` returns
    learner    end_push(push, why)  -------------> close: waiting calls raise with the reason

Any later load closes a load that still waits for a bucket, so a learner that has died blocks
nothing. Handles are converted to one payload for each rank, in a format that the rank can read:

    SharedTensors    location of the memory, for isotherm's weight loader (plugin/weight_loader.py)
    CudaMemory       a pickle in SGLang's flattened format: a flat tensor of bytes, and the position
                     of each tensor in it. The flat tensor is pickled as by torch's reductions: as a
                     memory handle, with the UUID of the GPU, which SGLang maps to a device index

SGLang's `SafeUnpickler` on each rank allows few names; the payloads use only these. Nothing is
unpickled in this process: the learner's handles are plain data.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from actors.sglang.flags import LOADER
from actors.sglang.plugin.weight_loader import serialized_order
from distill.errors import EngineError
from distill.weights.lending import CudaMemory, LentBucket
from distill.weights.shared_memory import block_bytes, starts_of


class _Bucket(NamedTuple):
    number: int
    handles: Sequence[LentBucket]
    loaded: asyncio.Future[None]


class LentBuckets:
    """The buckets of one push; created by the load or by the first bucket."""

    def __init__(self, push: str) -> None:
        self.push = push
        self._queue: asyncio.Queue[_Bucket] = asyncio.Queue()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def put(self, number: int, handles: Sequence[LentBucket]) -> None:
        """Provide a bucket; return when it has been loaded and no rank reads it any more.

        Raises:
            EngineError: the push was closed before the bucket was loaded.
        """
        bucket = _Bucket(number, handles, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(bucket)
        await asyncio.wait([bucket.loaded, self._closed], return_when=asyncio.FIRST_COMPLETED)
        if not bucket.loaded.done():
            raise EngineError(self._closed.result())

    @asynccontextmanager
    async def loading(
        self, number: int, timeout_s: float, ranks: int
    ) -> AsyncIterator[Sequence[LentBucket]]:
        """Context manager that waits for bucket `number`, and marks it as loaded at its end.

        Yields its handles, one for each of the server's ranks.

        Raises:
            EngineError: the bucket did not arrive within `timeout_s`, the push was closed, another
                bucket arrived, or the number of handles is not `ranks`.
        """
        coming = asyncio.ensure_future(self._queue.get())
        await asyncio.wait(
            [coming, self._closed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._closed.done() or not coming.done():
            coming.cancel()
            why = self._closed.result() if self._closed.done() else f"none in {timeout_s:.0f} s"
            raise EngineError(f"bucket {number} did not arrive: {why}")
        bucket = coming.result()
        if bucket.number != number:
            raise EngineError(f"bucket {bucket.number} arrived in place of {number}")
        if len(bucket.handles) != ranks:
            raise EngineError(f"{len(bucket.handles)} handles arrived for {ranks} ranks")
        yield bucket.handles
        bucket.loaded.set_result(None)

    def close(self, why: str) -> None:
        """End the push for the learner and the load, unless it has already ended."""
        if not self._closed.done():
            self._closed.set_result(why)


class Lendings:
    """The current or most recent push. A push that another has replaced cannot be resumed."""

    def __init__(self) -> None:
        self._buckets: LentBuckets | None = None
        self._over: deque[str] = deque(maxlen=16)  # late calls name one of the last 16 pushes

    def of(self, push: str) -> LentBuckets:
        """Return the buckets of a push, which may be new or already closed.

        Raises:
            EngineError: another push has begun since.
        """
        if push in self._over:
            raise EngineError("this push is over: another has begun")
        if self._buckets is None or self._buckets.push != push:
            if self._buckets is not None:
                self._buckets.close("another push has begun")
                self._over.append(self._buckets.push)
            self._buckets = LentBuckets(push)
        return self._buckets

    def end(self, why: str, push: str | None = None) -> None:
        """Close the current push, if it is `push` or `push` is None."""
        if self._buckets is not None and push in (None, self._buckets.push):
            self._buckets.close(why)


@contextmanager
def rank_payloads(handles: Sequence[LentBucket]) -> Iterator[tuple[list[bytes], str]]:
    """Context manager that yields the ranks' payloads and their `load_format`.

    The payloads are valid only inside the context.

    Args:
        handles: one handle for each rank, all in main memory or all on GPUs.

    Raises:
        EngineError: a bucket's memory no longer exists.
    """
    with ExitStack() as opened:
        payloads, formats = [], set()
        for handle in handles:
            if isinstance(handle, CudaMemory):
                payloads.append(cuda_payload(handle))
                formats.add("flattened_bucket")
            else:  # opened here first: a server that cannot open the memory would exit
                payloads.append(serialized_order(opened.enter_context(handle.held())))
                formats.add(LOADER)
        [load_format] = formats
        yield payloads, load_format


class _Call(NamedTuple):
    """Object that is pickled as a function call; the unpickler calls the function."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def cuda_payload(memory: CudaMemory) -> bytes:
    """Pickled payload for the rank on the GPU that holds this memory."""
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
            numel=layout.nbytes,  # SGLang counts bytes here
        )
        for layout, start in zip(memory.layouts, starts_of(memory.layouts), strict=True)
    ]
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
