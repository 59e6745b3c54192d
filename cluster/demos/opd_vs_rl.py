"""`python -m cluster.opd_vs_rl out=DIR`: optimizer steps to the teacher's accuracy, OPD and GRPO.

Claimed elsewhere, of long chains of thought: from the same student, at the same batch, OPD takes a
seventh to a tenth of RL's steps. Here it is measured on the demo's task and from two students: one
whose book often forgets to carry, and one whose book nearly always does.

for each start: every contender's settings on one seed -> its best on all seeds -> the table

The second start tries the better half of each contender's settings, as the first start ranked them.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from cluster.config.demos import OpdVsRlConfig
from cluster.config.on_policy import OpdConfig, RlConfig, RolloutConfig
from cluster.demos.arithmetic import ANSWER_TOKENS
from cluster.demos.curves import (
    HOLD,
    Curve,
    Row,
    ranked,
    row_of,
    shown_settings,
    shown_steps,
    table_of,
    verdict,
)
from cluster.demos.demo import TEACHER, Data, schooling, write_data
from cluster.demos.plots import Line, Panel, check_plots, draw_accuracy
from cluster.recipes.common import connected
from cluster.recipes.on_policy import run_on_policy
from cluster.recipes.supervised import run_sft
from cluster.run_files.run_directory import RunDirectory
from distill.errors import ConfigError

# The target is this share of the teacher's accuracy.
OF_TEACHER = 0.95
EVAL_SIZE = 200
# Why the ratio is not that of long chains of thought; said with the verdict, whatever it is.
READING = (
    f"how to read it: an answer has {ANSWER_TOKENS} tokens, so one reward blames the wrong one "
    "almost as well as a teacher that scores each, and both contenders correct only what the "
    "student samples; the claim is of answers with thousands of tokens"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A student to start from, and the optimizer steps that its runs are given."""

    name: str
    forget_carry: float  # how often the student's book forgets a carry
    eval_every: int
    sweep_steps: int  # of every run that chooses settings
    opd_steps: int  # of OPD with those it chose
    rl_steps: int  # of GRPO with those it chose


STARTS = (
    Start(name="easy", forget_carry=0.6, eval_every=2, sweep_steps=30, opd_steps=30, rl_steps=40),
    Start(name="hard", forget_carry=0.9, eval_every=4, sweep_steps=60, opd_steps=160, rl_steps=240),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to train, and the settings of it that are tried."""

    name: str
    grid: tuple[Mapping[str, Any], ...]


LRS = (3e-4, 1e-3, 2e-3)
OPD = tuple(
    Contender(
        name=f"OPD, {estimator}", grid=tuple({"lr": lr, "estimator": estimator} for lr in LRS)
    )
    for estimator in ("sampled", "full")
)
GRPO = Contender(
    name="GRPO",
    grid=tuple({"lr": lr, "scale_by_std": by_std} for by_std in (False, True) for lr in LRS),
)
CONTENDERS = (*OPD, GRPO)


def count_runs(settings: int, seeds: int) -> int:
    """Runs of a contender from all starts: each tries the better half of what the last one did."""
    runs = 0
    for _ in STARTS:
        runs += settings + seeds
        settings = _half(settings)
    return runs


def _half(count: int) -> int:
    return math.ceil(count / 2)


def measure(config: OpdVsRlConfig, console: Console) -> None:
    """Makes the models, runs every contender, and prints the table and what came of the claim.

    Raises:
        ConfigError: fewer steps than it takes to hold the target.
    """
    least = HOLD * max(start.eval_every for start in STARTS)
    if config.steps is not None and config.steps < least:
        raise ConfigError(
            f"steps={config.steps} must be at least {least}: the target counts as reached after "
            f"{HOLD} evaluations in a row"
        )
    check_plots()
    started = time.perf_counter()
    out = _directory(Path(config.out).resolve())
    books = {TEACHER: 0.0} | {start.name: start.forget_carry for start in STARTS}
    race = Race(config, out, write_data(out, books, config.seed), console)
    with connected(race.run_config(STARTS[0], OPD[0], OPD[0].grid[0], steps=1, seed=0)):
        for name in books:
            console.print(f"schooling: {name}", highlight=False)
            with _log(out / f"logs/{name}.log") as log:
                run_sft(schooling(out, race.data, name, config.seed), log)
        for start in STARTS:
            race.run(start)
    race.report()
    console.print(f"this took {time.perf_counter() - started:.0f} s", highlight=False)
    for line in race.verdicts():
        console.print(line, highlight=False)


def _directory(out: Path) -> Path:
    marker = out / ".isotherm-opd-vs-rl"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"out={out} is not empty and no opd_vs_rl made it; choose another out=")
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return out


@contextmanager
def _log(path: Path) -> Iterator[Console]:
    """Console that writes to the log of a single run, whose lines are many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield Console(file=file, width=200, soft_wrap=True)


class Race:
    """All runs, in order, and what came of them."""

    def __init__(self, config: OpdVsRlConfig, out: Path, data: Data, console: Console) -> None:
        self.data = data
        self._config, self._out, self._console = config, out, console
        self._sweeps: list[Curve] = []
        self._finals: dict[tuple[str, str], list[Curve]] = {}  # by start and contender
        self._teacher_accuracy = math.nan  # known from the first run on: an OPD run
        self._done = 0
        self._runs = sum(count_runs(len(c.grid), config.seeds) for c in CONTENDERS)
        self._to_try = {contender.name: list(contender.grid) for contender in CONTENDERS}

    @property
    def _target(self) -> float:
        return OF_TEACHER * self._teacher_accuracy

    def run(self, start: Start) -> None:
        """Sweeps every contender's settings on the first seed, then runs its best on all seeds."""
        first = self._config.seed
        for contender in CONTENDERS:
            swept = ranked(
                [
                    self._curve(start, contender, settings, start.sweep_steps, first)
                    for settings in self._to_try[contender.name]
                ],
                self._target,
            )
            self._sweeps += swept
            best, *_ = better = [curve.settings for curve in swept[: _half(len(swept))]]
            self._to_try[contender.name] = better
            steps = start.rl_steps if contender is GRPO else start.opd_steps
            self._finals[start.name, contender.name] = [
                self._curve(start, contender, best, steps, first + i)
                for i in range(self._config.seeds)
            ]

    def run_config(
        self, start: Start, contender: Contender, settings: Mapping[str, Any], steps: int, seed: int
    ) -> RolloutConfig:
        """All that the contenders share, and one's own settings."""
        name = "-".join([start.name, *contender.name.split(", "), *map(str, settings.values())])
        shared: dict[str, Any] = {
            "student": str(self._out / start.name / "final"),
            "prompts": str(self.data.prompts),
            "eval_prompts": str(self.data.held_out),
            "eval_size": EVAL_SIZE,
            "eval_every": start.eval_every,
            "out": str(self._out / f"runs/{name}-{steps}-{seed}"),
            "temperature": self._config.temperature,
            "engine": "embedded",  # with it a run is a function of its seed
            "steps": steps,
            "prompts_per_step": 32,
            "group_size": 8,
            "max_new_tokens": ANSWER_TOKENS,
            "max_staleness": 0,  # every step is on samples of the newest weights, for all alike
            "warmup_steps": 2,
            "checkpoint_every": steps,
            "seed": seed,
        }
        if contender is GRPO:
            return RlConfig(**shared, **settings)
        return OpdConfig(teacher=str(self._out / TEACHER / "final"), **shared, **settings)

    def _curve(
        self, start: Start, contender: Contender, settings: Mapping[str, Any], steps: int, seed: int
    ) -> Curve:
        """Runs it, unless it was run before, and prints the outcome."""
        steps = min(steps, self._config.steps or steps)
        config = self.run_config(start, contender, settings, steps, seed)
        began = time.perf_counter()
        curve, teacher = self._run(config, start, contender, settings)
        self._teacher_accuracy = teacher or self._teacher_accuracy
        self._done += 1
        self._console.print(
            f"[{self._done}/{self._runs}] {start.name} start, {contender.name}, "
            f"{shown_settings(settings)}, seed {seed}: {self._target:.1%} after "
            f"{shown_steps(curve.steps_to(self._target), steps)} steps, {curve.accuracy[-1]:.1%} "
            f"after {steps} (took {time.perf_counter() - began:.0f} s)",
            markup=False,
            highlight=False,
        )
        return curve

    def _run(
        self,
        config: RolloutConfig,
        start: Start,
        contender: Contender,
        settings: Mapping[str, Any],
    ) -> tuple[Curve, float | None]:
        """The run's curve, and the teacher's accuracy if it has one."""
        directory = RunDirectory(config.recipe, config)
        if not directory.is_finished():
            # A resumed run knows nothing of the accuracy before its first step: begin it again.
            shutil.rmtree(directory.path, ignore_errors=True)
        with _log(self._out / f"logs/{directory.path.name}.log") as log:
            run_on_policy(config, log)
        summary = json.loads((directory.path / "summary.json").read_text())
        metrics = directory.read_steps()
        between = {int(m["step"]): m["eval/accuracy"] for m in metrics if "eval/accuracy" in m}
        accuracy = {
            0: summary["eval before"]["eval/accuracy"],
            **between,
            config.steps: summary["eval after"]["eval/accuracy"],
        }
        curve = Curve(
            start=start.name,
            contender=contender.name,
            settings=settings,
            seed=config.seed,
            steps=tuple(accuracy),
            accuracy=tuple(accuracy.values()),
            informative_groups=1 - metrics[0]["reward/constant_groups"],
        )
        return curve, summary.get("eval teacher", {}).get("eval/accuracy")

    def verdicts(self) -> list[str]:
        """GRPO's share of informative groups, and the ratios of steps; one line each."""
        lines = []
        for start in STARTS:
            rows = {c.name: self._row(start, c) for c in CONTENDERS}
            curves = self._finals[start.name, GRPO.name]
            informative = fmean(curve.informative_groups for curve in curves)
            lines.append(
                f"{start.name} start: in {informative:.0%} of GRPO's first groups one answer earns "
                "more than another; the others teach it nothing"
            )
            lines += [verdict(rows[opd.name], rows[GRPO.name]) for opd in OPD]
        return [*lines, READING]

    def report(self) -> None:
        """The table on the console; every curve in opd_vs_rl.json; the picture."""
        rows = [self._row(start, contender) for start in STARTS for contender in CONTENDERS]
        title = f"optimizer steps to {self._target:.1%} on {EVAL_SIZE} held-out sums"
        self._console.print(table_of(rows, title))
        curves, picture = self._out / "opd_vs_rl.json", self._out / "opd_vs_rl.png"
        contents = {
            "teacher": self._teacher_accuracy,
            "target": self._target,
            "verdicts": self.verdicts(),
            "sweeps": [asdict(curve) for curve in self._sweeps],
            "finals": [asdict(curve) for curves in self._finals.values() for curve in curves],
        }
        curves.write_text(json.dumps(contents, indent=1) + "\n")
        draw_accuracy(picture, [self._panel(start) for start in STARTS])
        self._console.print(f"all curves are in {curves}, drawn in {picture}", highlight=False)

    def _row(self, start: Start, contender: Contender) -> Row:
        return row_of(self._finals[start.name, contender.name], self._target)

    def _panel(self, start: Start) -> Panel:
        lines = {}
        for contender in CONTENDERS:
            curves = self._finals[start.name, contender.name]
            lines[f"{contender.name} ({shown_settings(curves[0].settings)})"] = Line(
                steps=curves[0].steps, accuracy_by_seed=[curve.accuracy for curve in curves]
            )
        return Panel(
            title=f"{start.name} start: its book forgets {start.forget_carry:.0%} of carries",
            target=self._target,
            lines=lines,
        )
