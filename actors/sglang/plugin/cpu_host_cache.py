"""Patch that makes SGLang's CPU engine allocate unpinned main memory instead of pinned memory.

SGLang 0.5.23 pins the memory of recorded routed experts (mem_cache/pool_host/common.py,
ALLOC_MEMORY_FUNCS) and of the order of LoRA adapters in a batch (lora/layers.py, lora/backend) on a
CPU as well. Without CUDA, pinning fails and has no use.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

# SGLang's variable that selects its CPU engine.
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def pin_nothing() -> None:
    """Make SGLang's CPU engine allocate unpinned memory. Without the CPU engine, do nothing."""
    if os.environ.get(CPU_ENGINE) != "1":
        return
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    from sglang.srt.mem_cache.pool_host import common

    cast("dict[str, Any]", common.ALLOC_MEMORY_FUNCS)["cpu"] = _unpinned


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    return made


def _unpinned(dims: tuple[int, ...], dtype: torch.dtype, **_options: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype)
