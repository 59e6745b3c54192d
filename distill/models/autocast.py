"""Autocast for the grouped products of a mixture's experts, which torch leaves out of its list.

Without it a mixture on one GPU computes its experts in float32: on an H100 a layer's products take
6.5 ms in place of 0.4 (docs/gpu-results.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def cast_grouped_products(device: str) -> None:
    """Let autocast on the device cast the factors of `torch.nn.functional.grouped_mm`, too.

    Changes nothing outside autocast, and nothing where torch itself casts them.
    """
    key = f"Autocast{device.upper()}"
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", key):
        return
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def grouped_mm(left: Tensor, right: Tensor, *others: Any, **named: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(below):
            return torch.ops.aten._grouped_mm.default(
                left.to(dtype), right.to(dtype), *others, **named
            )

    _REGISTERED.impl("_grouped_mm", grouped_mm, key)


# Registrations end with the object that holds them.
_REGISTERED = torch.library.Library("aten", "IMPL")
