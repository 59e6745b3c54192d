"""Peak memory and time of the vocabulary projection in training, naive and ours.

The naive way computes all logits together; ours is `VocabularyHead.token_stats`. Each measurement
is a process of its own with one thread, so that one peak does not hide another. Memory is the
increase of the peak (VmHWM) over the resident set before the call, which includes model and inputs.
Time is CPU time, so that other load on the machine does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from distill.models.loading import new_qwen3
from distill.models.logprobs import TokenStats, token_stats
from distill.models.vocabulary_head import VocabularyHead
from distill.objective.divergences import kl

Way = Literal["naive", "ours"]

VOCAB, POSITIONS, HIDDEN = 151_936, 4096, (64, 128)
# For each loss, one more than the number of logits-sized tensors that the naive way holds at once.
LOSSES = {"log-probs": 4, "log-probs + entropy": 6, "log-probs + reverse KL": 6}
REPEATS = 3
_DEADLINE_S = 1800.0
_ENTROPY_COEF = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Work of a child process."""

    loss: str
    way: Way
    positions: int
    hidden: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Peak extra MB and CPU seconds of forward and backward, for a loss and a size.

    The smallest of several measurements, except for our MB, whose largest counts. `gap` is the
    largest relative difference from the naive way among the loss and the norms of both gradients.
    """

    loss: str
    positions: int
    hidden: int
    naive_mb: float
    ours_mb: float
    naive_s: float
    ours_s: float
    gap: float


def measure_memory(temperature: float, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """`MemoryRow`s as dictionaries. Sizes too large for the naive way are halved."""
    return [
        asdict(_measure(loss, hidden, temperature, repeats)) for hidden in HIDDEN for loss in LOSSES
    ]


def _measure(loss: str, hidden: int, temperature: float, repeats: int) -> MemoryRow:
    positions = POSITIONS
    while LOSSES[loss] * positions * VOCAB * 4 > _available_bytes():
        positions //= 2
    found: dict[Way, list[dict[str, Any]]] = {"naive": [], "ours": []}
    for _ in range(repeats):  # alternately, so that other load affects both
        for way, results in found.items():
            case = Case(
                loss=loss, way=way, positions=positions, hidden=hidden, temperature=temperature
            )
            results.append(_in_child(case))

    def least(way: Way, name: str) -> float:
        return min(result[name] for result in found[way])

    naive, ours = found["naive"][0]["values"], found["ours"][0]["values"]
    return MemoryRow(
        loss=loss,
        positions=positions,
        hidden=hidden,
        naive_mb=least("naive", "mb"),
        ours_mb=max(result["mb"] for result in found["ours"]),
        naive_s=least("naive", "seconds"),
        ours_s=least("ours", "seconds"),
        gap=max(abs(a - b) / abs(a) for a, b in zip(naive, ours, strict=True)),
    )


def _available_bytes() -> int:
    return kilobytes("/proc/meminfo", "MemAvailable") * 1024


def kilobytes(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _in_child(case: Case) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(asdict(case))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, timeout=_DEADLINE_S, stdout=subprocess.PIPE, env=environment
    )
    return json.loads(done.stdout)


class _World:
    """Student and teacher projections over random hidden states."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.student, self.teacher = (_head(case.hidden, seed) for seed in (0, 1))
        generator = torch.Generator().manual_seed(0)
        shape = (case.positions, case.hidden)
        # Logits of such a head then spread over a few nats, as a trained one's do.
        self.hidden_NH = 10 * torch.randn(shape, generator=generator)
        self.teacher_hidden_NH = 10 * torch.randn(shape, generator=generator)
        self.hidden_NH.requires_grad_()
        self.tokens_N = torch.randint(VOCAB, (case.positions,), generator=generator)
        self.temperature_N = torch.full((case.positions,), case.temperature)

    def loss(self, positions: int) -> Tensor:
        """Loss over the first positions, with all terms of the case."""
        first = slice(0, positions)
        hidden_NH, tokens_N = self.hidden_NH[first], self.tokens_N[first]
        temperature_N = self.temperature_N[first]
        with_kl = self.case.loss.endswith("KL")
        with_entropy = self.case.loss.endswith("entropy")
        if self.case.way == "ours":
            stats = self.student.token_stats(
                hidden_NH, tokens_N, temperature_N,
                divergence_of=self._kl if with_kl else None, entropy_gradient=with_entropy,
            )  # fmt: skip
        else:
            log_p_NV = self.student.log_distribution(hidden_NH, temperature_N)
            stats = _naive_stats(log_p_NV, tokens_N, with_entropy)
            if with_kl:
                stats = stats._replace(divergence_N=self._kl(log_p_NV, first))
        loss = -stats.logprobs_N.mean()
        if with_entropy:
            loss = loss - _ENTROPY_COEF * stats.entropy_N.mean()
        if stats.divergence_N is not None:
            loss = loss + stats.divergence_N.mean()
        return loss

    def _kl(self, log_p_NV: Tensor, positions: slice) -> Tensor:
        with torch.no_grad():
            log_q_NV = self.teacher.log_distribution(
                self.teacher_hidden_NH[positions], self.temperature_N[positions]
            )
        return kl(log_p_NV, log_q_NV)


def _naive_stats(log_p_NV: Tensor, tokens_N: Tensor, with_entropy: bool) -> TokenStats:
    """Naive statistics, without the entropy, which ours always reports."""
    if with_entropy:
        return token_stats(log_p_NV, tokens_N, entropy_gradient=True)
    chosen_N = log_p_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return TokenStats(chosen_N, torch.zeros_like(chosen_N))


def _head(hidden: int, seed: int) -> VocabularyHead:
    model = new_qwen3(
        vocab_size=VOCAB, hidden_size=hidden, layers=1, heads=2, context_length=64,
        eos_token_id=1, pad_token_id=0, seed=seed,
    )  # fmt: skip
    return VocabularyHead.of(model)


def _child(case: Case) -> dict[str, Any]:
    """Peak extra MB, CPU seconds, and values: the loss and both gradients' norms."""
    torch.set_num_threads(1)
    world = _World(case)
    weight: Tensor = getattr(world.student.projection, "weight")  # noqa: B009
    world.loss(2).backward()  # kernels and threads
    world.hidden_NH.grad = weight.grad = None
    before = kilobytes("/proc/self/status", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = time.process_time()
    loss = world.loss(case.positions)
    loss.backward()
    seconds = time.process_time() - start
    peak = kilobytes("/proc/self/status", "VmHWM")
    assert world.hidden_NH.grad is not None and weight.grad is not None
    values = [loss.item(), world.hidden_NH.grad.norm().item(), weight.grad.norm().item()]
    return {"mb": (peak - before) * 1024 / 1e6, "seconds": seconds, "values": values}


def memory_table(rows: list[dict[str, Any]]) -> Table:
    """Console table of `measure_memory`."""
    table = Table(title=f"vocabulary projection, V = {VOCAB:,}, fp32, forward and backward, CPU")
    for header in ("loss", "N", "H", "naive MB", "ours MB", "ratio", "naive s", "ours s", "ratio",
                   "gap"):  # fmt: skip
        table.add_column(header, justify="left" if header == "loss" else "right")
    for row in rows:
        table.add_row(
            row["loss"], str(row["positions"]), str(row["hidden"]),
            f"{row['naive_mb']:.0f}", f"{row['ours_mb']:.0f}",
            f"{row['ours_mb'] / row['naive_mb']:.3f}",
            f"{row['naive_s']:.2f}", f"{row['ours_s']:.2f}",
            f"{row['ours_s'] / row['naive_s']:.2f}", f"{row['gap']:.0e}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    print(json.dumps(_child(Case(**json.loads(sys.argv[1])))))
