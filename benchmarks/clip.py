"""Effect of `kl_clip` on the number of steps that the demo's distillation needs.

    python -m benchmarks.clip out=DIR [seeds=3] [lr=3e-4]

Runs the task of `make demo` for each clip and seed, with models and settings of this benchmark:
synchronous, in one process, evaluated every other step. The most negative advantages of this task
are tens of nats.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
from rich.console import Console
from rich.table import Table

import cluster.run
from cluster.command import run_command
from cluster.config.demos import DemoConfig
from cluster.demos.demo import (
    STUDENT,
    TEACHER,
    distillation,
    sft_settings,
    write_data,
    write_untrained,
)
from cluster.run_files.out_directory import claimed_directory
from distill.errors import ConfigError
from distill.settings import changed

CLIPS = (None, 10.0, 5.0, 2.0)
FORGET_CARRY = {TEACHER: 0.0, STUDENT: 0.6}
# The student's data has four answers to each problem, the teacher's one.
SFT_STEPS = {TEACHER: 1200, STUDENT: 2000}
# The share of the teacher's accuracy that counts as reached, once it holds for so many evaluations.
OF_TEACHER, HOLD = 0.95, 2


@chz.chz
class ClipConfig:
    """The demo's distillation with several values of kl_clip."""

    out: str = chz.field(doc="directory of models and runs; what an earlier one made is removed")
    seeds: int = chz.field(default=3, doc="runs of each clip")
    steps: int = chz.field(default=60, doc="optimizer steps of each run")
    lr: float = chz.field(default=3e-4, doc="learning rate")
    max_grad_norm: float = chz.field(default=1.0, doc="where gradients are clipped as a whole")

    @chz.validate
    def _in_range(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds={self.seeds} must be at least 1")


def clip(config: ClipConfig, console: Console) -> None:
    """Train both models, distil, print the table, and write clip.json."""
    with claimed_directory(config.out, "clip", console.print) as out:
        _clip(config, out, console)


def _clip(config: ClipConfig, out: Path, console: Console) -> None:
    data = write_data(out, FORGET_CARRY, seed=0)
    for i, (name, steps) in enumerate(SFT_STEPS.items()):
        school = changed(sft_settings(out, data, name, seed=0), steps=steps, lr=4e-3)
        write_untrained(Path(school.model.path), data.problems, seed=1 + i)
        cluster.run.run(school, console)
    demo = distillation(DemoConfig(out=str(out), steps=config.steps, engine="embedded"), out, data)
    demo = changed(demo, estimator="sampled")
    rows = []
    for kl_clip in CLIPS:
        runs = []
        for seed in range(config.seeds):
            path = out / f"clip-{kl_clip}-{seed}"
            cluster.run.run(
                changed(
                    demo, out=str(path), kl_clip=kl_clip, seed=seed, max_staleness=0,
                    lr=config.lr, max_grad_norm=config.max_grad_norm, eval_every=2, eval_size=200,
                    keep="none",
                ),
                console,
            )  # fmt: skip
            runs.append(_measured(path))
        rows.append({"kl_clip": kl_clip, "runs": runs})
        (out / "clip.json").write_text(json.dumps(rows, indent=1))
        console.print(_table(rows))


def _measured(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    target = (
        OF_TEACHER * json.loads((run / "summary.json").read_text())["eval teacher"]["eval/accuracy"]
    )
    evaluated = [line for line in lines if "eval/accuracy" in line]
    met = [line["eval/accuracy"] >= target for line in evaluated]
    reached = next(
        (evaluated[i]["step"] for i in range(len(met) - HOLD + 1) if all(met[i : i + HOLD])), None
    )
    trained = [line for line in lines if "train/loss" in line]
    return {
        "steps_needed": reached,
        "accuracy": evaluated[-1]["eval/accuracy"],
        "reverse_kl": fmean(line["opd/reverse_kl"] for line in trained[-10:]),
        "grad_norm_max": max(line["train/grad_norm"] for line in trained),
        "advantage_min": min(line["advantage/min"] for line in trained),
        "clipped_share": fmean(line.get("opd/clipped_share", 0.0) for line in trained[:10]),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="the demo's distillation: a number for each seed")
    columns = {
        "steps needed": ("steps_needed", "{}"),
        "accuracy": ("accuracy", "{:.1%}"),
        "KL, last ten steps": ("reverse_kl", "{:.3f}"),
        "largest gradient": ("grad_norm_max", "{:.1f}"),
        "least advantage": ("advantage_min", "{:.1f}"),
        "clipped, first ten steps": ("clipped_share", "{:.2%}"),
    }
    for header in ("kl_clip", *columns):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            str(row["kl_clip"]),
            *(
                ", ".join(form.format(run[name]) for run in row["runs"])
                for name, form in columns.values()
            ),
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(ClipConfig, clip, None))
