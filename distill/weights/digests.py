"""Digests of tensors as SGLang's weights checker takes them, so that both sides can be compared.

On a CPU the first eight bytes of SHA-256; on a GPU a sum of hashed words, for which SGLang has a
Triton kernel and this file the same sum in torch (`word_sum`). Where both sides are ours and no
server has its say, `checksum` is a tenth of the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
# Words of a tile, each hashed by its own; tiles at a time, which bounds the memory that it takes.
_TILE = 8192
_TILES = 256
_ROW = 1024  # words that `checksum` takes as a row
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))  # a factor and a rotation for each half


def digest(tensor: Tensor) -> str:
    """Sixteen hexadecimal digits of the tensor's bytes; of what kind, its device decides."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if tensor.is_cuda:
        return f"{word_sum(data):016x}"
    return hashlib.sha256(data.numpy().data).hexdigest()[:16]


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
    if not data.numel():
        return 0
    words = pad(data, (0, -data.numel() % 4)).view(torch.int32)
    halves = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), _TILE * _TILES):
        some = words[start : start + _TILE * _TILES].long() & _WORD
        halves += torch.stack(_tiles(some, start, len(words)))
    high, low = halves.tolist()  # one wait for the GPU, whatever the size
    return _finish(((high << 32) + low) & _LONG)


def _tiles(words: Tensor, start: int, num_words: int) -> list[Tensor]:
    """Sums over tiles of two 32-bit hashes."""
    positions = torch.arange(start, start + len(words), device=words.device) & _WORD
    halves = []
    for (factor, rotation), seed in zip(_POSITIONS, _SEEDS, strict=True):
        turned = (positions << rotation | positions >> (32 - rotation)) & _WORD
        mixed = _mix(words ^ ((positions * factor + seed) & _WORD) ^ turned)
        per_tile = pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE).sum(dim=1) & _WORD
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
