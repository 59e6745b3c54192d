"""`distill.weights.digests.word_sum` as one Triton kernel, which reads the bytes once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= tl.full((), 0x85EBCA6B, tl.uint32)
    x ^= x >> 13
    x *= tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _hash(word, position, FACTOR: tl.constexpr, ROTATION: tl.constexpr, SEED: tl.constexpr):
    turned = (position << ROTATION) | (position >> (32 - ROTATION))
    placed = position * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)
    return _mix(word ^ placed ^ turned)


@triton.jit(do_not_specialize=["count"])
def add_tiles(
    words,
    total,
    count,
    SEED_HIGH: tl.constexpr,
    SEED_LOW: tl.constexpr,
    FACTOR_HIGH: tl.constexpr,
    ROTATION_HIGH: tl.constexpr,
    FACTOR_LOW: tl.constexpr,
    ROTATION_LOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add both hashes of a tile of words to the total; sums wrap at 2^64, in any order."""
    first = tl.program_id(0).to(tl.int64) * TILE
    high, low = tl.zeros((BLOCK,), tl.uint32), tl.zeros((BLOCK,), tl.uint32)
    for start in range(0, TILE, BLOCK):
        place = first + start + tl.arange(0, BLOCK)
        is_word = place < count
        word = tl.load(words + place, mask=is_word, other=0).to(tl.uint32, bitcast=True)
        position = place.to(tl.uint32)
        hash_high = _hash(word, position, FACTOR_HIGH, ROTATION_HIGH, SEED_HIGH)
        hash_low = _hash(word, position, FACTOR_LOW, ROTATION_LOW, SEED_LOW)
        high += tl.where(is_word, hash_high, 0)
        low += tl.where(is_word, hash_low, 0)
    nbytes = tl.full((), count * 4, tl.uint32)
    high_sum = _mix(tl.sum(high, axis=0).to(tl.uint32) ^ nbytes)
    low_sum = _mix(tl.sum(low, axis=0).to(tl.uint32) ^ nbytes)
    both = (high_sum.to(tl.uint64) << 32) | low_sum.to(tl.uint64)
    tl.atomic_add(total, both.to(tl.int64, bitcast=True))


def add_word_sum(words: Tensor, total: Tensor, constants: Mapping[str, Any]) -> None:
    """Add the sum of the words (int32, contiguous, at least one) to `total`, one int64.

    Args:
        constants: constexpr arguments of `add_tiles`, by name.
    """
    add_tiles[(-(-len(words) // constants["TILE"]),)](words, total, len(words), **constants)  # pyright: ignore[reportIndexIssue]
