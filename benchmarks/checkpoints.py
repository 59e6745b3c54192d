"""Seconds that a step waits for a checkpoint: written immediately, or from a copy in a thread.

    python -m benchmarks.checkpoints DIR

A Qwen3-shaped model in fp32 with AdamW's moments, one learner worker, steps of one row. The two
ways alternate several times. Memory is the increase of the process's peak (VmHWM).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.memory import kilobytes
from benchmarks.pair import VOCAB_SIZE, word_tokenizer
from distill.models.loading import new_qwen3
from learner.checkpoint import CheckpointStore
from learner.checkpoint_writer import CheckpointWriter
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.samples import demonstration

REPEATS = 3


def measure(directory: Path) -> dict[str, float]:
    """Medians, in seconds and MiB."""
    tokenizer = word_tokenizer()
    model = new_qwen3(
        vocab_size=VOCAB_SIZE, hidden_size=768, layers=8, heads=12, context_length=512,
        eos_token_id=1, pad_token_id=0, seed=0,
    )  # fmt: skip
    model.save_pretrained(directory / "model")
    parameters = sum(p.numel() for p in model.parameters())
    del model
    learner = Learner(
        LearnerConfig.of(model=str(directory / "model"), total_steps=1000, device="cpu", lr=1e-5),
        str(directory / "failed"),
    )
    rows = Part(rows_D=[demonstration(64, 64)], loss=cross_entropy_loss)

    def step() -> float:
        began = time.perf_counter()
        learner.step(rows)
        return time.perf_counter() - began

    step()
    made: dict[str, list[float]] = {}

    def note(**seconds: float) -> None:
        for name, value in seconds.items():
            made.setdefault(name, []).append(value)

    number = 0
    for _ in range(REPEATS):
        for background in (False, True):
            number += 1
            store = CheckpointStore(directory / "checkpoints", keep=1)
            writer = CheckpointWriter(learner, tokenizer, store)
            note(step=median(step() for _ in range(3)))
            before = _memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            began = time.perf_counter()
            (writer.begin if background else writer.save)(number, {})
            waited = time.perf_counter() - began
            if not background:
                note(at_once=waited, at_once_mb=_memory("VmHWM") - before)
                continue
            beside = []
            while writer.written(wait=False) is None:
                beside.append(step())
            written = writer.written(wait=True)
            assert written is not None
            note(
                copy=waited,
                copy_mb=_memory("VmHWM") - before,
                thread=written.seconds,
                step_beside=median(beside),
            )
    return {"parameters": parameters} | {name: median(values) for name, values in made.items()}


def _memory(field: str) -> float:
    """VmHWM (peak) or VmRSS of this process, in MiB."""
    return kilobytes("/proc/self/status", field) / 1024


def main(directory: str) -> None:
    found = measure(Path(directory))
    (Path(directory) / "checkpoints.json").write_text(json.dumps(found, indent=1) + "\n")
    table = Table(title=f"a checkpoint of {found['parameters'] / 1e6:.0f} M parameters")
    for heading in ("", "a step waits, s", "a thread writes, s", "a step meanwhile, s", "peak MiB"):
        table.add_column(heading)
    table.add_row("at once", f"{found['at_once']:.2f}", "", "", f"{found['at_once_mb']:.0f}")
    table.add_row(
        "from a copy", f"{found['copy']:.2f}", f"{found['thread']:.2f}",
        f"{found['step_beside']:.2f} (else {found['step']:.2f})", f"{found['copy_mb']:.0f}",
    )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1])
