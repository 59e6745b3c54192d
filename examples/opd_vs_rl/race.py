"""`python -m examples.opd_vs_rl out=DIR`: ratio of RL's steps to OPD's, by answer length.

The published claim, for long chains of thought: from the same student, at the same batch, OPD takes
a seventh to a tenth of RL's steps. Here only the answer's length varies: chains of sums whose links
are equally hard (`examples.opd_vs_rl.chain`), one student, one teacher.

1. SFT makes the models: single sums first, then chains as long as the longest answer (the teacher),
   then chains with forgotten carries (the student).
2. For each length, OPD first: learning rates are tried on one seed, the best on the other seeds.
3. Results are steps and seconds to 95 % of the teacher's share of right links, and their ratios.

A run ends once it holds the target. RL is stopped at `GIVE_UP` times OPD's steps.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

import cluster.run
from cluster.base.outcomes import Interrupted
from cluster.config.on_policy import RolloutConfig
from cluster.config.recipes import make
from cluster.config.supervised import SftConfig
from cluster.console import log_console
from cluster.demos.arithmetic import Problems, train_tokenizer
from cluster.recipes.context import Observer
from cluster.run_files.out_directory import claimed_directory
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Signals
from distill.errors import ConfigError
from distill.models.loading import new_qwen3
from examples.opd_vs_rl.chain import (
    LINK_TOKENS,
    PROMPT_TOKENS,
    Chain,
    Rewarded,
    write_sft_rows,
    write_starts,
)
from examples.opd_vs_rl.config import OpdVsRlConfig
from examples.opd_vs_rl.curves import (
    HOLD,
    Curve,
    Ratio,
    ResultRow,
    ranked,
    ratio_of,
    row_of,
    table_of,
)
from examples.opd_vs_rl.curves import shown_steps as shown
from examples.opd_vs_rl.plots import check_plots, draw_ratios

# The target is this share of the teacher's share of right links.
OF_TEACHER = 0.95
# RL is stopped after this many times OPD's steps: by then the claim (7 to 10) is decided.
GIVE_UP = 10
FORGET_CARRY, RANDOM_LINKS = 0.6, 0.5  # see `chain_of`
HELD_OUT = 500
SUMS, TEACHER, STUDENT = "sums", "teacher", "student"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Training method. `rewarded`: as in `Chain`; `cap`: default limit of steps."""

    name: str
    rewarded: Rewarded
    cap: int = 100


OPD = Method(name="OPD", rewarded="links")
RL = (
    Method(name="GRPO, share of links", rewarded="links"),
    Method(name="GRPO, all links right", rewarded="chain"),
)
# Rates tried at the shortest length. A longer one tries the best of the length before, half of
# that and twice that.
FIRST_RATES = (6e-4, 3e-4, 1.5e-4)


def measure(config: OpdVsRlConfig, console: Console) -> None:
    """Make the models, run every method at every length, print and draw the table.

    Raises:
        ConfigError: `steps=` is less than holding the target takes.
    """
    least = HOLD * max(map(eval_every, config.lengths))
    if config.steps is not None and config.steps < least:
        raise ConfigError(
            f"steps={config.steps} must be at least {least}: the target counts as reached after "
            f"{HOLD} evaluations in a row",
            field="steps",
        )
    check_plots()
    started = time.perf_counter()
    with claimed_directory(config.out, "opd-vs-rl", console.print, keep=True) as out:
        make_models(config, out, console)
        race = Race(config, out, console)
        for length in config.lengths:
            race.run(length)
        race.report()
    console.print(f"this took {time.perf_counter() - started:.0f} s", highlight=False)


def eval_every(length: int) -> int:
    """Steps between evaluations; fewer for longer answers, on which a step learns more."""
    return max(1, 2 * LINK_TOKENS // length)


@contextmanager
def _log(path: Path) -> Iterator[Console]:
    """Console that writes to the log file of a single run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield log_console(file)


def make_models(config: OpdVsRlConfig, out: Path, console: Console) -> None:
    """Write the data and fine-tune the models, unless an earlier call has."""
    if not (out / "prompts.jsonl").exists():
        _write_data(config, out)
    for stage in _fine_tunings(config, out):
        name = Path(stage.out).name
        console.print(f"SFT: {name}, {stage.steps} steps", highlight=False)
        with _log(Path(f"{out}/logs/{name}.log")) as log:
            cluster.run.run(stage, log)


def _write_data(config: OpdVsRlConfig, out: Path) -> None:
    longest = max(config.lengths)
    problems = Problems.split(held_out=HELD_OUT, seed=config.seed)
    tokenizer = train_tokenizer(out / "untrained", problems.train)
    vocabulary = tokenizer.get_vocab()
    new_qwen3(
        vocab_size=len(tokenizer),
        hidden_size=64,
        layers=2,
        heads=4,
        context_length=PROMPT_TOKENS + longest,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        seed=config.seed + 1,
    ).save_pretrained(out / "untrained")
    links = longest // LINK_TOKENS
    for name, of, often, random_links in (
        (SUMS, 1, 0.0, 0.0),
        (TEACHER, links, 0.0, RANDOM_LINKS),
        (STUDENT, links, FORGET_CARRY, RANDOM_LINKS),
    ):
        write_sft_rows(
            out / f"{name}-rows.jsonl",
            problems.train,
            tokenizer,
            links=of,
            forget_carry=often,
            random_links=random_links,
            seed=config.seed,
        )
    write_starts(out / "held_out.jsonl", problems.held_out)
    write_starts(out / "prompts.jsonl", problems.train)  # last: it marks the data as complete


def _fine_tunings(config: OpdVsRlConfig, out: Path) -> Iterator[SftConfig]:
    """Settings of the SFT stages, in order: single sums, the teacher, the student.

    The teacher is trained on chains; the student starts from it and learns to forget carries.
    """
    rows = max(8, 1152 // max(config.lengths))
    plan = (
        (SUMS, out / "untrained", config.sft_steps, 128, 4e-3),
        (TEACHER, out / SUMS / "final", 2 * config.sft_steps, rows, 2e-3),
        (STUDENT, out / TEACHER / "final", math.ceil(0.3 * config.sft_steps), rows, 1e-3),
    )
    for name, model, steps, batch_size, lr in plan:
        yield make(
            "sft",
            model=str(model),
            data=str(out / f"{name}-rows.jsonl"),
            out=str(out / name),
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            lr_schedule="cosine",
            warmup_steps=20,
            weight_decay=0.01,
            checkpoint_every=100,
            seed=config.seed,
            threads=1,
            local=True,
        )


class Race:
    """Runs of all methods at all lengths, and their results."""

    def __init__(self, config: OpdVsRlConfig, out: Path, console: Console) -> None:
        self._config, self._out, self._console = config, out, console
        self._curves: list[Curve] = []
        self._rows: list[tuple[ResultRow, Ratio | None]] = []
        self._targets: dict[int, float] = {}
        self._rates: dict[str, tuple[float, ...]] = {
            method.name: FIRST_RATES for method in (OPD, *RL)
        }

    def run(self, length: int) -> None:
        """Run all methods at one length. OPD is first, since its steps limit those of RL."""
        opd = self._row(length, OPD, self._limit(length, OPD.cap))
        self._rows.append((opd, None))
        cap = OPD.cap if math.isinf(opd.steps) else GIVE_UP * max(opd.steps, 1)
        for method in dict.fromkeys(self._alike(each, length)[0] for each in RL):
            row = self._row(length, method, self._limit(length, cap))
            self._rows.append((row, ratio_of(opd, row)))
        self._save()

    def _limit(self, length: int, cap: float) -> int:
        """Smaller of `cap` and the setting `steps`, rounded up to a step with an evaluation."""
        cap, every = min(cap, self._config.steps or cap), eval_every(length)
        return max(HOLD, math.ceil(cap / every)) * every

    def _row(self, length: int, method: Method, cap: int) -> ResultRow:
        """Find the best learning rate on the first seed, and run it on the other seeds."""
        first, tried, at_most = self._config.seed, [], cap
        for lr in self._rates[method.name]:
            tried.append(self._curve(length, method, lr, first, at_most))
            best, *_ = ranked(tried, self._targets[length])
            steps = best.steps_to(self._targets[length])
            if not math.isinf(steps):  # a rate that needs more steps is not the best
                at_most = min(cap, int(steps) + HOLD * eval_every(length))
        best, *_ = ranked(tried, self._targets[length])
        for each in self._alike(method, length):
            self._rates[each.name] = (best.lr, best.lr / 2, 2 * best.lr)
        others = [
            self._curve(length, method, best.lr, first + i, cap)
            for i in range(1, self._seeds(length))
        ]
        return row_of([best, *others], self._targets[length], cap)

    def _alike(self, method: Method, length: int) -> Sequence[Method]:
        """Methods that are identical at this length: with one link both RL rewards are equal."""
        return RL if method in RL and length == LINK_TOKENS else [method]

    def _seeds(self, length: int) -> int:
        ends = self._config.lengths[0], self._config.lengths[-1]
        return self._config.seeds if length in ends else 1

    def run_config(
        self, length: int, method: Method, lr: float, seed: int, steps: int
    ) -> RolloutConfig:
        """Settings of one run: those that all methods share, and those of the method."""
        links = length // LINK_TOKENS
        name = f"{length}-{method.name}-{lr:g}-{seed}".replace(", ", "-").replace(" ", "-")
        shared: dict[str, Any] = {
            "student": str(self._out / STUDENT / "final"),
            "prompts": str(self._out / "prompts.jsonl"),
            "eval_source": str(self._out / "held_out.jsonl"),
            # About the same number of links at every length, so the target is equally precise.
            "eval_size": max(8, min(256, 768 // links)),
            "eval_every": eval_every(length),
            "eval_temperature": self._config.temperature,
            "env": Chain(rewarded=method.rewarded),
            "out": str(self._out / "runs" / name),
            "temperature": self._config.temperature,
            "engine": "embedded",  # with it a run is a function of its seed
            "local": True,
            "threads": 1,
            "steps": steps,
            "prompts_per_step": 8,
            "group_size": 8,
            "max_new_tokens": length,
            "max_staleness": 0,  # all methods train on samples of the newest weights
            "warmup_steps": 2,
            "lr": lr,
            "checkpoint_every": 20,
            "keep_last": 1,
            "keep": "none",
            "smoke_test": False,
            "seed": seed,
        }
        if method is OPD:
            return make("opd", teacher=str(self._out / TEACHER / "final"), **shared)
        return make("rl", **shared)

    def _curve(self, length: int, method: Method, lr: float, seed: int, cap: int) -> Curve:
        """Run until the target is held or to the cap, unless done before; print the outcome."""
        run = _MethodRun(self.run_config(length, method, lr, seed, cap), length, method)
        with _log(self._out / f"logs/{run.directory.path.name}.log") as log:
            run.to_the_end(self._targets.get(length), log)
        if length not in self._targets:
            self._targets[length] = run.target()
        curve, target = run.curve(), self._targets[length]
        self._curves.append(curve)
        self._console.print(
            f"{length} tokens, {method.name}, lr {lr:g}, seed {seed}: {target:.1%} after "
            f"{shown(curve.steps_to(target), cap)} steps; from {curve.accuracy[0]:.1%} to "
            f"{curve.accuracy[-1]:.1%} in {curve.steps[-1]} ({curve.seconds[-1]:.0f} s)",
            highlight=False,
        )
        return curve

    def report(self) -> None:
        """Print the table and the verdicts on the claim, and draw the figure."""
        targets = ", ".join(f"{self._targets[length]:.1%}" for length in self._config.lengths)
        title = f"to {OF_TEACHER:.0%} of the teacher's share of right links ({targets})"
        self._console.print(table_of(self._rows, title))
        for _, ratio in self._rows:
            if ratio is not None:
                self._console.print(
                    f"{ratio.length} tokens, {ratio.method}: {ratio} times OPD's steps; "
                    f"{ratio.verdict}",
                    highlight=False,
                )
        picture = self._out / "opd_vs_rl.png"
        ratios = [ratio for _, ratio in self._rows if ratio is not None]
        draw_ratios(picture, [row for row, _ in self._rows], ratios)
        self._console.print(
            f"all curves are in {self._save()}, drawn in {picture}", highlight=False
        )

    def _save(self) -> Path:
        path = self._out / "opd_vs_rl.json"
        contents = {
            "targets": self._targets,
            "rows": [asdict(row) for row, _ in self._rows],
            "ratios": [asdict(ratio) for _, ratio in self._rows if ratio is not None],
            "curves": [asdict(curve) for curve in self._curves],
        }
        path.write_text(json.dumps(contents, indent=1) + "\n")
        return path


class _MethodRun:
    """One run. It resumes where it ended, and stops once the target is held."""

    def __init__(self, config: RolloutConfig, length: int, method: Method) -> None:
        self._config, self._length, self._method = config, length, method
        self.directory = RunDirectory(config)

    def to_the_end(self, target: float | None, log: Console) -> None:
        """Run to the end. `target`: None if this run itself measures the teacher."""
        signals = Signals()

        def over() -> bool:
            aim = self.target() if target is None else target
            return not math.isinf(self.curve().steps_to(aim))

        def see(line: Mapping[str, float]) -> None:
            if line["step"] > 0 and "eval/links" in line and over():
                signals.received = signal.SIGINT

        if self._is_over(over):
            return
        try:
            cluster.run.run(self._config, log, Observer(line=see, signals=signals))
        except Interrupted:
            if not over():
                raise

    def _is_over(self, over: Callable[[], bool]) -> bool:
        lines = self.directory.read_metrics()
        last = max((line["step"] for line in lines if "eval/links" in line), default=0)
        return last >= self._config.steps or (last > 0 and over())

    def target(self) -> float:
        [links, *_] = [
            line["eval/teacher/links"]
            for line in self.directory.read_metrics()
            if "eval/teacher/links" in line
        ]
        return OF_TEACHER * links

    def curve(self) -> Curve:
        lines = self.directory.read_metrics()
        trained = [line for line in lines if "time/step" in line]
        seconds = [0.0, *accumulate(line["time/step"] for line in trained)]
        tokens = [0, *accumulate(int(line["train/tokens"]) for line in trained)]
        links = {int(line["step"]): line["eval/links"] for line in lines if "eval/links" in line}
        return Curve(
            length=self._length,
            method=self._method.name,
            lr=self._config.learner.lr,
            seed=self._config.seed,
            steps=tuple(links),
            accuracy=tuple(links.values()),
            seconds=tuple(seconds[step] for step in links),
            tokens=tuple(tokens[step] for step in links),
        )
