"""Main memory that SGLang pins for CUDA, allocated unpinned on its CPU engine.

SGLang 0.5.23 pins what it records of routed experts (mem_cache/pool_host/common.py,
ALLOC_MEMORY_FUNCS) and the batch's order of LoRA adapters (lora/layers.py, lora/backend) on a CPU,
too, where that fails. There is nothing to pin for.
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

# SGLang's own switch of its CPU engine.
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def pin_nothing() -> None:
    """Has SGLang's CPU engine allocate what it would pin as it is; elsewhere nothing changes."""
    if os.environ.get(CPU_ENGINE) != "1":
        return
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    try:
        from sglang.srt.mem_cache.pool_host import common
    except ImportError:  # another release: a server that is to record says so when it starts
        return
    cast("dict[str, Any]", common.ALLOC_MEMORY_FUNCS)["cpu"] = _unpinned


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*args, **options)

    return made


def _unpinned(dims: tuple[int, ...], dtype: torch.dtype, **_options: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype)
