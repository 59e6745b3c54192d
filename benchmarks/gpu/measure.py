"""Seconds and bytes of calls on the device under test."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.memory import kilobytes


def wait(setting: Setting) -> None:
    """Wait until the device has finished all queued work."""
    if setting.cuda:
        torch.cuda.synchronize()


def seconds(setting: Setting, run: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a call, after a warm-up call."""
    measured = []
    for _ in range(repeats + 1):
        wait(setting)
        started = time.perf_counter()
        run()
        wait(setting)
        measured.append(time.perf_counter() - started)
    return median(measured[1:])


def peak_bytes(setting: Setting, run: Callable[[], object]) -> int:
    """Peak bytes of a call, in addition to those held before it.

    On a CPU they are of the resident set, which malloc does not always give back.
    """
    if setting.cuda:
        wait(setting)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        wait(setting)
        return torch.cuda.max_memory_allocated() - before
    before = kilobytes("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    run()
    return (kilobytes("/proc/self/status", "VmHWM") - before) * 1024


def held_bytes(setting: Setting) -> int:
    """Bytes of this process's tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if setting.cuda else 0


def free_memory(setting: Setting) -> None:
    """Free unreferenced memory before the next of several models."""
    gc.collect()
    if setting.cuda:
        torch.cuda.empty_cache()
