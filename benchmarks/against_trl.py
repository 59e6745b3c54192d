"""Trained tokens per second of a whole job, against TRL's DistillationTrainer on the same pair.

    python -m benchmarks.against_trl out=DIR [lengths=64,256] [repeats=3] [steps=12]

Both train 8 prompts x 4 samples per step at T = 0.7, alternately, on `make_pair`'s random models or
on a given pair. isotherm runs in a process of its own, as a user starts it; `settings=` adds
settings to its command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import chz
from rich.console import Console
from rich.table import Table

from benchmarks.pair import Pair, given_pair, make_pair
from benchmarks.peer import run_peer
from cluster.command import run_command
from cluster.jsonl_log import read_lines
from distill.errors import ConfigError

# Steps that fill the pipeline and warm kernels; left out of the rates.
WARMUP_STEPS = 4
SHAPE = {"prompts_per_step": 8, "group_size": 4, "temperature": 0.7, "lr": 3e-4}


@chz.chz
class AgainstTrlConfig:
    """Trained tokens per second of isotherm and of TRL."""

    out: str = chz.field(doc="directory of the runs and of against_trl.json")
    student: str | None = chz.field(default=None, doc="checkpoint; default: random, 1.3 M")
    teacher: str | None = chz.field(default=None, doc="checkpoint; default: random, 5.8 M")
    prompts: str | None = chz.field(default=None, doc="JSONL; default: random words")
    lengths: str = chz.field(default="64,256", doc="new tokens a sample")
    repeats: int = chz.field(default=3, doc="runs of each, by turns")
    steps: int = chz.field(default=12, doc="measured steps, after warm-up")
    settings: str = chz.field(default="", doc="further settings of our run, separated by spaces")


def against_trl(config: AgainstTrlConfig, console: Console) -> None:
    """Measure, print the table, and write against_trl.json."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    pair = given_pair(config.student, config.teacher, config.prompts) or make_pair(work / "pair")
    rates: dict[str, dict[str, list[float]]] = {}
    for length in config.lengths.split(","):
        rates[length] = defaultdict(list)
        for repeat in range(config.repeats):
            run = work / f"{length}-{repeat}"
            rates[length]["isotherm"].append(_ours(pair, run, int(length), config))
            peer = run_peer(
                pair.student, pair.teacher, Path(pair.prompts), run.with_suffix(".json"),
                steps=config.steps, max_new_tokens=int(length), warmup_steps=WARMUP_STEPS, **SHAPE,
            )  # fmt: skip
            rates[length]["TRL"].append(peer["trained_tokens_per_s"])
    (out / "against_trl.json").write_text(json.dumps(rates, indent=1) + "\n")
    console.print(_table(rates))


def _ours(pair: Pair, run: Path, length: int, config: AgainstTrlConfig) -> float:
    """Trained tokens per second after warm-up.

    Raises:
        ConfigError: the run failed; its log has the reason.
    """
    shape = [f"{name}={value}" for name, value in SHAPE.items()]
    command = [
        sys.executable, "-m", "cluster.train", "recipe=opd", f"student={pair.student}",
        f"teacher={pair.teacher}", f"prompts={pair.prompts}", f"out={run}", *shape,
        f"steps={config.steps + WARMUP_STEPS}", f"max_new_tokens={length}", "engine=embedded",
        "estimator=sampled", "eval_size=1", "checkpoint_every=10000", *config.settings.split(),
    ]  # fmt: skip
    log = run.with_suffix(".log")
    with log.open("wb") as output:
        ended = subprocess.run(command, env=dict(os.environ), stdout=output, stderr=output)
    if ended.returncode:
        raise ConfigError(f"the run ended with {ended.returncode}; its output is in {log}")
    lines = read_lines(run / "metrics.jsonl", {"step"})
    steps = [line for line in lines if "time/step" in line][WARMUP_STEPS:]
    return sum(s["train/tokens"] for s in steps) / sum(s["time/step"] for s in steps)


def _table(rates: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="trained tokens per second (median, and each run)")
    for header in ("new tokens", "isotherm", "TRL", "ratio of medians"):
        table.add_column(header, justify="right")
    for length, by_system in rates.items():
        ours, trl = by_system["isotherm"], by_system["TRL"]
        cells = [
            f"{median(each):.0f} ({', '.join(f'{r:.0f}' for r in each)})" for each in (ours, trl)
        ]
        table.add_row(length, *cells, f"{median(ours) / median(trl):.2f}")
    return table


if __name__ == "__main__":
    sys.exit(run_command(AgainstTrlConfig, against_trl, None))
