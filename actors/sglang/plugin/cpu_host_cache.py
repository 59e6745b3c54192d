"""Recording of routed experts on SGLang's CPU engine.

SGLang 0.5.23 keeps them in main memory that it pins for CUDA, on a CPU, too
(mem_cache/pool_host/common.py, ALLOC_MEMORY_FUNCS), where that fails. There is nothing to pin for.
"""

# SGLang is an extra: types are checked without it, too.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor

# SGLang's own switch of its CPU engine.
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def pin_nothing() -> None:
    """Has SGLang's CPU engine allocate what it would pin as it is; elsewhere nothing changes."""
    if os.environ.get(CPU_ENGINE) != "1":
        return
    try:
        from sglang.srt.mem_cache.pool_host import common
    except ImportError:  # another release: a server that is to record says so when it starts
        return
    cast("dict[str, Any]", common.ALLOC_MEMORY_FUNCS)["cpu"] = _unpinned


def _unpinned(dims: tuple[int, ...], dtype: torch.dtype, **_options: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype)
