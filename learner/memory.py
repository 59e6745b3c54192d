"""What a learner's model takes, before it is loaded: too large is said at once, not by a kill."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from distill.errors import ConfigError
from distill.models import tensor_shapes


class Holding(NamedTuple):
    """What is held of each parameter; activations come on top and follow token_budget."""

    bytes_per_parameter: int
    what: str


TRAINED = Holding(4 + 4 + 8, "weights, gradients and AdamW in fp32")
# The base of an adapter, which is small beside it.
FROZEN = Holding(4, "frozen weights in fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Of a model that the learner holds."""

    parameters: int
    holding: Holding

    @property
    def bytes(self) -> int:
        return self.parameters * self.holding.bytes_per_parameter

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters, {readable(self.bytes)} for "
            f"{self.holding.what}"
        )


def estimate_memory(model: str, holding: Holding = TRAINED) -> MemoryEstimate | None:
    """From the headers of a local checkpoint's safetensors files; None where there are none."""
    if not list(Path(model).glob("*.safetensors")):
        return None
    parameters = sum(map(prod, tensor_shapes(model).values()))
    return MemoryEstimate(parameters=parameters, holding=holding)


def check_fits(model: str, device: str, holding: Holding = TRAINED, share: float = 1.0) -> None:
    """Raises ConfigError if a share of the learner's `model` exceeds what is free on `device`."""
    estimate = estimate_memory(model, holding)
    if estimate is None:
        return
    free, needed = free_bytes(device), int(estimate.bytes * share)
    if needed > free:
        raise ConfigError(
            f"{model} in the learner needs {readable(needed)} here ({estimate}) and {device} "
            f"has {readable(free)} free; a model of up to "
            f"{free / share / holding.bytes_per_parameter / 1e6:.0f} M parameters fits, less its "
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
