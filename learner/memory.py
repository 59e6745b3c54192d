"""Memory estimate of a learner before its model is loaded, to raise an error before an OOM kill.

Weights, gradients and moments are computed from the checkpoint's headers (`estimate_memory`),
passes from its config (`learner.pass_memory`). `learner.memory_plan` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from distill.errors import CheckpointError, ConfigError
from distill.gpu import CONTEXT_BYTES, gpu_bytes, headroom, parameter_count, part_bytes, readable
from distill.main_memory import free_main_memory, require_main_memory
from distill.models.loading import (
    load_config,
    meta_causal_lm,
    tensor_layouts,
    tensor_shapes,
    vocab_size,
    weight_files,
)
from distill.weights.model_weights import BUCKET_BYTES, plan_buckets
from distill.weights.shared_memory import block_bytes


class BytesPerParameter(NamedTuple):
    """Bytes held per parameter, without activations, which depend on token_budget."""

    what: str
    weights: int
    gradients: int = 0
    moments: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        return self.weights + self.gradients + self.moments


TRAINED = BytesPerParameter("weights, gradients and AdamW in fp32", 4, 4, 8)
TRAINED_AND_TEACHER = BytesPerParameter(
    "weights, a lagged or EMA teacher, gradients and AdamW in fp32", 8, 4, 8
)
# The base of an adapter. The adapter itself is small, and is neglected.
FROZEN = BytesPerParameter("frozen weights in fp32", 4)


def holding_of(*, adapter: bool, followed: bool) -> BytesPerParameter:
    """Bytes per parameter of a learner.

    `followed`: it also holds an EMA or lagged teacher (`learner.own_teacher`).
    """
    if adapter:
        return FROZEN
    return TRAINED_AND_TEACHER if followed else TRAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory estimate for a model in the learner."""

    parameters: int
    holding: BytesPerParameter

    @property
    def bytes(self) -> int:
        return self.parameters * self.holding.bytes_per_parameter

    def __str__(self) -> str:
        return f"{parameter_count(self.parameters)}, {readable(self.bytes)} for {self.holding.what}"


def estimate_memory(model: str, holding: BytesPerParameter = TRAINED) -> MemoryEstimate | None:
    """Estimate from the shapes of the model's tensors; None if they are unknown."""
    shapes = known_shapes(model)
    if shapes is None:
        return None
    return MemoryEstimate(parameters=sum(map(prod, shapes.values())), holding=holding)


def frozen_in(dtype: torch.dtype) -> BytesPerParameter:
    """Bytes per parameter of a model that is not trained (`learner.frozen`)."""
    return BytesPerParameter(f"a frozen model's weights in {dtype}", dtype.itemsize)


def frozen_bytes(models: Iterable[str], dtype: str) -> int | None:
    """Bytes of the weights of models that are not trained; None if a size is unknown."""
    holding = frozen_in(getattr(torch, dtype))
    estimates = [estimate_memory(model, holding) for model in models]
    known = [estimate.bytes for estimate in estimates if estimate is not None]
    return sum(known) if len(known) == len(estimates) else None


def head_bytes(model: str, dtype: str) -> int:
    """Bytes of a teacher's head in a worker (`learner.frozen.TeacherHead`).

    It is held in the dtype of its checkpoint, and in the `dtype` of its states if that differs.
    """
    config = load_config(model)
    text = config.get_text_config()
    held = {text.dtype or config.dtype or torch.float32, getattr(torch, dtype)}
    return vocab_size(config) * text.hidden_size * sum(each.itemsize for each in held)


def known_shapes(model: str) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the model's tensors by name, from the headers of its safetensors files.

    If the model is on the hub and its files are not on this machine, the shapes come from its
    config. None if neither is available.
    """
    if weight_files(model):
        return tensor_shapes(model)
    return None if Path(model).exists() else _shapes_by_config(model)


@lru_cache
def _shapes_by_config(name: str) -> dict[str, tuple[int, ...]] | None:
    try:
        tensors = meta_causal_lm(name).named_parameters()
    except CheckpointError:  # the hub is unreachable, or the model is not a causal language model
        return None
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def largest_bucket(model: str, dtype: torch.dtype) -> int:
    """Bytes of the largest bucket of a push in this dtype.

    A full bucket if the checkpoint has no files on this machine.
    """
    if not weight_files(model):
        return BUCKET_BYTES
    layouts = [layout.rounded_to(dtype) for layout in tensor_layouts(model).values()]
    return max(map(block_bytes, plan_buckets(layouts)))


def check_fits(
    model: str, device: str, holding: BytesPerParameter = TRAINED, share: float = 1.0,
    room: int | None = None,
) -> None:  # fmt: skip
    """Raise ConfigError if a share of the learner's `model` exceeds the memory of `device`.

    Args:
        room: bytes that the share may fill; None: the free memory.
    """
    estimate = estimate_memory(model, holding)
    if estimate is None:
        return
    free, needed = room_bytes(device) if room is None else room, int(estimate.bytes * share)
    if needed > free:
        raise ConfigError(
            f"{model} in the learner needs {readable(needed)} here ({estimate}) and {device} "
            f"has {readable(free)} free; a model of up to "
            f"{free / share / holding.bytes_per_parameter / 1e6:.0f} M parameters fits, less its "
            "activations. Use a smaller model, an adapter (lora.rank), learner.workers on several "
            "GPUs or machines, or more memory"
        )


def check_offload_fits(
    model: str, holding: BytesPerParameter, workers: int, workers_here: int
) -> None:
    """Raise ConfigError if main memory is too small for the moments of this host's workers.

    `workers`: number of workers that share a replica.
    """
    if (estimate := estimate_memory(model)) is not None:
        moments = holding.moments * estimate.parameters * workers_here // workers
        require_main_memory(moments, f"offload_optimizer=True with {workers_here} workers here")


def room_bytes(device: str, share: float = 1.0, reserved: int = 0) -> int:
    """Memory in bytes that a learner may fill: the free memory of the device.

    On a shared GPU: the planned `share` of its memory, less the `reserved` bytes of other
    processes. The memory that these processes hold at the moment is ignored, because servers fill
    their part after the learner starts. Memory that this process already holds, such as frozen
    models, is never free.
    """
    if not device.startswith("cuda"):
        return free_bytes(device)
    total = gpu_bytes() if reserved or share < 1 else None
    if total is not None:
        part = part_bytes(total, share, reserved) - CONTEXT_BYTES
        return max(0, part - torch.cuda.memory_allocated(device))
    return max(0, free_bytes(device) - headroom(torch.cuda.mem_get_info(device)[1]))


def free_bytes(device: str) -> int:
    """Free memory in bytes: of the GPU, or of the machine within its container's limit."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # blocks that this process has freed
        return torch.cuda.mem_get_info(device)[0]
    return free_main_memory()
