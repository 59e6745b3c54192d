"""Digests are SGLang's: those of its Triton kernel, and of its fall-back on a CPU.

Our kernel is run by Triton's interpreter, and compiled for an H100, which takes no GPU.
"""

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distill.weights.digests import digest, tensor_checksum, word_sum


def slow(data: bytes) -> int:
    """The kernel's sum a word at a time: tiles of 8192 words, two hashes each."""
    word, long = 2**32 - 1, 2**64 - 1
    words = struct.unpack(f"<{-(-len(data) // 4)}I", data + bytes(-len(data) % 4))

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & word
        x ^= x >> 13
        x = x * 0xC2B2AE35 & word
        return x ^ x >> 16

    total = 0
    for tile in range(0, len(words), 8192):
        high = low = 0
        for i in range(tile, min(tile + 8192, len(words))):
            left = (i * 0x27D4EB2D + 0x243F6A88) & word ^ ((i << 15 | i >> 17) & word)
            seed = (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & word
            right = (i * 0x165667B1 + seed) & word ^ ((i << 13 | i >> 19) & word)
            high, low = high + mix(words[i] ^ left) & word, low + mix(words[i] ^ right) & word
        total += mix(high ^ 4 * len(words)) << 32 | mix(low ^ 4 * len(words))
    x = total & long
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & long
    x = (x ^ x >> 27) * 0x94D049BB133111EB & long
    return x ^ x >> 31


@pytest.mark.parametrize(
    "size, dtype, kernel",  # what SGLang 0.5.23's kernel gives, run by Triton's interpreter
    [
        (3, torch.bfloat16, 0x9331854FCB107F49),
        (8192, torch.float32, 0xBD3BF69E6AE40122),
        (40001, torch.bfloat16, 0xE8E44FA3D138D270),
        (2_200_000, torch.float32, 0x50728384DCB1B760),  # more than one portion of tiles
    ],
)
def test_a_sum_of_words_is_that_of_the_kernel(size: int, dtype: torch.dtype, kernel: int) -> None:
    data = torch.arange(size).to(dtype).view(torch.uint8)
    assert word_sum(data) == kernel
    if size < 100_000:
        assert slow(data.numpy().tobytes()) == kernel


INTERPRETED = """
import torch
from distill.weights.digests import sum_by_kernel, sum_by_torch
for size, dtype in ((0, torch.int8), (3, torch.bfloat16), (8192, torch.float32)):
    data = torch.arange(size).to(dtype).view(torch.uint8)
    assert torch.equal(sum_by_kernel(data), sum_by_torch(data)), size
data = torch.randint(0, 256, (3 * 32768 + 9,), dtype=torch.uint8)
for start, end in ((0, None), (1, None), (4, -1), (8, 12)):
    part = data[start:end]
    assert torch.equal(sum_by_kernel(part), sum_by_torch(part)), (start, end)
"""
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from distill.weights.digests import KERNEL_CONSTANTS as CONSTANTS
from distill.weights.word_sum_kernel import add_tiles
types = {"words": "*i32", "total": "*i64", "count": "i32"} | dict.fromkeys(CONSTANTS, "constexpr")
source = ASTSource(fn=add_tiles, signature=types, constexprs=CONSTANTS)
assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


@pytest.mark.parametrize(
    "program, interpreted", [(INTERPRETED, True), (COMPILED, False)], ids=["bits", "H100"]
)
def test_our_kernel_gives_the_same_sum(program: str, interpreted: bool, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_on_a_cpu_it_is_sha_256() -> None:
    matrix = torch.randn(6, 4).to(torch.bfloat16).T
    data = matrix.contiguous().view(torch.uint8).numpy().tobytes()
    assert digest(matrix) == hashlib.sha256(data).hexdigest()[:16]
    assert digest(torch.zeros(0)) == hashlib.sha256(b"").hexdigest()[:16]


def test_a_checksum_sees_every_value_and_its_place() -> None:
    data = torch.randint(0, 2**15, (3 * 4096 + 40,), dtype=torch.int16)
    seen = {tensor_checksum(data)}
    for i in (0, 4096, len(data) - 1):  # of the first row, another, and what makes no row
        other = data.clone()
        other[i] ^= 1
        seen.add(tensor_checksum(other))
    for shift in (4, 4096, 4092):  # words, rows, both
        seen.add(tensor_checksum(data.roll(shift)))
    seen |= {tensor_checksum(data[:n]) for n in (1, 5, 4097)}  # of any length
    assert len(seen) == 10 and tensor_checksum(data.clone()) in seen
    assert tensor_checksum(data[:0]) == tensor_checksum(data[:0].view(torch.uint8))
    weight = torch.randn(300, 70).to(torch.bfloat16).T
    assert tensor_checksum(weight) == tensor_checksum(weight.contiguous())


@pytest.mark.parametrize(("start", "end"), [(0, None), (0, 100), (3, None), (0, 0)])
def test_a_checksum_is_of_sums_of_words(start: int, end: int | None) -> None:
    """Also of a share that begins between two words, and of sums that wrap."""
    data = torch.randint(0, 256, (5 * 8192 + 77,), dtype=torch.uint8)[start:end]
    words_RC = data[: len(data) // 8192 * 8192].clone().view(torch.int64).view(-1, 1024).tolist()
    columns = [sum(column) % 2**64 for column in zip(*words_RC, strict=True)] or [0] * 1024
    rows = [sum(row) % 2**64 for row in words_RC]
    sums = b"".join(total.to_bytes(8, "little") for total in columns + rows)
    rest = data[len(data) // 8192 * 8192 :].numpy().tobytes()
    assert tensor_checksum(data) == hashlib.sha256(sums + rest).hexdigest()
