"""Digests of tensors, equal to those of SGLang's weights checker, so that both can be compared.

On a CPU a digest is the first eight bytes of SHA-256. On a GPU it is a sum of hashed words, which
SGLang and isotherm (`word_sum_kernel.py`) each compute by a Triton kernel. This file has the same
sum in torch: the kernel is compared with it before its first use, and replaced by it if the kernel
does not work. Comparisons without a server use `tensor_checksum`, which is a tenth of the work.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from distill.errors import first_line

logger = logging.getLogger(__name__)

_WORD, _LONG = (1 << 32) - 1, (1 << 64) - 1
# Words per tile, each tile with its own hash; tiles that torch hashes at a time, to bound memory.
TILE = 8192
TILES = 256
_ROW = 1024  # 8-byte words in a row of `tensor_checksum`
_SEED = 0x243F6A88
_SEEDS = (_SEED, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_POSITIONS = ((0x27D4EB2D, 15), (0x165667B1, 13))  # factor and rotation of each half of a hash
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
    """Digests of tensors in order, with one wait for the GPU."""

    def __init__(self) -> None:
        self._made: list[str | Tensor] = []

    def add(self, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if tensor.is_cuda:
            self._made.append(_sum_on_gpu(data))
        else:
            self._made.append(hashlib.sha256(data.numpy().data).hexdigest()[:16])

    def read(self) -> list[str]:
        """Return sixteen hexadecimal digits for each tensor."""
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


def tensor_checksum(tensor: Tensor) -> str:
    """Checksum of a tensor's values and their positions, at the speed of memory, on its device.

    A hash of sums over rows and columns of words, which wrap at 2^64: it detects accidental
    changes, but not forgery.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a view of a larger tensor, not aligned to words
        data = data.clone()
    whole = len(data) - len(data) % (8 * _ROW)
    rows_RC = data[:whole].view(torch.int64).reshape(-1, _ROW)
    sums = (rows_RC.sum(dim=0), rows_RC.sum(dim=1), data[whole:])
    return hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in sums)).hexdigest()


def digest_of(checksums: Mapping[str, str]) -> str:
    """Sixteen hexadecimal digits for many tensors, from their checksums in any order."""
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()[:16]


def word_sum(data: Tensor) -> int:
    """SGLang's `gpu_tensor_hash` of these bytes."""
    total = _sum_on_gpu(data) if data.is_cuda else sum_by_torch(data)
    return _finish(int(total) & _LONG)


def sum_by_torch(data: Tensor) -> Tensor:
    """Sum of the bytes' hashed words: an int64 tensor of one element."""
    words = _words(data)
    halves = torch.zeros(2, 1, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), TILE * TILES):
        some = words[start : start + TILE * TILES].long() & _WORD
        halves += torch.stack(_tiles(some, start, len(words)))[:, None]
    return (halves[0] << 32) + halves[1]


def sum_by_kernel(data: Tensor) -> Tensor:
    """`sum_by_torch` as one Triton kernel. Raises ImportError without Triton."""
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
    """True if the kernel compiles for this device and returns the same sum as torch."""
    data = torch.arange(3 * TILE + 5, device=device).view(torch.uint8)[:-1]
    try:
        found = int(sum_by_kernel(data))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise many types
        name = type(error).__name__
        logger.warning(
            "weight digests are computed by torch, because the kernel failed (%s: %s)",
            name,
            first_line(error),
        )
        return False
    if found != int(sum_by_torch(data)):
        logger.warning("weight digests are computed by torch, because the kernel's differ")
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
    """murmur3's finaliser on 32-bit words in int64, whose low bits survive a product that wraps."""
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
