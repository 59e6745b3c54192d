"""Kernels, copies and waits of a GPU, counted on a CPU: `python -m benchmarks.launches`.

Counts torch operations that launch a kernel, and waits of the host for the device. docs/gpu.md has
the numbers.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.sglang.plugin.listed_steps import ListedStep, Wanted
from benchmarks.push_model import MODELS, Shape, layouts
from distill.models.attention import visibility_bias
from distill.models.flex_attention import BLOCK
from distill.weights.digests import TILE, TILES, sum_by_torch

_UPLOAD = "lift_fresh"  # a tensor of Python numbers, which is then copied to the GPU
# Operations that return a view, or only allocate.
_NO_KERNEL = {"view", "slice", "unsqueeze", "select", "detach", "empty"}
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class KernelCount(TorchDispatchMode):
    """Counter of operations within the context that launch at least one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.uploads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        name = func.name().removeprefix("aten::").partition(".")[0]
        self.kernels += name not in _NO_KERNEL and name != _UPLOAD
        self.uploads += name == _UPLOAD
        return func(*args, **(kwargs or {}))


def served_sizes(shape: Shape) -> list[int]:
    """Bytes of each parameter of a one-GPU server; q, k, v are fused, and so are gate and up."""
    sizes: Counter[str] = Counter()
    for tensor in layouts(shape):
        place, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        sizes[f"{place}.{_FUSED.get(kind, kind)}"] += tensor.nbytes
    return list(sizes.values())


def digest_kernels(sizes: Iterable[int]) -> tuple[int, int]:
    """Kernels (by torch, by ours) of the digests of parameters of these sizes in bytes."""
    portion = 4 * TILE * TILES
    with KernelCount() as one:
        sum_by_torch(torch.zeros(portion, dtype=torch.uint8))
    with KernelCount() as two:
        sum_by_torch(torch.zeros(2 * portion, dtype=torch.uint8))
    each = two.kernels - one.kernels
    portions = [-(-size // portion) for size in sizes]
    by_torch = sum(portions) * each + len(portions) * (one.kernels - each)
    return by_torch, 2 * len(portions) + 1  # zeros, the sum; and all sums as one


def mask_bytes(length: int) -> tuple[int, int]:
    """Bytes (padded, packed) of a sliding window's attention mask in bfloat16, for one row."""
    position_1T = torch.empty(1, length, dtype=torch.int64, device="meta")
    bias = visibility_bias(position_1T, position_1T, 1024, torch.bfloat16)
    blocks = -(-length // BLOCK)
    return bias.nbytes, 2 * 4 * blocks * blocks  # indices of partial and of full blocks, int32


def listed_decode(
    rows: int, top: int = 33, event: Sequence[int] = (0, 1), steps: int = 50
) -> tuple[str, str]:
    """Cost (by SGLang, by the plugin) of a decode step's likeliest tokens, and of a stop event's.

    Each as text: kernels, copies, memory, and the CPU time with a vocabulary of 64, at which
    finding the likeliest tokens takes no time.
    """
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor  # pyright: ignore[reportMissingImports]

    logprobs_GV, ids_G = torch.randn(rows, 64).log_softmax(1), torch.zeros(rows).long()
    compute = OutputLogprobProcessor().compute_logprobs
    no_ids: list[Any] = [None] * rows
    with KernelCount() as sampled:
        compute(logprobs_GV, [0] * rows, no_ids, ids_G)

    def by_sglang() -> list[Any]:
        found = compute(logprobs_GV, [top] * rows, [list(event)] * rows, ids_G)
        names = ("top_logprobs_val", "top_logprobs_idx", "token_ids_logprobs_val")
        # As SGLang's _normalize_decode_outputs does.
        return [[tensor.tolist() for tensor in getattr(found, name)] for name in names]

    def by_plugin() -> list[Any]:
        step = ListedStep([Wanted(top, event)] * rows)
        step.take(logprobs_GV)
        return [step[g] for g in range(rows)]

    def described(step: Callable[[], list[Any]], others: int, copies: int) -> str:
        with KernelCount() as count:
            kept = step()
        began = time.process_time()
        for _ in range(steps):
            step()
        ms = 1e3 * (time.process_time() - began) / steps
        return (
            f"{count.kernels - others} kernels, {count.uploads} copies to the GPU, {copies} to "
            f"main memory; {ms:.1f} ms of a CPU; {_bytes_of(kept) / rows:.0f} bytes kept a token"
        )

    return described(by_sglang, sampled.kernels, 3 * rows), described(by_plugin, 0, 1)


def _bytes_of(value: Any) -> int:
    parts = value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(map(_bytes_of, parts))


def main() -> None:
    for shape in MODELS[:2]:
        sizes = served_sizes(shape)
        by_torch, by_kernel = digest_kernels(sizes)
        print(
            f"digests of {shape.name}, {len(sizes)} parameters: {by_torch} kernels by torch, "
            f"{by_kernel} by the kernel; {len(sizes)} waits one by one, 1 together"
        )
    padded, packed = mask_bytes(16_384)
    print(f"mask of a window, a row of 16384 tokens: {padded} bytes padded, {packed} packed")
    if find_spec("sglang") is not None:
        for who, described in zip(("SGLang", "the plugin"), listed_decode(256), strict=True):
            print(f"likeliest tokens of a decode step of 256 requests by {who}: {described}")


if __name__ == "__main__":
    main()
