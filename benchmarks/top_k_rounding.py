"""`python -m benchmarks.top_k_rounding`: error and time of rounding the teacher's log-probs.

K = 64 tokens at each position, the student's likeliest, as float32 and in 16 bits: half precision,
and fixed point (steps of 1/2048 from 0 down to -32). For generated distributions over 32,768
tokens: the largest error of a log-prob and of a position's divergence (the tail sampled, or one
bucket), and the mean error; and the time of rounding and unrounding, against the copies that it
makes smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from distill.objective.divergences import coarse, divergence, top_of_reverse_kl, with_tail

POSITIONS, VOCABULARY, K = 1024, 32_768, 64
# Standard deviations of the teacher's logits, and of the student's beside them: flat to peaked.
SPREADS = ((3.0, 1.0), (8.0, 2.0), (14.0, 3.0))
STEPS_PER_NAT = 2048
ROUNDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float16": lambda log_q: log_q.half().float(),
    "fixed point": lambda log_q: -(log_q * -STEPS_PER_NAT).round().clamp(0, 65_535) / STEPS_PER_NAT,
}


class Errors(NamedTuple):
    """Errors in nats."""

    logprob: float
    sampled_tail: float
    sampled_tail_mean: float
    bucket: float
    bucket_mean: float


def errors(spread: float, apart: float) -> tuple[float, dict[str, Errors]]:
    """The student's entropy, and the errors of each rounding."""
    noise = torch.Generator().manual_seed(0)
    z_NV = spread * torch.randn(POSITIONS, VOCABULARY, generator=noise)
    moved_NV = z_NV + apart * torch.randn(POSITIONS, VOCABULARY, generator=noise)
    log_q_NV, log_p_NV = z_NV.log_softmax(1), moved_NV.log_softmax(1)
    ids_NK = log_p_NV.topk(K).indices
    log_q_NK = log_q_NV.gather(1, ids_NK)

    def divergences(log_q_NK: Tensor) -> tuple[Tensor, Tensor]:
        sides = coarse(log_p_NV, ids_NK), with_tail(log_q_NK)
        return top_of_reverse_kl(log_p_NV, ids_NK, log_q_NK), divergence(*sides, "reverse_kl", 0.5)

    exact = divergences(log_q_NK)
    found = {}
    for name, rounded in ROUNDED.items():
        sampled_N, bucket_N = (
            a - b for a, b in zip(divergences(rounded(log_q_NK)), exact, strict=True)
        )
        found[name] = Errors(
            logprob=float((rounded(log_q_NK) - log_q_NK).abs().max()),
            sampled_tail=float(sampled_N.abs().max()),
            sampled_tail_mean=float(sampled_N.mean()),
            bucket=float(bucket_N.abs().max()),
            bucket_mean=float(bucket_N.mean()),
        )
    return float(-(log_p_NV.exp() * log_p_NV).sum(1).mean()), found


def milliseconds() -> dict[str, float]:
    """CPU milliseconds for an answer of 8,192 tokens: copies, rounding and unrounding."""
    noise = np.random.default_rng(0)
    log_q_NK = np.log(noise.random((8192, K), np.float32) + np.float32(1e-4))
    half_NK = log_q_NK.astype(np.float16)

    def fixed() -> np.ndarray:
        steps_NK = log_q_NK * np.float32(-STEPS_PER_NAT)
        return np.rint(steps_NK, steps_NK).astype(np.uint16)

    fixed_NK = fixed()
    ways: dict[str, Callable[[], np.ndarray]] = {
        "a copy of float32": log_q_NK.copy,
        "a copy of 16 bits": half_NK.copy,
        "to float16": lambda: log_q_NK.astype(np.float16),
        "and back": lambda: half_NK.astype(np.float32),
        "to fixed point": fixed,
        "and back ": lambda: fixed_NK * np.float32(-1 / STEPS_PER_NAT),
    }
    return {name: min(_seconds(way) for _ in range(30)) * 1e3 for name, way in ways.items()}


def _seconds(way: Callable[[], np.ndarray]) -> float:
    started = time.process_time()
    way()
    return time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    table = Table(title=f"errors of {K} rounded log-probs at each of {POSITIONS} positions, nats")
    names = ("student's entropy", "way", "a log-prob, most", "KL, sampled tail: most", "mean")
    for name in (*names, "KL, bucket: most", "mean"):
        table.add_column(name, justify="right")
    for spread, apart in SPREADS:
        entropy, ways = errors(spread, apart)
        for name, made in ways.items():
            table.add_row(f"{entropy:.2f}", name, *(f"{value:.6f}" for value in made))
    console = Console(width=140)
    console.print(table)
    for name, taken in milliseconds().items():
        console.print(f"{name:20s} {taken:.2f} ms")


if __name__ == "__main__":
    main()
