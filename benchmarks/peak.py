"""FLOPs per second that this machine reaches; the reference of model FLOPs utilisation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

# Sides of the square matrices that the peak is measured with.
_SIDE = {"cpu": 1024, "cuda": 8192}
_REPEATS, _ENOUGH_S = 5, 1.0


def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matrix product, measured once per process.

    On a CPU: with the current number of threads, by their CPU time, so that other load does not
    count.
    """
    return _peak_flops(device, dtype, torch.get_num_threads())


@cache
def _peak_flops(device: str, dtype: torch.dtype, threads: int) -> float:
    del threads  # torch has as many; it is here as a part of the cache's key
    side = _SIDE[torch.device(device).type]
    generator = torch.Generator(device).manual_seed(0)
    # Random values: a GPU draws less power, and clocks higher, on constant ones.
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    # As a Linear has it: the second factor is transposed.
    fastest = min(_seconds(lambda: a @ b, device), _seconds(lambda: a @ b.T, device))
    return 2 * side**3 / fastest


def _seconds(run: Callable[[], object], device: str) -> float:
    """Median seconds of one product after warm-up.

    Fewer products are timed if each is slow, as bfloat16 is on a CPU without instructions for it.
    """
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    measured = []
    for _ in range(_REPEATS + 1):
        started = clock()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        measured.append(clock() - started)
        if len(measured) > 1 and sum(measured) > _ENOUGH_S:
            break
    return median(measured[1:]) / (1 if cuda else torch.get_num_threads())
