"""Checks of the learner: numbers against slow reference computations, and speed."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.measure import free_memory, peak_bytes
from benchmarks.gpu.setting import TEMPERATURE, Numbers, Setting, require, rows_of
from benchmarks.peak import peak_flops
from distill.gpu import GIB
from distill.handshake.comparison import MEAN_SHARE, tolerance_at
from distill.models.loading import load_config
from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.config import LearnerConfig, Precision
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.teachers import LocalTeachers
from tests.enumeration import ESTIMATORS, World, error

LOSS = PolicyObjectiveLoss(objective=ObjectiveConfig())
_WARM_UP, _STEPS = 2, 3
# Least model FLOPs utilisation that a step has to reach.
_LEAST_MFU = 0.15


def new_learner(
    setting: Setting, dtype: Precision, shape: str = "1.1B", **settings: object
) -> Learner:
    config = LearnerConfig.of(
        model=setting.model(shape), total_steps=100, device=setting.device, dtype=dtype, **settings
    )
    return Learner(config, setting.scratch)


def _mean_allowed(dtype: Precision) -> float:
    return tolerance_at(dtype, TEMPERATURE) * MEAN_SHARE


def bfloat16_step(setting: Setting) -> Numbers:
    """Log-probs and loss of a bfloat16 step with float32 weights, against a float32 step."""
    rows_D = rows_of(load_config(setting.model()), count=4, length=setting.choose(64, 512), seed=0)
    found = {}
    for dtype in ("float32", "bfloat16"):
        learner = new_learner(setting, dtype)
        before = np.concatenate(learner.logprobs(rows_D))
        metrics = learner.step(Part(rows_D=rows_D, loss=LOSS))
        after = np.concatenate(learner.logprobs(rows_D))
        require(not np.array_equal(before, after), f"a step in {dtype} changed nothing")
        found[dtype] = before, metrics
        del learner
        free_memory(setting)
    gap_N = np.abs(found["bfloat16"][0] - found["float32"][0])
    norm, truth = (found[dtype][1]["train/grad_norm"] for dtype in ("bfloat16", "float32"))
    made = {"mean_gap": float(gap_N.mean()), "grad_norm_ratio": norm / truth}
    require(gap_N.mean() < _mean_allowed("bfloat16"), f"log-probs are off: {made}")
    require(0.8 < norm / truth < 1.25, f"the gradient's norm is off: {made}")
    return made


def full_divergence(setting: Setting) -> Numbers:
    """Reverse KL of whole distributions (estimator=full), against direct calls of both models."""
    student, teacher = setting.pair()
    rows_D = rows_of(load_config(student), count=4, length=64, seed=1, teacher_coef=1.0)
    teachers = LocalTeachers({"": teacher}, dtype=torch.float32, device=setting.device)
    loss = PolicyObjectiveLoss(objective=ObjectiveConfig(estimator="full"), teachers=teachers)
    config = LearnerConfig.of(model=student, total_steps=9, device=setting.device)
    metrics = Learner(config, setting.scratch).step(Part(rows_D=rows_D, loss=loss))
    truth = _plain_reverse_kl(student, teacher, rows_D, setting.device)
    gap = abs(metrics["opd/divergence"] - truth) / truth
    require(gap < 1e-3, f"{metrics['opd/divergence']:.5f} nats, and plain calls give {truth:.5f}")
    return {"nats": truth, "relative_gap": gap}


@torch.no_grad()
def _plain_reverse_kl(student: str, teacher: str, rows_D: list[TrainingRow], device: str) -> float:
    models = [_plain_model(path, "float32").to(device).eval() for path in (student, teacher)]
    total, count = 0.0, 0
    for row in rows_D:
        ids_1T = torch.from_numpy(row.tokens_T.astype(np.int64))[None].to(device)
        trained = torch.from_numpy(row.loss_mask_T[1:])
        log_p_NV, log_q_NV = (
            torch.log_softmax(model(input_ids=ids_1T).logits[0, :-1][trained] / TEMPERATURE, -1)
            for model in models
        )
        total += float((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum())
        count += int(trained.sum())
    return total / count


def long_attention(setting: Setting) -> Numbers:
    """Log-probs of a row of 8192 tokens against transformers' attention; memory by length."""
    length = setting.choose(512, 8192)
    config = load_config(setting.model())
    [row] = rows_of(config, count=1, length=length, seed=2)
    learner = new_learner(setting, setting.dtype)
    started = time.perf_counter()
    ours_N = learner.logprobs([row])[0]
    seconds = time.perf_counter() - started
    del learner
    free_memory(setting)
    theirs_N = _plain_logprobs(setting, row, setting.dtype)
    gap = float(np.abs(ours_N - theirs_N).mean())
    made: Numbers = {"tokens": float(length), "seconds": seconds, "mean_gap": gap}
    if setting.dtype != "float32":  # to see which of the two is further from float32
        truth_N = _plain_logprobs(setting, row, "float32")
        for name, found_N in (("our", ours_N), ("their", theirs_N)):
            made[f"{name}_mean_gap_to_float32"] = float(np.abs(found_N - truth_N).mean())
    require(gap < _mean_allowed(setting.dtype), f"log-probs are off: {made}")
    if setting.cuda:
        shorter, longer = (_step_peak(setting, tokens) for tokens in (length // 2, length))
        made |= {"peak_gib": longer / GIB, "peak_ratio": longer / shorter}
        require(longer < 3 * shorter, f"memory grows with the square of the length: {made}")
    return made


def _plain_model(path: str, precision: Precision) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, precision))


@torch.no_grad()
def _plain_logprobs(setting: Setting, row: TrainingRow, precision: Precision) -> np.ndarray:
    model = _plain_model(setting.model(), precision).to(setting.device)
    ids_1T = torch.from_numpy(row.tokens_T.astype(np.int64))[None].to(setting.device)
    trained = torch.from_numpy(row.loss_mask_T[1:]).to(setting.device)
    logits_NV = model.eval()(input_ids=ids_1T).logits[0, :-1][trained].float() / TEMPERATURE
    chosen_N = logits_NV.gather(1, ids_1T[0, 1:][trained][:, None])[:, 0]
    return (chosen_N - logits_NV.logsumexp(1)).cpu().numpy()


def _step_peak(setting: Setting, length: int) -> int:
    """Bytes that a step on one row takes in addition to weights, moments and gradients."""
    learner = new_learner(setting, "bfloat16", gradient_checkpointing=True)
    rows_D = rows_of(load_config(setting.model()), count=1, length=length, seed=3)
    learner.step(Part(rows_D=rows_D, loss=LOSS))
    learner.zero_grad()
    peak = peak_bytes(setting, lambda: learner.step(Part(rows_D=rows_D, loss=LOSS)))
    return peak - sum(4 * p.numel() for p in learner.model.parameters())


def gradient_truth(setting: Setting) -> Numbers:
    """Mean gradient of each estimator on the device, against the exact one by enumeration."""
    directory = Path(setting.scratch) / "enumeration"
    directory.mkdir(exist_ok=True)
    world = World(directory, device=setting.device)
    errors = {
        name: error(
            world.expected_gradient(estimator.objective, TEMPERATURE),
            world.claimed_gradient(estimator, TEMPERATURE),
        )
        for name, estimator in ESTIMATORS.items()
    }
    worst = max(errors, key=errors.__getitem__)
    require(errors[worst] < 1e-4, f"{worst} is off by {errors[worst]:.1e} of its gradient")
    return {"estimators": float(len(errors)), "largest_error": errors[worst]}


def utilisation(setting: Setting) -> Numbers:
    """Model FLOPs of a step as a share of what a large matrix product reaches here."""
    learner = new_learner(setting, setting.dtype)
    count, length = setting.choose(8, 16), setting.choose(128, 2048)
    config = load_config(setting.model())
    speeds = []
    for seed in range(_WARM_UP + _STEPS):
        rows_D = rows_of(config, count=count, length=length, seed=seed)
        metrics = learner.step(Part(rows_D=rows_D, loss=LOSS))
        speeds.append(metrics["train/tflops_per_s"])
    speed = median(speeds[_WARM_UP:])
    peak = peak_flops(setting.device, getattr(torch, setting.dtype)) / 1e12
    made = {"tflops_per_s": speed, "peak_tflops_per_s": peak, "mfu": speed / peak}
    require(speed > 0, f"nothing was computed: {made}")
    require(not setting.cuda or speed / peak > _LEAST_MFU, f"slow for this GPU: {made}")
    return made
