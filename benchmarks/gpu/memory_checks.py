"""Check of the memory plan: measured peaks of a learner's passes against planned ones."""

from __future__ import annotations

from benchmarks.gpu.learner_checks import LOSS, new_learner
from benchmarks.gpu.measure import free_memory, held_bytes, peak_bytes
from benchmarks.gpu.setting import Numbers, Setting, named, require, rows_of
from distill.gpu import GIB, gpu_bytes
from learner.memory import LearnerMemory
from learner.pass_memory import ModelSize
from learner.plan import Part

# Of these the last recomputes its layers.
_SIZES = ("0.6B", "1.7B", "8B/3")


def planned_memory(setting: Setting) -> Numbers:
    """Planned and measured GiB of a pass, and of a whole worker, at three sizes."""
    made: Numbers = {}
    most = 1.15 if setting.cuda else 2.5  # a CPU's malloc keeps what it has once been given
    for shape in _SIZES:
        tokens, recomputes = setting.choose(4096, 8192), shape == _SIZES[-1]
        passes, total = _planned(setting, shape, tokens, recomputes)
        numbers = {"planned_gib": passes / GIB, "planned_total_gib": total / GIB}
        room = gpu_bytes()
        if room is None or total < room:  # else a smaller GPU
            peak, held = _measured(setting, shape, tokens, recomputes)
            free_memory(setting)
            numbers |= {"measured_gib": peak / GIB, "measured_total_gib": held / GIB}
            made |= named(numbers | {"ratio": peak / passes}, shape)
            require(0.3 < peak / passes < most, f"the plan of {shape} is off: {made}")
        else:
            made |= named(numbers, shape)
    return made


def _planned(setting: Setting, shape: str, tokens: int, recomputes: bool) -> tuple[int, int]:
    """Planned bytes of a pass with this number of tokens, and of the worker including it."""
    size = ModelSize.of(setting.model(shape))
    assert size is not None
    memory = LearnerMemory(model=size, dtype=setting.dtype, device=setting.device)
    of_passes = memory.passes
    assert of_passes is not None
    passes = of_passes.bytes(tokens, checkpointing=recomputes)
    return passes, memory.outside_passes + passes


def _measured(setting: Setting, shape: str, tokens: int, recomputes: bool) -> tuple[int, int]:
    """Measured bytes: the peak without weights, moments and gradients, and with them."""
    length, config = setting.choose(512, 2048), setting.config(shape)
    learner = new_learner(
        setting, setting.dtype, shape, token_budget=tokens, gradient_checkpointing=recomputes
    )
    learner.step(Part(rows_D=rows_of(config, count=1, length=64, seed=4), loss=LOSS))
    learner.zero_grad()
    held = held_bytes(setting)
    rows_D = rows_of(config, count=tokens // length, length=length, seed=5)
    peak = peak_bytes(setting, lambda: learner.forward_backward(Part(rows_D=rows_D, loss=LOSS)))
    gradients = sum(4 * p.numel() for p in learner.model.parameters())
    return peak - gradients, held + peak
