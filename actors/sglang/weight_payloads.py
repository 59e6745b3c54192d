"""Pickles by which a server's ranks open a lent bucket, in SGLang's flattened format.

`/update_weights_from_tensor` with `load_format: flattened_bucket` takes one pickle a rank: a flat
tensor of bytes, and where each tensor lies in it. The flat tensor is pickled as torch's own
reductions do it: a handle on memory, not the memory. A rank's unpickler knows few names
(`SafeUnpickler` of SGLang), and all that is used here are among them. Nothing is unpickled on this
side: the learner's handles are plain data.

    CudaMemory       torch's CUDA handle, with the GPU by its UUID, which SGLang makes an index of
    SharedTensors    a descriptor of memory without a name. torch asks for it at a socket, and knows
                     a key: the server was given it when it started (actors/sglang/launch.py)
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import AuthenticationError, reduction
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.resource_sharer import DupFd
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from distill.weights.lending import CudaMemory, LentBucket
from distill.weights.shared_memory import block_bytes, starts_of
from distill.weights.tensors import TensorLayout

logger = logging.getLogger(__name__)

FORMAT = "flattened_bucket"
# Longest that a process which asks for a descriptor may take to say who it is.
_GREETING_S = 10.0


def rank_payload(opened: ExitStack, handle: LentBucket, key: bytes) -> bytes:
    """The pickle for one rank, good until `opened` is closed.

    Args:
        key: known to the server's processes, for buckets in main memory.

    Raises:
        EngineError: the bucket's memory is gone.
    """
    if isinstance(handle, CudaMemory):
        return _pickled(_on_gpu(handle), handle.layouts)
    # Opened here first: a server that could not would end.
    held = opened.enter_context(handle.held(writable=True))
    descriptor = int(os.path.basename(held.path))
    address = opened.enter_context(_handed_out(descriptor, key))
    return _pickled(_in_memory(address, os.fstat(descriptor).st_size), handle.layouts)


class _Call(NamedTuple):
    """Pickled as what the function makes of the arguments, when it is unpickled."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


def _pickled(flat: _Call, layouts: Sequence[TensorLayout]) -> bytes:
    metadata = [
        SimpleNamespace(
            name=layout.name,
            shape=torch.Size(layout.shape),
            dtype=layout.torch_dtype,
            start_idx=start,
            end_idx=start + layout.nbytes,
            numel=layout.nbytes,  # of bytes, as SGLang has it
        )
        for layout, start in zip(layouts, starts_of(layouts), strict=True)
    ]
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata})


def _on_gpu(memory: CudaMemory) -> _Call:
    size = block_bytes(memory.layouts)
    return _Call(
        reductions.rebuild_cuda_tensor,
        (
            torch.Tensor, torch.Size([size]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
            memory.device, memory.handle, memory.size, memory.offset, False, memory.counter,
            memory.counter_offset, memory.event, memory.synchronises,
        ),
    )  # fmt: skip


def _in_memory(address: str, size: int) -> _Call:
    asks = DupFd.__new__(DupFd)  # as one that its own sharer, which is not used, has made
    asks.__dict__["_id"] = (address, 0)
    untyped = _Call(reductions.rebuild_storage_fd, (torch.UntypedStorage, asks, size))
    storage = _Call(reductions.rebuild_typed_storage, (untyped, torch.uint8))
    return _Call(
        reductions.rebuild_tensor, (torch.Tensor, storage, (0, torch.Size([size]), (1,), False))
    )


@contextmanager
def _handed_out(descriptor: int, key: bytes) -> Iterator[str]:
    """Address where processes of this user that know the key get the descriptor.

    The socket has no file, and hears no other user. `multiprocessing.resource_sharer`, whose
    protocol this is, keeps a file, and every descriptor that nobody has asked for.
    """
    listener = socket.socket(socket.AF_UNIX)
    address = f"\0isotherm-{secrets.token_hex(16)}"
    listener.bind(address)
    listener.listen()
    thread = threading.Thread(target=_serve, args=(listener, descriptor, key), daemon=True)
    thread.start()
    try:
        yield address
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # ends what is accepting
        thread.join()
        listener.close()


def _serve(listener: socket.socket, descriptor: int, key: bytes) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError:
            return  # shut down
        with asking:
            if not _is_ours(asking):
                continue
            _limit(asking, _GREETING_S)
            try:
                _hand_over(asking, descriptor, key)
            except (OSError, EOFError, AuthenticationError) as error:
                logger.warning("a process did not get a bucket of weights: %r", error)


def _is_ours(asking: socket.socket) -> bool:
    """True if the process at the other end is of this user."""
    credentials = struct.Struct("3i")
    given = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return credentials.unpack(given)[1] == os.getuid()


def _limit(asking: socket.socket, seconds: float) -> None:
    """Bounds each read and write; `settimeout` would make the socket one that does not block."""
    limit = struct.pack("ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        asking.setsockopt(socket.SOL_SOCKET, option, limit)


def _hand_over(asking: socket.socket, descriptor: int, key: bytes) -> None:
    with Connection(os.dup(asking.fileno())) as connection:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        _, process = connection.recv()
        reduction.send_handle(connection, descriptor, process)
