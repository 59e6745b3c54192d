"""Seconds from the start of a command to step 1 and to its end, by stage and process; and of TRL.

    python -m benchmarks.first_step out=DIR [repeats=3] [steps=20] [only=local]

The shortest job: the pair of `make_sums_pair`, 64 prompts x 4 answers of 4 tokens. Ways:
`local=True`, Ray with the embedded engine, Ray with SGLang if installed, and TRL's
DistillationTrainer if `.venv-peer` exists. Ways alternate; results are medians. Each run is a
process of its own with a user's threads and environment. On a shared machine CPU seconds are more
meaningful than wall time.

    plan         imports and checks are done, and the plan is printed
    first actor  Ray is up, and the first actor has answered
    all actors   models are loaded
    handshake    weights are pushed, and every party agrees
    evaluations  those before the first step are done
    step 1       the first optimizer step is done
    finished     the last step is done, and `final/` is written
    prompt       the process has ended
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import chz
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.pair import Pair, make_sums_pair
from benchmarks.peer import PEER_PYTHON, peer_command, peer_environment
from cluster.command import run_command
from cluster.jsonl_log import read_lines
from distill.errors import ConfigError

PEER = "TRL"
WAYS = {
    "local": ("engine=embedded", "local=True"),
    "Ray, embedded": ("engine=embedded",),
    "Ray, SGLang": ("engine=sglang",),
}
STAGES = (
    "plan", "first actor", "all actors", "handshake", "evaluations", "step 1", "finished", "prompt",
)  # fmt: skip
SHAPE = {
    "prompts_per_step": 64, "group_size": 4, "max_new_tokens": 4, "temperature": 0.7, "lr": 3e-4,
}  # fmt: skip
EVAL_SIZE = 64
_SAMPLED_EVERY_S = 0.25
_PR_SET_CHILD_SUBREAPER = 36


@chz.chz
class FirstStepConfig:
    """Time from the start of the command to step 1."""

    out: str = chz.field(doc="directory of the runs and of first_step.json")
    repeats: int = chz.field(default=3, doc="runs of each way, by turns")
    steps: int = chz.field(default=20, doc="optimizer steps of a run")
    only: str = chz.field(default="", doc="only ways whose name contains this")

    @chz.validate
    def _in_range(self) -> None:
        for name in ("repeats", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One run: seconds since the start by stage, and CPU seconds until step 1 by process."""

    seconds: dict[str, float]
    cpu_s: dict[str, float]


def first_step(config: FirstStepConfig, console: Console) -> None:
    """Measure, print both tables, and write first_step.json."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    starts = measure_first_step(work, config.repeats, config.steps, config.only)
    rows = {way: [vars(start) for start in runs] for way, runs in starts.items()}
    (out / "first_step.json").write_text(json.dumps(rows, indent=1) + "\n")
    for table in first_step_tables(starts):
        console.print(table)


def measure_first_step(
    work: Path, repeats: int, steps: int, only: str = ""
) -> dict[str, list[Start]]:
    """Run every installed way alternately.

    Raises:
        ConfigError: `only` matches no way, or a run failed.
    """
    adopt_orphans()
    pair = make_sums_pair(work / "pair")
    there = {"Ray, SGLang": find_spec("sglang") is not None, PEER: PEER_PYTHON.exists()}
    ways = [way for way in (*WAYS, PEER) if only in way and there.get(way, True)]
    if not ways:
        raise ConfigError(f"only={only} leaves none of {', '.join((*WAYS, PEER))}")
    starts = defaultdict(list)
    for repeat in range(repeats):
        for way in ways:
            run = work / f"{way.replace(', ', '-')}-{repeat}"
            measured = _peer(pair, run, steps) if way == PEER else _ours(way, pair, run, steps)
            starts[way].append(measured)
    return dict(starts)


def isotherm_command(way: str, pair: Pair, run: Path, steps: int, *settings: str) -> list[str]:
    """Command line of a run of 64 prompts x 4 answers of 4 tokens."""
    return [
        sys.executable, "-m", "cluster.train", "recipe=opd", f"student={pair.student}",
        f"teacher={pair.teacher}", f"prompts={pair.prompts}", f"out={run}", f"steps={steps}",
        *(f"{name}={value}" for name, value in SHAPE.items()), "estimator=sampled", *WAYS[way],
        *settings,
    ]  # fmt: skip


def trl_command(pair: Pair, report: Path, steps: int) -> list[str]:
    """Command line of TRL's run of the same shape; its times go to `report`."""
    return peer_command(
        pair.student, pair.teacher, Path(pair.prompts), report, steps=steps, warmup_steps=0, **SHAPE
    )


def _ours(way: str, pair: Pair, run: Path, steps: int) -> Start:
    command = isotherm_command(way, pair, run, steps, f"eval_size={EVAL_SIZE}")
    watched = watch(command, dict(os.environ), run.with_suffix(".log"))
    ends = {"handshake": (run / "calibration.json").stat().st_mtime}
    for event in read_lines(run / "events.jsonl", {"t", "event"}):
        match event:
            case {"event": "begin", "t": at}:
                ends["plan"] = at
            case {"event": "start", "t": at} if "step 1" not in ends:
                ends.setdefault("first actor", at)
                ends["all actors"] = at
            case {"event": "evaluation", "who": "before", "t": at}:
                ends["evaluations"] = at
            case {"event": "step", "t": at}:
                ends.setdefault("step 1", at)
            case {"event": "end", "t": at}:
                ends["finished"] = at
    return watched.start(ends)


def _peer(pair: Pair, run: Path, steps: int) -> Start:
    report = run.with_suffix(".json")
    watched = watch(trl_command(pair, report, steps), peer_environment(), run.with_suffix(".log"))
    step_ends = json.loads(report.read_text())["step_ends"]
    return watched.start({"step 1": step_ends[0], "finished": step_ends[-1]})


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A finished process, with samples of the CPU seconds of it and its children."""

    entered: float
    ended: float
    samples: list[tuple[float, Counter[str]]]

    def start(self, ends: dict[str, float]) -> Start:
        ends["prompt"] = self.ended
        seconds = {stage: ends[stage] - self.entered for stage in STAGES if stage in ends}
        until = next((cpu for at, cpu in self.samples if at >= ends["step 1"]), Counter())
        return Start(seconds=seconds, cpu_s=dict(until.most_common()))

    def cpu_s(self, begin: float, end: float) -> float:
        """CPU seconds of all processes between two times of day, interpolated."""
        times, spent = zip(*((at, cpu.total()) for at, cpu in self.samples), strict=True)
        before, after = np.interp([begin, end], times, spent)
        return float(after - before)


def watch(command: list[str], environment: dict[str, str], log: Path) -> Watched:
    """Run the command to its end.

    Raises:
        ConfigError: the command failed; the log has its output.
    """
    samples: list[tuple[float, Counter[str]]] = []
    over = threading.Event()
    sampler = threading.Thread(target=_sample, args=(samples, over))
    with log.open("wb") as output:
        entered = time.time()
        sampler.start()
        code = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    ended = time.time()
    over.set()
    sampler.join()
    if code:
        raise ConfigError(f"{' '.join(command[:4])} ended with {code}; its output is in {log}")
    return Watched(entered=entered, ended=ended, samples=samples)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that none is overlooked."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _sample(samples: list[tuple[float, Counter[str]]], over: threading.Event) -> None:
    """CPU seconds of all descendants by name, until `over`; ended processes keep theirs."""
    own, spent = psutil.Process(), dict[tuple[int, float], tuple[str, float]]()
    while not over.wait(_SAMPLED_EVERY_S):
        for process in own.children(recursive=True):
            try:
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                spent[key] = (_name(process), times.user + times.system)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        total: Counter[str] = Counter()
        for name, seconds in spent.values():
            total[name] += seconds  # pyright: ignore[reportArgumentType] - it adds floats, too
        samples.append((time.time(), total))


def _name(process: psutil.Process) -> str:
    """Role of a process, from its title."""
    title = " ".join(process.cmdline()) or process.name()
    if title.startswith("ray::"):
        return title.removeprefix("ray::").split(".")[0].split("(")[0].strip()
    if title.startswith("sglang::") or "sglang" in title:
        return "SGLang"
    if "cluster.train" in title or "peer_trl" in title:
        return "driver"
    return "Ray itself" if "ray" in title else process.name()


def first_step_tables(starts: dict[str, list[Start]]) -> list[Table]:
    """Console tables of `measure_first_step`: seconds by stage, CPU seconds by process."""
    return [_seconds_table(starts), _cpu_table(starts)]


def _seconds_table(starts: dict[str, list[Start]]) -> Table:
    table = Table(title="seconds since the start of the command (median)")
    for header in ("", *STAGES, "CPU s to step 1"):
        table.add_column(header, justify="right" if header else "left")
    for way, runs in starts.items():
        cells = [
            f"{median(run.seconds[stage] for run in runs):.1f}" if stage in runs[0].seconds else ""
            for stage in STAGES
        ]
        table.add_row(way, *cells, f"{median(sum(run.cpu_s.values()) for run in runs):.1f}")
    return table


def _cpu_table(starts: dict[str, list[Start]]) -> Table:
    table = Table(title="CPU seconds to step 1, by process (median)")
    table.add_column("process")
    names = Counter[str]()
    for way, runs in starts.items():
        table.add_column(way, justify="right")
        for run in runs:
            names.update(run.cpu_s)
    for name, _ in names.most_common():
        cells = [median(run.cpu_s.get(name, 0.0) for run in runs) for runs in starts.values()]
        table.add_row(name, *(f"{cell:.1f}" if cell else "" for cell in cells))
    return table


if __name__ == "__main__":
    sys.exit(run_command(FirstStepConfig, first_step, None))
