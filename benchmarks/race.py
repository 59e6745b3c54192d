"""Seconds until a run reaches the KL that TRL reaches in a number of steps.

    python -m benchmarks.race out=DIR [student=DIR teacher=DIR prompts=FILE] [new_tokens=64,256]

TRL's DistillationTrainer trains first, on both cores. The exact KL(p_T || q_T) on held-out prompts
measures its progress. Then isotherm trains the same pair on the same prompts with the same learning
rate until it reaches that KL, with a checkpoint every few steps; the crossing is interpolated
between two of them. Seconds count from the beginning of the first step, in which isotherm's
pipeline is still empty, to the end of another, with all work between steps, including isotherm's
checkpoints. Loading models and starting processes are left out on both sides. Each system uses its
own default betas of AdamW: 0.9 and 0.95 here, 0.9 and 0.999 there. Shares are meaningless on a
shared machine.

Some of isotherm's runs make several updates on each step's samples (`num_substeps`), for which TRL
1.16 has no setting. The nearest setting is a smaller batch, so TRL runs once more with the same
number of samples per update.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import chz
from rich.console import Console
from rich.table import Table

import cluster.run
from benchmarks.distil import judge, judged_weights, split_prompts
from benchmarks.pair import Pair, docstrings, given_pair, make_taught_pair
from benchmarks.peer import run_peer
from cluster.command import run_command
from cluster.config.recipes import make
from cluster.jsonl_log import read_lines
from distill.errors import ConfigError

# Steps between two checkpoints that are judged.
JUDGED_EVERY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A run, and the point at which it reached TRL's KL.

    Attributes:
        kl: exact KL by step.
        step_s: mean seconds of a step.
        steps, seconds: until the crossing; None: the KL was not reached.
    """

    name: str
    kl: dict[int, float]
    step_s: float
    steps: float | None
    seconds: float | None


PROMPTS_PER_STEP, GROUP_SIZE = 8, 4


def contestants(substeps: int) -> dict[str, dict[str, Any]]:
    """Settings of isotherm's runs by name.

    They are: the choice of estimator=auto for a local teacher; the same with several updates per
    step; and its choice for a served teacher.
    """
    full = {"estimator": "full"}
    several = full | {"num_substeps": substeps}
    return {
        "estimator=full (auto)": full,
        f"estimator=full, num_substeps={substeps}": several,
        f"estimator=full, num_substeps={substeps}, threads=2": several | {"threads": 2},
        "estimator=top_k, of the student": {"estimator": "top_k"},
        "estimator=sampled": {"estimator": "sampled"},
    }


@chz.chz
class RaceConfig:
    """Time to a KL, compared with TRL."""

    out: str = chz.field(doc="directory of the runs and of race.json")
    student: str | None = chz.field(default=None, doc="checkpoint; default: made, 1.3 M parameters")
    teacher: str | None = chz.field(default=None, doc="checkpoint; default: made, 5.8 M parameters")
    prompts: str | None = chz.field(
        default=None, doc="JSONL; default: the standard library's prose"
    )
    temperature: float = chz.field(default=0.7, doc="T of everything")
    new_tokens: list[int] = chz.field(default_factory=lambda: [64, 256], doc="new tokens a sample")
    peer_steps: int = chz.field(
        default=20, doc="number of TRL's steps; the KL after them is the target"
    )
    most_steps: int = chz.field(
        default=32, doc="maximum number of isotherm's steps, a multiple of 4"
    )
    lr: float = chz.field(default=3e-4, doc="learning rate of both")
    substeps: int = chz.field(
        default=4,
        doc="updates per step of runs with several; TRL's small batch is smaller by this factor",
    )
    seeds: int = chz.field(default=1, doc="races, each with its own seed")
    only: str | None = chz.field(
        default=None, doc="of isotherm's runs, only those whose name contains this"
    )
    settings: str = chz.field(
        default="{}", doc="more settings of isotherm's runs, as a JSON object"
    )

    @chz.validate
    def _in_range(self) -> None:
        given_pair(self.student, self.teacher, self.prompts)
        if self.peer_steps < 2:
            raise ConfigError(f"peer_steps={self.peer_steps} must be at least 2")
        if self.substeps < 2 or PROMPTS_PER_STEP % self.substeps:
            raise ConfigError(f"substeps={self.substeps} must be 2, 4 or 8: of {PROMPTS_PER_STEP}")
        if self.most_steps < JUDGED_EVERY or self.most_steps % JUDGED_EVERY:
            raise ConfigError(f"most_steps={self.most_steps} must be a multiple of {JUDGED_EVERY}")


def race(config: RaceConfig, console: Console) -> None:
    """Run all races, print a table of each length, and write race.json."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    given = given_pair(config.student, config.teacher, config.prompts)
    pair = given or make_taught_pair(work / "pair", docstrings())
    rows = measure_race(config, pair, work, console)
    (out / "race.json").write_text(json.dumps(rows, indent=1) + "\n")
    for table in race_tables(rows):
        console.print(table)


def measure_race(
    config: RaceConfig, pair: Pair, work: Path, console: Console
) -> list[dict[str, Any]]:
    """For each length and seed: TRL's KL, its seconds, and the `Finish`es."""
    trained, asked = split_prompts(pair.prompts, work)
    rows: list[dict[str, Any]] = []
    for new_tokens in config.new_tokens:
        for seed in range(config.seeds):
            here = work / f"{new_tokens}-{seed}"
            here.mkdir()
            one = _Race(config, pair, trained, asked, new_tokens, seed, here)
            rows.append(one.run(console))
    return rows


@dataclass(frozen=True, slots=True)
class _Race:
    config: RaceConfig
    pair: Pair
    trained: Path
    asked: list[str]
    new_tokens: int
    seed: int
    out: Path

    def run(self, console: Console) -> dict[str, Any]:
        config = self.config
        seconds = sum(self._peer("peer", config.peer_steps, PROMPTS_PER_STEP))
        mark = self._kl(self.out / "peer")
        console.print(
            f"{self.new_tokens} new tokens, seed {self.seed}: TRL has a KL of {mark:.3f} "
            f"after {config.peer_steps} steps, {seconds:.1f} s"
        )
        step_s = self._peer("small", config.most_steps, PROMPTS_PER_STEP // config.substeps)
        name = f"TRL, 1/{config.substeps} of the batch"
        finishes = [self._finish(name, saved_by_peer(self.out / "small"), step_s, mark)]
        for name, settings in contestants(config.substeps).items():
            if not config.only or config.only in name:
                step_s = self._ours(name, settings, console)
                finishes.append(self._finish(name, judged_weights(self.out / name), step_s, mark))
        return {
            "new_tokens": self.new_tokens,
            "seed": self.seed,
            "before": self._kl(Path(self.pair.student)),
            "mark": mark,
            "peer_steps": config.peer_steps,
            "peer_seconds": seconds,
            "finishes": [asdict(finish) for finish in finishes],
        }

    def _peer(self, name: str, steps: int, prompts_per_step: int) -> list[float]:
        """Seconds of each of TRL's steps; the trained models are in `out/name`."""
        timed = run_peer(
            self.pair.student, self.pair.teacher, self.trained, self.out / f"{name}.json",
            steps=steps, prompts_per_step=prompts_per_step, group_size=GROUP_SIZE,
            max_new_tokens=self.new_tokens, temperature=self.config.temperature,
            lr=self.config.lr, seed=self.seed, warmup_steps=0,
            save=self.out / name, save_every=JUDGED_EVERY,
        )  # fmt: skip
        return timed["step_seconds"]

    def _ours(self, name: str, settings: dict[str, Any], console: Console) -> list[float]:
        config = self.config
        run = make(
            "opd",
            student=self.pair.student, teacher=self.pair.teacher, prompts=str(self.trained),
            out=str(self.out / name), temperature=config.temperature, steps=config.most_steps,
            prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE,
            max_new_tokens=self.new_tokens, lr=config.lr, seed=self.seed, engine="embedded",
            eval_size=0, checkpoint_every=JUDGED_EVERY, keep_every=JUDGED_EVERY,
            keep="none", **(settings | json.loads(config.settings)),
        )  # fmt: skip
        cluster.run.run(run, console)
        return step_seconds(self.out / name)

    def _finish(
        self, name: str, models: list[tuple[int, Path]], step_s: list[float], mark: float
    ) -> Finish:
        kl = {step: self._kl(model) for step, model in models}
        steps, at = crossing(kl, step_s, mark)
        return Finish(name=name, kl=kl, step_s=fmean(step_s), steps=steps, seconds=at)

    def _kl(self, model: Path) -> float:
        temperature = self.config.temperature
        return judge(str(model), self.pair.teacher, self.asked, temperature, self.new_tokens)


def saved_by_peer(directory: Path) -> list[tuple[int, Path]]:
    """Step and directory of each saved student."""
    return [(int(path.name.removeprefix("step-")), path) for path in directory.glob("step-*")]


def step_seconds(run: Path) -> list[float]:
    """Seconds of each step of a run, counted as TRL's are.

    A step lasts from the end of the previous step, except the first.
    """
    first, *_ = read_lines(run / "metrics.jsonl", {"step", "time/step"})
    events = read_lines(run / "events.jsonl", {"t", "event"})
    ends = [event["t"] for event in events if event["event"] == "step"]
    return [first["time/step"], *(end - before for before, end in pairwise(ends))]


def crossing(
    kl: dict[int, float], step_s: Sequence[float], mark: float
) -> tuple[float, float] | tuple[None, None]:
    """Steps and seconds until the KL is `mark`, interpolated linearly between two measurements.

    The first measurement is not interpolated, because there is none before it.
    """
    before: tuple[int, float] | None = None
    for step, value in sorted(kl.items()):
        if value <= mark:
            steps = float(step)
            if before is not None:
                steps -= (step - before[0]) * (mark - value) / (before[1] - value)
            whole = int(steps)
            return steps, sum(step_s[:whole]) + (steps - whole) * sum(step_s[whole : whole + 1])
        before = step, value
    return None, None


def race_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Console tables of `measure_race`, one for each length and seed."""
    return [_table(row) for row in rows]


def _table(row: dict[str, Any]) -> Table:
    table = Table(
        title=f"{row['new_tokens']} new tokens, seed {row['seed']}: to a KL of {row['mark']:.3f} "
        f"(before: {row['before']:.3f})"
    )
    table.add_column("run")
    for header in ("steps", "s/step", "seconds", "TRL's seconds over them"):
        table.add_column(header, justify="right")
    seconds, steps = row["peer_seconds"], row["peer_steps"]
    table.add_row("TRL", str(steps), f"{seconds / steps:.2f}", f"{seconds:.1f}", "1")
    for finish in row["finishes"]:
        at = finish["seconds"]
        table.add_row(
            finish["name"],
            "-" if at is None else f"{finish['steps']:.1f}",
            f"{finish['step_s']:.2f}",
            f"over {finish['step_s'] * max(finish['kl']):.1f}" if at is None else f"{at:.1f}",
            "-" if at is None else f"{seconds / at:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(RaceConfig, race, None))
