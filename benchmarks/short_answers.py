"""Seconds and CPU of a step of short answers, in which the host's work outweighs the models'.

    python -m benchmarks.short_answers out=DIR [rounds=3] [steps=40] [only=local]

The pair and the job of `benchmarks.first_step`: 64 prompts x 4 answers of 4 tokens. In each round
every way runs once, in a process of its own with a user's threads and environment. Ratios are of
medians within a round: a change of the machine's load between rounds affects both sides.

Host CPU is the CPU of all processes minus that of `model_passes_s`: the same forward and backward
passes by transformers in one process, without anything else. The additional cost of running a pass
in smaller batches counts as the host's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

import chz
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.first_step import (
    PEER,
    SHAPE,
    WAYS,
    Watched,
    adopt_orphans,
    isotherm_command,
    trl_command,
    watch,
)
from benchmarks.pair import Pair, make_sums_pair
from benchmarks.peer import PEER_PYTHON, peer_environment
from cluster.command import run_command
from cluster.jsonl_log import read_lines
from distill.errors import ConfigError
from distill.models.loading import load_causal_lm

TRAJECTORIES = int(SHAPE["prompts_per_step"] * SHAPE["group_size"])
# Steps that fill the pipeline and warm kernels; left out of the medians.
WARMUP_STEPS = 10
# Passes of models alone; the first does not count.
_PASSES = 6
_LEAN = ("eval_size=1", "checkpoint_every=10000")


@chz.chz
class ShortAnswersConfig:
    """A step of short answers, of isotherm and of TRL."""

    out: str = chz.field(doc="directory of the runs and of short_answers.json")
    rounds: int = chz.field(default=3, doc="runs of each way, by turns")
    steps: int = chz.field(default=40, doc="measured steps of a run, after warm-up")
    only: str = chz.field(default="", doc="of isotherm's ways, only those whose name contains this")

    @chz.validate
    def _in_range(self) -> None:
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Median seconds of a step, and CPU seconds per step of all processes."""

    seconds: float
    cpu_s: float


def short_answers(config: ShortAnswersConfig, console: Console) -> None:
    """Measure, print the table, write short_answers.json."""
    adopt_orphans()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    pair = make_sums_pair(work / "pair")
    passes_s = model_passes_s(pair)
    runs = measure_steps(pair, work, config)
    report = {name: [asdict(steps) for steps in of_way] for name, of_way in runs.items()}
    report |= {"model_passes_s": passes_s}
    (out / "short_answers.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(short_answers_table(runs, passes_s))


def measure_steps(pair: Pair, work: Path, config: ShortAnswersConfig) -> dict[str, list[Steps]]:
    """Steps of each way that is installed, by round.

    Raises:
        ConfigError: a run failed.
    """
    has_sglang = find_spec("sglang") is not None
    ways = [way for way in WAYS if config.only in way and ("SGLang" not in way or has_sglang)]
    steps = WARMUP_STEPS + config.steps
    runs = defaultdict(list)
    for number in range(config.rounds):
        for way in ways:
            run = work / f"{way.replace(', ', '-')}-{number}"
            command = isotherm_command(way, pair, run, steps, *_LEAN)
            watched = watch(command, dict(os.environ), run.with_suffix(".log"))
            events = read_lines(run / "events.jsonl", {"t", "event"})
            ends = [event["t"] for event in events if event["event"] == "step"]
            runs[way].append(_measured(watched, ends))
        if PEER_PYTHON.exists():
            report, log = work / f"{PEER}-{number}.json", work / f"{PEER}-{number}.log"
            watched = watch(trl_command(pair, report, steps), peer_environment(), log)
            runs[PEER].append(_measured(watched, json.loads(report.read_text())["step_ends"]))
    return dict(runs)


def _measured(watched: Watched, step_ends: Sequence[float]) -> Steps:
    ends = step_ends[WARMUP_STEPS - 1 :]
    return Steps(
        seconds=median(end - before for before, end in pairwise(ends)),
        cpu_s=watched.cpu_s(ends[0], ends[-1]) / (len(ends) - 1),
    )


def model_passes_s(pair: Pair) -> float:
    """CPU seconds of a step's passes alone: sampling, scoring, forward, backward and AdamW.

    A group's prompt is read once for sampling, and once per member by teacher and learner.
    """
    student, teacher = (
        load_causal_lm(path, dtype=torch.float32, device="cpu")
        for path in (pair.student, pair.teacher)
    )
    tokenizer = AutoTokenizer.from_pretrained(pair.student, padding_side="left")
    lines = Path(pair.prompts).read_text().splitlines()[: SHAPE["prompts_per_step"]]
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts_PT = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    optimizer = torch.optim.AdamW(student.parameters())
    group_size, new_tokens = int(SHAPE["group_size"]), int(SHAPE["max_new_tokens"])
    rows_DT = torch.cat(
        [
            prompts_PT.repeat_interleave(group_size, dim=0),
            torch.zeros(TRAJECTORIES, new_tokens, dtype=torch.long),
        ],
        dim=1,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent = []
    for _ in range(_PASSES):
        began = time.process_time()
        with torch.no_grad():
            cache = student(prompts_PT, use_cache=True).past_key_values
            cache.batch_repeat_interleave(group_size)
            for at in range(prompts_PT.shape[1], rows_DT.shape[1] - 1):
                student(rows_DT[:, at : at + 1], past_key_values=cache, use_cache=True)
            teacher(rows_DT, use_cache=False)
        student(rows_DT, labels=rows_DT, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.process_time() - began)
    torch.set_num_threads(threads)
    return median(spent[1:])


def short_answers_table(runs: dict[str, list[Steps]], passes_s: float) -> Table:
    """Console table of `measure_steps`."""
    table = Table(
        title=f"a step of {TRAJECTORIES} answers of {SHAPE['max_new_tokens']} tokens (medians of "
        f"runs); models alone: {1e3 * passes_s / TRAJECTORIES:.2f} ms CPU a trajectory"
    )
    for header in ("", "s/step", "s/step over TRL's", "ms CPU a trajectory", "of these host"):
        table.add_column(header, justify="right" if header else "left")
    peer = runs.get(PEER)
    for way, of_way in runs.items():
        ratios = (
            []
            if peer is None
            else [o.seconds / p.seconds for p, o in zip(peer, of_way, strict=True)]
        )
        cpu_s = median(steps.cpu_s for steps in of_way)
        table.add_row(
            way,
            f"{median(steps.seconds for steps in of_way):.3f}",
            f"{median(ratios):.2f}" if ratios else "",
            f"{1e3 * cpu_s / TRAJECTORIES:.2f}",
            f"{1e3 * (cpu_s - passes_s) / TRAJECTORIES:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(ShortAnswersConfig, short_answers, None))
