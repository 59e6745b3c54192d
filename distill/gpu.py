"""A GPU's memory, queried without initialising CUDA, and formatted sizes of any memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

GIB = 1 << 30
# Size of one number.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Memory of a process on a GPU before it allocates any: CUDA's context, kernels, NCCL's buffers.
CONTEXT_BYTES = GIB
# Fraction of the memory reported by the driver that CUDA can allocate.
_USABLE = 0.98
# Upper limit of the memory that every plan leaves free on a GPU, for NCCL's buffers beyond the
# first group's (1 to 2 GiB with the groups of FSDP and of a push), fragments that the allocator
# cannot use, and workspaces of kernels. 4 GiB are a twentieth of a GPU of 80 GiB.
_MOST_HEADROOM = 4 * GIB
_TIMEOUT_S = 20.0


def gpu_bytes() -> int | None:
    """Usable bytes of this process's first GPU; None if no driver answers.

    Runs nvidia-smi: torch would open a CUDA context, which takes memory itself.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    command += [f"--id={first}"] if first else []
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout.splitlines()
        return int(float(listed[0]) * (1 << 20) * _USABLE)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def headroom(total: int) -> int:
    """Bytes of a GPU of `total` bytes that every plan leaves free.

    On a small GPU it is a sixteenth: models, and with them buffers and fragments, are smaller
    there, and a fixed 4 GiB would be a third of a GPU of 12 GiB.
    """
    return min(_MOST_HEADROOM, total // 16)


def part_bytes(total: int, share: float, reserved: int) -> int:
    """Bytes that the owner of a `share` of a GPU may use, minus the `reserved` bytes of others."""
    return int((total - headroom(total)) * share) - reserved


def no_gpu_here() -> bool:
    """True only if torch can find no GPU here: no device file exists, and no CUDA driver.

    Does not initialise CUDA, which must not happen before a fork.
    """
    devices = ("nvidia[0-9]*", "nvidiactl", "nvhost*", "nvmap", "dxg", "kfd")  # kfd is AMD's
    if any(found for name in devices for found in Path("/dev").glob(name)):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def visible_gpus() -> list[str]:
    """Ids, as numbered on this machine, of the GPUs visible to this process, in its order."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu.strip() for gpu in given.split(",") if gpu.strip()]
    import torch  # not at the top: checks of settings run without torch

    return [str(i) for i in range(torch.cuda.device_count())]


def gib(size: float) -> str:
    """Bytes in GiB, formatted with one decimal."""
    return f"{size / GIB:.1f}"


def parameter_count(count: int) -> str:
    """Number of parameters of a model, in millions from 0.1 million on."""
    return f"{count / 1e6:,.1f} M parameters" if count >= 1e5 else f"{count:,} parameters"


def readable(size: int) -> str:
    """Bytes, formatted with three digits: in MiB below one GiB, else in GiB."""
    amount, unit = (size / (1 << 20), "MiB") if size < GIB else (size / GIB, "GiB")
    return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
