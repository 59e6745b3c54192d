"""`python -m benchmarks.lora_rounding DIR`: share of an adapter that reaches engines in bfloat16.

A model of hidden size 128 whose weights are bfloat16 values, as published ones are, trained by
cross-entropy on random rows. After some numbers of updates: the share of the adapter's change that
rounding removes (`push/lost_share`), and the share of adapted weights that do not change at all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from distill.models.loading import load_causal_lm, new_qwen3
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.samples import demonstration
from tests.tiny import VOCAB_SIZE
from tests.weights import gather_all

RANK = 16
RATES = (1e-5, 1e-4, 1e-3)
UPDATES = (1, 2, 4, 8)


def measure(model: str, lr: float) -> dict[int, tuple[float, float]]:
    """(lost share, share of unchanged weights) after this number of updates."""
    config = LearnerConfig.of(
        model=model,
        lora_rank=RANK,
        lr=lr,
        total_steps=UPDATES[-1],
        device="cpu",
        threads=1,
    )
    learner = Learner(config, model + "-failed")
    base = load_causal_lm(model, dtype=torch.bfloat16, device="cpu").state_dict()
    adapted = [name for name in base if name.endswith("_proj.weight")]
    found = {}
    for update in range(1, UPDATES[-1] + 1):
        rows = [demonstration(8, 8, seed=4 * update + i) for i in range(4)]
        learner.step(Part(rows_D=rows, loss=cross_entropy_loss))
        if update not in UPDATES:
            continue
        pushed = gather_all(learner.weights(torch.bfloat16))
        same = sum(int((pushed[name] == base[name]).sum()) for name in adapted)
        lost = learner.lost_share
        assert lost is not None
        found[update] = lost, same / sum(base[name].numel() for name in adapted)
    return found


def main(directory: str) -> None:
    model = str(Path(directory) / "model")
    made = new_qwen3(
        vocab_size=VOCAB_SIZE, hidden_size=128, layers=2, heads=2, context_length=64,
        eos_token_id=0, pad_token_id=0, seed=0,
    )  # fmt: skip
    made.bfloat16().save_pretrained(model)
    table = Table(title=f"LoRA rank {RANK} to bfloat16: lost share (unchanged weights)")
    for heading in ("lr", *(f"after {updates}" for updates in UPDATES)):
        table.add_column(heading)
    for lr in RATES:
        found = measure(model, lr)
        table.add_row(f"{lr:g}", *(f"{lost:.0%} ({same:.0%})" for lost, same in found.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1])
