"""Digests of tensors as SGLang's weights checker takes them, so that both sides can be compared.

On a CPU the first eight bytes of SHA-256; on a GPU a sum of hashed words, for which SGLang has a
Triton kernel, and so have we (`word_sum_kernel.py`). This file has the same sum in torch, which the
kernel is compared with before its first use, and which takes its place where Triton is missing.
Where both sides are ours and no server has its say, `checksum` is a tenth of the work.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from distill.errors import first_line

logger = logging.getLogger(__name__)

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
# Words of a tile, each hashed by its own; tiles at a time, which bounds the memory that it takes.
TILE = 8192
TILES = 256
_ROW = 1024  # words that `checksum` takes as a row
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))  # a factor and a rotation for each half
KERNEL_CONSTANTS = {
    "SEED_HIGH": _SEEDS[0],
    "SEED_LOW": _SEEDS[1],
    "FACTOR_HIGH": _POSITIONS[0][0],
    "ROTATION_HIGH": _POSITIONS[0][1],
    "FACTOR_LOW": _POSITIONS[1][0],
    "ROTATION_LOW": _POSITIONS[1][1],
    "TILE": TILE,
    "BLOCK": 1024,  # words that a program hashes at a time
}


class TensorDigests:
    """Digests of tensors, in the order in which they were added, with one wait for the GPU."""

    def __init__(self) -> None:
        self._made: list[str | Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Begin the digest of the tensor's bytes; of what kind, its device decides."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if tensor.is_cuda:
            self._made.append(_sum_on_gpu(data))
        else:
            self._made.append(hashlib.sha256(data.numpy().data).hexdigest()[:16])

    def read(self) -> list[str]:
        """Sixteen hexadecimal digits for each tensor."""
        sums = [made for made in self._made if isinstance(made, Tensor)]
        found = iter(torch.cat(sums).tolist() if sums else [])
        return [
            f"{_finish(next(found) & _LONG):016x}" if isinstance(made, Tensor) else made
            for made in self._made
        ]


def digest(tensor: Tensor) -> str:
    """Sixteen hexadecimal digits of the tensor's bytes."""
    digests = TensorDigests()
    digests.add(tensor)
    return digests.read()[0]


def checksum(data: npt.NDArray[Any]) -> str:
    """A name for the array's values and their places, at the speed of memory.

    Of sums over rows and columns of words: it finds what went wrong, and no forger.

    Args:
        data: contiguous.
    """
    data = data.reshape(-1).view(np.uint8)
    whole = len(data) - len(data) % (8 * _ROW)
    rows_RC = data[:whole].view(np.int64).reshape(-1, _ROW)
    return _name(rows_RC.sum(axis=0), rows_RC.sum(axis=1), data[whole:])


def tensor_checksum(tensor: Tensor) -> str:
    """The `checksum` of a tensor's values, summed on the device where they are."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not data.is_cuda:
        return checksum(data.cpu().numpy())
    return checksum_by_torch(data)


def digest_of(checksums: Mapping[str, str]) -> str:
    """Sixteen hexadecimal digits of many tensors, by their checksums, in whatever order."""
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()[:16]


def checksum_by_torch(data: Tensor) -> str:
    """`checksum` of bytes, by torch's sums, which go round at 2^64 as numpy's do."""
    if data.storage_offset() % 8:  # a share of a larger tensor: no words begin there
        data = data.clone()
    whole = len(data) - len(data) % (8 * _ROW)
    rows_RC = data[:whole].view(torch.int64).reshape(-1, _ROW)
    sums = (rows_RC.sum(dim=0), rows_RC.sum(dim=1), data[whole:])
    return _name(*(part.cpu().numpy() for part in sums))


def _name(*sums: npt.NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in sums)).hexdigest()


def word_sum(data: Tensor) -> int:
    """SGLang's `gpu_tensor_hash` of these bytes."""
    total = _sum_on_gpu(data) if data.is_cuda else sum_by_torch(data)
    return _finish(int(total) & _LONG)


def sum_by_torch(data: Tensor) -> Tensor:
    """The sum of the bytes' hashed words, int64 of one element."""
    words = _words(data)
    halves = torch.zeros(2, 1, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), TILE * TILES):
        some = words[start : start + TILE * TILES].long() & _WORD
        halves += torch.stack(_tiles(some, start, len(words)))[:, None]
    return (halves[0] << 32) + halves[1]


def sum_by_kernel(data: Tensor) -> Tensor:
    """`sum_by_torch` by one kernel. Raises ImportError without Triton."""
    from distill.weights.word_sum_kernel import add_word_sum

    words = _words(data)
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    if len(words):
        add_word_sum(words, total, KERNEL_CONSTANTS)
    return total


def _sum_on_gpu(data: Tensor) -> Tensor:
    return sum_by_kernel(data) if _kernel_serves(data.device) else sum_by_torch(data)


@cache
def _kernel_serves(device: torch.device) -> bool:
    """True if the kernel compiles here, and its sum is torch's."""
    data = torch.arange(3 * TILE + 5, device=device).view(torch.uint8)[:-1]
    try:
        found = int(sum_by_kernel(data))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers have many
        name = type(error).__name__
        logger.warning("digests of weights by torch, %s: %s", name, first_line(error))
        return False
    if found != int(sum_by_torch(data)):
        logger.warning("digests of weights by torch: the kernel's are others")
        return False
    return True


def _words(data: Tensor) -> Tensor:
    """The bytes as int32, without a copy if they are whole words."""
    if len(data) % 4 or data.storage_offset() % 4:
        data = pad(data, (0, -len(data) % 4))
    return data.view(torch.int32)


def _tiles(words: Tensor, start: int, num_words: int) -> list[Tensor]:
    """Sums over tiles of two 32-bit hashes."""
    positions = torch.arange(start, start + len(words), device=words.device) & _WORD
    halves = []
    for (factor, rotation), seed in zip(_POSITIONS, _SEEDS, strict=True):
        turned = (positions << rotation | positions >> (32 - rotation)) & _WORD
        mixed = _mix(words ^ ((positions * factor + seed) & _WORD) ^ turned)
        per_tile = pad(mixed, (0, -len(mixed) % TILE)).view(-1, TILE).sum(dim=1) & _WORD
        halves.append(_mix(per_tile ^ (4 * num_words & _WORD)).sum())
    return halves


def _mix(x: Tensor) -> Tensor:
    """murmur3's finaliser, on words that are held in int64, whose products wrap as they should."""
    x = x ^ x >> 16
    x = x * 0x85EBCA6B & _WORD
    x = x ^ x >> 13
    x = x * 0xC2B2AE35 & _WORD
    return x ^ x >> 16


def _finish(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _LONG
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _LONG
    return x ^ x >> 31
