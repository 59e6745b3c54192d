"""Checks of attention: packed rows by flex attention, and precisions of keys and values."""

from __future__ import annotations

import time
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.learner_checks import LOSS, new_learner
from benchmarks.gpu.measure import free_memory, seconds
from benchmarks.gpu.setting import Numbers, Setting, require, rows_of
from distill.models import flex_attention
from distill.models.shared_prefix import SharedPrefixModel
from distill.objective.batching import TrainingRow
from learner.config import Precision
from learner.plan import Part
from tests.flex_twin import dense_flex

# How far packed rows may be from padded ones in float32, of the gradient's norm and of the loss.
_SHARE = 1e-3


def packed_attention(setting: Setting) -> Numbers:
    """Loss, gradient norm and seconds of packed rows by flex attention, and of padded rows.

    In float32 both give the same numbers. In bfloat16 each rounds differently; the check reports
    how far each is from float32.
    """
    config = setting.config("1.1B")
    made: Numbers = {}
    if setting.cuda:
        started = time.perf_counter()
        heads, dtype = flex_attention.Heads.of(config), getattr(torch, setting.dtype)
        serves = flex_attention.flex_serves(heads, dtype, torch.device(setting.device))
        require(serves, "flex attention does not compile here, or is off: see the log")
        made["compile_seconds"] = time.perf_counter() - started
    lengths = (40, 3, 130, 300) if setting.size == "tiny" else (4000, 60, 900, 2500, 300, 8000)
    rows_D = [rows_of(config, count=1, length=n, seed=n)[0] for n in lengths]
    packed, padded = (_packed_step(setting, "float32", rows_D, flex=flex) for flex in (True, False))
    made |= {"norm_ratio": packed["norm"] / padded["norm"]}
    made |= {"loss_gap": abs(packed["loss"] - padded["loss"])}
    require(
        abs(packed["norm"] / padded["norm"] - 1) < _SHARE, f"the gradient's norm is off: {made}"
    )
    allowed = _SHARE * (1 + abs(padded["loss"]))
    require(abs(packed["loss"] - padded["loss"]) < allowed, f"the loss is off: {made}")
    for name, flex in (("packed", True), ("padded", False)):
        found = _packed_step(setting, setting.dtype, rows_D, flex=flex)
        made[f"{name}_seconds"] = found["seconds"]
        made[f"{name}_norm_to_float32"] = found["norm"] / padded["norm"]
    return made


def _packed_step(
    setting: Setting, dtype: Precision, rows_D: list[TrainingRow], *, flex: bool
) -> dict[str, float]:
    """Loss, gradient norm and seconds of a pass, the second of its kind."""
    with ExitStack() as patches:
        chosen = patch.object(SharedPrefixModel, "_attends_by_flex", lambda _: flex)
        patches.enter_context(chosen)
        if not setting.cuda:  # where torch's kernel has no backward pass
            patches.enter_context(patch.object(flex_attention, "flex_attention", dense_flex))
        learner = new_learner(setting, dtype, packing=True)
        learner.forward_backward(Part(rows_D=rows_D, loss=LOSS))  # compiles
        learner.zero_grad()
        started = time.perf_counter()
        metrics = learner.forward_backward(Part(rows_D=rows_D, loss=LOSS))
        gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm().item()
    free_memory(setting)
    return {
        "loss": metrics["train/loss"], "norm": norm, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def attention_precisions(setting: Setting) -> Numbers:
    """Milliseconds of a layer's attention with the heads of an 8B model, forward and backward."""
    length, groups = setting.choose(64, 8192), 4
    heads = setting.choose(4, 32)
    made: Numbers = {}
    for dtype in (torch.bfloat16, torch.float32):
        queries, keys, values = (
            torch.randn(1, n, length, 128, device=setting.device, dtype=dtype, requires_grad=True)
            for n in (heads, heads // groups, heads // groups)
        )

        def grouped(q=queries, k=keys, v=values) -> None:
            scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

        def repeated(q=queries, k=keys, v=values) -> None:
            k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
            scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        name = str(dtype).removeprefix("torch.")
        made[f"{name}_ms"] = 1e3 * seconds(setting, grouped)
        made[f"{name}_repeated_ms"] = 1e3 * seconds(setting, repeated)
    return made
