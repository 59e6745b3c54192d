"""Payloads by which a server's ranks open lent buckets: one a rank, and the format that reads them.

    SharedTensors    where the memory is, for isotherm's own loader (plugin/weight_loader.py)
    CudaMemory       a pickle in SGLang's flattened format: a flat tensor of bytes, and where each
                     tensor lies in it. The flat tensor is pickled as torch's own reductions do it:
                     a handle on memory, with the GPU by its UUID, of which SGLang makes an index

A rank's unpickler knows few names (`SafeUnpickler` of SGLang), and all that is used here are among
them. Nothing is unpickled on this side: the learner's handles are plain data.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from actors.sglang.flags import LOADER
from actors.sglang.plugin.weight_loader import serialized_order
from distill.weights.lending import CudaMemory, LentBucket
from distill.weights.shared_memory import block_bytes, starts_of


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
