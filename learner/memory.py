"""What a learner's model takes, before it is loaded: too large is said at once, not by a kill."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil
import torch

from distill.errors import ConfigError
from distill.models import tensor_shapes

# Bytes a parameter: fp32 weight and gradient, AdamW's two fp32 moments.
BYTES_PER_PARAMETER = 4 + 4 + 8
BYTES_PER_FROZEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Of weights, gradients and optimizer; activations come on top and follow token_budget."""

    parameters: int
    frozen: bool

    @property
    def bytes_per_parameter(self) -> int:
        return BYTES_PER_FROZEN if self.frozen else BYTES_PER_PARAMETER

    @property
    def bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter

    def __str__(self) -> str:
        what = "frozen weights" if self.frozen else "weights, gradients and AdamW"
        return (
            f"{self.parameters / 1e6:.1f} M parameters, {readable(self.bytes)} for {what} in fp32"
        )


def estimate_memory(model: str, *, frozen: bool = False) -> MemoryEstimate | None:
    """From the headers of a local checkpoint's safetensors files; None where there are none.

    With `frozen`, the adapter is left out: it is small beside its base.
    """
    if not list(Path(model).glob("*.safetensors")):
        return None
    parameters = sum(map(prod, tensor_shapes(model).values()))
    return MemoryEstimate(parameters=parameters, frozen=frozen)


def check_fits(model: str, device: str, share: float = 1.0, *, frozen: bool = False) -> None:
    """Raises ConfigError if a share of the learner's `model` exceeds what is free on `device`."""
    estimate = estimate_memory(model, frozen=frozen)
    if estimate is None:
        return
    free, needed = free_bytes(device), int(estimate.bytes * share)
    if needed > free:
        raise ConfigError(
            f"the learner of {model} needs {readable(needed)} here ({estimate}) and {device} "
            f"has {readable(free)} free; a model of up to "
            f"{free / share / estimate.bytes_per_parameter / 1e6:.0f} M parameters fits, less its "
            "activations. Use a smaller model, an adapter (lora_rank), learner_workers on several "
            "GPUs or machines, or more memory"
        )


def free_bytes(device: str) -> int:
    """Memory that can be had now: of the GPU, or of the machine within its container's limit."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(free, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or its limit is the word "max"
        return free


def readable(size: int) -> str:
    """In MiB below one GiB, else in GiB."""
    return f"{size / (1 << 20):.3g} MiB" if size < 1 << 30 else f"{size / (1 << 30):.3g} GiB"
