"""`make bench`: tokens per second of each stage, of a whole job, and of TRL on the same pair.

Also measured: bias and variance of every estimator; memory and time of the vocabulary projection;
the learner's step by stage, with one worker and with two; groups per second through the queue, and
the processes that their bytes pass; the driver's share of a core by the number of actors; delays of
heartbeats while large answers are parsed; step rules on a job of long-tailed answers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import chz
from rich.console import Console
from rich.table import Table

import cluster.run
from actors.config import EngineChoice
from benchmarks.data_path import data_path_table, measure_data_path
from benchmarks.decoding import DecodingConfig, decoding_table, measure_decoding
from benchmarks.driver import driver_table, measure_driver
from benchmarks.estimators import estimators_table, measure_estimators
from benchmarks.learner import learner_tables, measure_learner
from benchmarks.long_tails import long_tails_table, measure_long_tails
from benchmarks.memory import measure_memory, memory_table
from benchmarks.pair import Pair, given_pair, make_pair
from benchmarks.peer import run_peer
from benchmarks.queue import measure_queue, queue_table
from benchmarks.scaling import measure_scaling, scaling_tables
from benchmarks.stages import measure_stages
from benchmarks.transports import measure_transports, transports_tables
from cluster.command import run_command
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make


@chz.chz
class BenchConfig:
    """Speed of isotherm and of TRL on one pair, in one run."""

    out: str = chz.field(doc="directory of the report (bench.json), the models and the runs")
    student: str | None = chz.field(
        default=None, doc="checkpoint; default: random, 1.3 M parameters"
    )
    teacher: str | None = chz.field(
        default=None, doc="checkpoint; default: random, 5.8 M parameters"
    )
    prompts: str | None = chz.field(default=None, doc="JSONL; default: random words")
    temperature: float = chz.field(default=0.7, doc="rollout temperature of both")
    steps: int = chz.field(default=20, doc="measured steps, after warm-up")
    prompts_per_step: int = chz.field(default=8, doc="prompts a step")
    group_size: int = chz.field(default=4, doc="samples a prompt")
    max_new_tokens: int = chz.field(default=64, doc="new tokens a sample")
    engine: EngineChoice = chz.field(default="embedded", doc="sglang or embedded")
    peer: bool = chz.field(default=True, doc="also run TRL's DistillationTrainer")

    @chz.validate
    def _pair(self) -> None:
        given_pair(self.student, self.teacher, self.prompts)


# Steps that fill the pipeline and warm kernels; left out of the medians.
WARMUP_STEPS = 4
LR = 3e-4


def _opd(config: BenchConfig, pair: Pair, out: Path, staleness: int) -> OpdConfig:
    return make(
        "opd",
        student=pair.student,
        teacher=pair.teacher,
        prompts=pair.prompts,
        out=str(out),
        temperature=config.temperature,
        steps=config.steps + WARMUP_STEPS,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_new_tokens=config.max_new_tokens,
        max_staleness=staleness,
        lr=LR,
        engine=config.engine,
        checkpoint_every=10_000,
        eval_size=1,
        estimator="sampled",
    )


def bench(config: BenchConfig, console: Console) -> None:
    """Measure everything, print the tables, and write bench.json."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    pair = given_pair(config.student, config.teacher, config.prompts) or make_pair(work / "pair")
    stages = measure_stages(_opd(config, pair, work / "stages", 1), work)
    transports = measure_transports(work)
    estimators = measure_estimators()
    memory = measure_memory(config.temperature)
    learner = measure_learner(work / "learner", config.temperature)
    scaling = measure_scaling(work / "scaling", config.temperature)
    queue = measure_queue(work)
    data_path = measure_data_path(work)
    driver = measure_driver([10, 100, 1000], seconds=20)
    decoding = measure_decoding(DecodingConfig())
    long_tails = measure_long_tails(
        work / "long-tails", steps=50, seeds=1, engines=[1, 2], console=console
    )
    jobs = {}
    for mode, staleness in (("overlapped", 1), ("synchronous", 0)):
        opd = _opd(config, pair, work / mode, staleness)
        cluster.run.run(opd, console)
        jobs[mode] = _job(work / mode)
    peer = _peer(config, pair, work / "peer.json") if config.peer else None
    report = {
        "stages": stages,
        "transports": transports,
        "estimators": estimators,
        "memory": memory,
        "learner": learner,
        "scaling": scaling,
        "queue": queue,
        "data_path": data_path,
        "driver": driver,
        "decoding": decoding,
        "long_tails": long_tails,
        "jobs": jobs,
        "peer": peer,
        "settings": chz.asdict(config),
    }
    (out / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    _print(report, console)
    console.print(f"the whole report is in {out / 'bench.json'}")


def _job(out: Path) -> dict[str, float]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "time/step" in line][WARMUP_STEPS:]
    names = ("time/step", "time/wait", "time/learn", "time/push", "time/rollout", "time/teacher")
    return {name: median(step[name] for step in steps) for name in names} | {
        "tokens_per_s": sum(s["train/tokens"] for s in steps) / sum(s["time/step"] for s in steps),
        "wait_share": sum(s["time/wait"] for s in steps) / sum(s["time/step"] for s in steps),
    }


def _peer(config: BenchConfig, pair: Pair, out: Path) -> dict[str, Any]:
    return run_peer(
        pair.student, pair.teacher, Path(pair.prompts), out,
        steps=config.steps, prompts_per_step=config.prompts_per_step,
        group_size=config.group_size, max_new_tokens=config.max_new_tokens,
        temperature=config.temperature, lr=LR,
    )  # fmt: skip


def _print(report: dict[str, Any], console: Console) -> None:
    table = Table(title="stages, alone, median of a step's work")
    for header in ("stage", "s/step", "trained tokens/s"):
        table.add_column(header, justify="right" if header != "stage" else "left")
    for name in ("rollout", "teacher", "learn", "load"):
        stage = report["stages"][name]
        table.add_row(name, f"{stage['seconds']:.3f}", f"{stage['tokens_per_s']:.0f}")
    console.print(table)
    for table in (*transports_tables(report["transports"]), *scaling_tables(report["scaling"])):
        console.print(table)
    console.print(queue_table(report["queue"]))
    console.print(data_path_table(report["data_path"]))
    console.print(driver_table(report["driver"]))
    console.print(decoding_table(report["decoding"]))
    console.print(long_tails_table(report["long_tails"]))
    console.print(estimators_table(report["estimators"]))
    console.print(memory_table(report["memory"]))
    for table in learner_tables(report["learner"]):
        console.print(table)
    table = Table(title="the whole job, median step")
    for header in ("mode", "s/step", "s wait", "s learn", "s push", "tokens/s"):
        table.add_column(header, justify="right" if header != "mode" else "left")
    for mode, job in report["jobs"].items():
        figures = [f"{job[f'time/{stage}']:.3f}" for stage in ("step", "wait", "learn", "push")]
        table.add_row(f"isotherm, {mode}", *figures, f"{job['tokens_per_s']:.0f}")
    if report["peer"]:
        peer = report["peer"]
        table.add_row("TRL DistillationTrainer", f"{median(peer['step_seconds']):.3f}", "", "", "",
                      f"{peer['trained_tokens_per_s']:.0f}")  # fmt: skip
    console.print(table)
    console.print(_findings(report), highlight=False)


def _findings(report: dict[str, Any]) -> str:
    stages, job = report["stages"], report["jobs"]["overlapped"]
    act = stages["rollout"]["seconds"] + stages["teacher"]["seconds"]
    slower = max(act, stages["learn"]["seconds"])
    lines = [
        f"overlap: {job['time/step'] / slower:.2f} x the slower of acting ({act:.3f} s) and "
        f"learning ({stages['learn']['seconds']:.3f} s) alone",
        f"push: loading takes {stages['load_over_memcpy']:.1f} x a memcpy of the same bytes",
    ]
    if report["peer"]:
        ratio = job["tokens_per_s"] / report["peer"]["trained_tokens_per_s"]
        lines.append(f"peer: {ratio:.2f} x TRL's trained tokens per second, same pair, same run")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(BenchConfig, bench, None))
