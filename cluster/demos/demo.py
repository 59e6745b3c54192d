"""`python -m cluster.demo out=DIR`: a complete distillation, on models that it trains itself.

two-digit sums -> a teacher that adds (SFT), a student that forgets to carry (SFT on answers
with errors) -> OPD at T = 0.7 -> a table: accuracy and reverse KL, on held-out sums

The two fine-tunings run in parallel, each in a process with one thread. All three runs are those
of `python -m cluster.train` with `local=True`. Their directories are in DIR, and their console
output is in DIR/*.log.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

import cluster.run
from cluster.base.outcomes import RunFailed
from cluster.command import run_and_report
from cluster.config.demos import DemoConfig
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.supervised import SftConfig
from cluster.console import log_console
from cluster.demos.arithmetic import (
    ANSWER_TOKENS,
    Problems,
    train_tokenizer,
    write_prompts,
    write_sft,
    write_sft_with_errors,
)
from cluster.demos.display import StageDisplay, curve, plot
from cluster.inspect.report.command import ReportConfig, report
from cluster.jsonl_log import read_lines, read_object
from cluster.recipes.context import Observer
from distill.models.loading import new_qwen3

HELD_OUT = 500
TEACHER, STUDENT = "teacher", "student"
# Probability with which a carry is dropped in the answers that each model is fine-tuned on.
FORGET_CARRY = {TEACHER: 0.0, STUDENT: 0.6}
SFT_STEPS = 800
# Accuracies that the demo must reach; otherwise it fails with exit code 1.
TEACHER_AT_LEAST = 0.95
STUDENT_BEFORE_BELOW = 0.60
STUDENT_OF_TEACHER = 0.95
_LOOKED_AT_S = 0.5


class _Failed(RunFailed):
    remedy = "Run the same command again to start from scratch"


def demo(config: DemoConfig, out: Path, console: Console) -> None:
    """Run all stages in `out`, which is empty, and print the table.

    Raises:
        RunFailed: a stage failed, or an accuracy is below what the demo must reach.
    """
    started = time.perf_counter()
    data = write_data(out, FORGET_CARRY, config.seed)
    opd = distillation(config, out, data)
    console.print(
        f"two-digit sums, in {out}: a teacher learns to add and, concurrently, a student learns\n"
        "from answers that forget to carry; then the student learns from the teacher, on-policy at "
        f"T = {config.temperature:g}",
        highlight=False,
    )
    tunings = [
        _FineTuning(
            sft_settings(out, data, name, config.seed), name, data.problems, config.seed + 1 + i
        )
        for i, name in enumerate(FORGET_CARRY)
    ]
    stages = StageDisplay(console)
    with stages.shown():
        _fine_tune(tunings, stages)
        _distil(opd, out / "opd.log", stages)
    _report(opd, time.perf_counter() - started, console)


class _FineTuning:
    """Supervised fine-tuning of one model in a separate process.

    The process is forked, so it starts without delay: all modules are already imported. No tensor
    has been computed before, so torch has no threads that a fork would lose.
    """

    def __init__(self, config: SftConfig, name: str, problems: Problems, seed: int) -> None:
        self.config, self.name = config, name
        self._log = Path(f"{config.out}.log")
        self._problems, self._seed = problems, seed
        self._process = get_context("fork").Process(target=self._run)

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def over(self) -> bool:
        """True if the process has ended.

        Raises:
            RunFailed: the process failed.
        """
        if self._process.exitcode:
            raise _Failed(f"training the {self.name} failed; its output is in {self._log}")
        return self._process.exitcode == 0

    def lines(self) -> list[dict[str, float]]:
        """Metrics of the steps so far."""
        path = Path(self.config.out) / "metrics.jsonl"
        return read_lines(path, {"step"}) if path.exists() else []

    def _run(self) -> None:
        with self._log.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        write_untrained(Path(self.config.model.path), self._problems, seed=self._seed)
        sys.exit(run_and_report(partial(cluster.run.run, self.config)))


def _fine_tune(tunings: Sequence[_FineTuning], stages: StageDisplay) -> None:
    """Train all models in parallel; all processes are stopped on return."""
    for tuning in tunings:
        tuning.start()
        stages.add(tuning.name, "supervised fine-tuning", tuning.config.steps, "train/loss", "loss")
    try:
        going = list(tunings)
        while going:
            time.sleep(_LOOKED_AT_S)
            going = [tuning for tuning in tunings if not tuning.over]
            for tuning in tunings:
                stages.observe(tuning.name, tuning.lines())
    finally:
        for tuning in tunings:
            tuning.stop()


def _distil(opd: OpdConfig, log: Path, stages: StageDisplay) -> None:
    stages.add(STUDENT, "learns from the teacher", opd.steps, "opd/reverse_kl", "reverse KL")
    lines: list[Mapping[str, float]] = []

    def show_line(line: Mapping[str, float]) -> None:
        lines.append(line)
        stages.observe(STUDENT, lines)

    with log.open("w") as file:
        cluster.run.run(opd, log_console(file), Observer(line=show_line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The task and its files: prompts for training, held-out prompts, and SFT data by model."""

    problems: Problems
    prompts: Path
    held_out: Path
    sft_data: dict[str, Path]


def write_data(out: Path, forget_carry: Mapping[str, float], seed: int) -> Data:
    """Write the prompts, and SFT data by name.

    `forget_carry` has the probability with which the answers drop a carry; with 0, all answers are
    correct.
    """
    problems = Problems.split(held_out=HELD_OUT, seed=seed)
    data = Data(
        problems=problems,
        prompts=out / "prompts.jsonl",
        held_out=out / "held_out.jsonl",
        sft_data={name: out / f"{name}-sft.jsonl" for name in forget_carry},
    )
    write_prompts(data.prompts, problems.train)
    write_prompts(data.held_out, problems.held_out)
    for name, often in forget_carry.items():
        if often:
            write_sft_with_errors(
                data.sft_data[name], problems.train, forget_carry=often, answers_each=4, seed=seed
            )
        else:
            write_sft(data.sft_data[name], problems.train)
    return data


def write_untrained(directory: Path, problems: Problems, *, seed: int) -> None:
    """Write a model with random weights, and its tokenizer."""
    tokenizer = train_tokenizer(directory, problems.train)
    model = new_qwen3(
        vocab_size=len(tokenizer),
        hidden_size=64,
        layers=2,
        heads=4,
        context_length=32,
        eos_token_id=tokenizer.get_vocab()["<eos>"],
        pad_token_id=tokenizer.get_vocab()["<pad>"],
        seed=seed,
    )
    model.save_pretrained(directory)


def sft_settings(out: Path, data: Data, name: str, seed: int) -> SftConfig:
    """Settings of the supervised fine-tuning of the untrained model `name`, into `out/name`."""
    return make(
        "sft",
        model=str(out / "models" / f"{name}-untrained"),
        data=str(data.sft_data[name]),
        out=str(out / name),
        local=True,
        threads=1,
        steps=SFT_STEPS,
        batch_size=128,
        lr=4e-3,
        lr_schedule="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        checkpoint_every=2000,
        seed=seed,
    )


def distillation(config: DemoConfig, out: Path, data: Data) -> OpdConfig:
    """Settings of the distillation of the two fine-tuned models."""
    return make(
        "opd",
        student=str(out / STUDENT / "final"),
        teacher=str(out / TEACHER / "final"),
        prompts=str(data.prompts),
        eval_source=str(data.held_out),
        eval_size=HELD_OUT,
        out=str(out / "opd"),
        temperature=config.temperature,
        engine=config.engine,
        local=True,
        estimator="sampled",  # one log-prob per token is enough here
        steps=config.steps,
        prompts_per_step=64,
        group_size=4,
        max_new_tokens=ANSWER_TOKENS,
        lr=3e-4,
        lr_schedule="linear",
        warmup_steps=5,
        eval_every=max(1, config.steps // 4),
        checkpoint_every=50,
        seed=config.seed,
    )


def _report(opd: OpdConfig, seconds: float, console: Console) -> None:
    run = Path(opd.out)
    report(ReportConfig(out=opd.out), Console(quiet=True))
    summary = read_object(run / "summary.json") or {}
    before, after = summary["eval before"], summary["eval after"]
    teacher = summary["eval teacher"]
    kl = curve(read_lines(run / "metrics.jsonl", {"step"}), "opd/reverse_kl")
    table = Table(title=f"{HELD_OUT} held-out sums")
    for header in ("", "accuracy (greedy)", "reverse KL, nats/token"):
        table.add_column(header, justify="right" if header else "left")
    for name, metrics in (("student before", before), ("student after", after)):
        table.add_row(name, f"{metrics['eval/accuracy']:.1%}", f"{metrics['eval/reverse_kl']:.4f}")
    table.add_row("teacher", f"{teacher['eval/accuracy']:.1%}", "")
    console.print(plot(kl, "reverse KL of the groups trained, nats/token"), highlight=False)
    console.print(table)
    console.print(
        f"{summary['tokens_per_s']:.0f} trained tokens per second; the whole demo took "
        f"{seconds:.0f} s\nthe report is {run / 'report.html'}\n\n{_next_commands(opd)}",
        highlight=False,
    )
    _check_results(before["eval/accuracy"], after["eval/accuracy"], teacher["eval/accuracy"])


def _next_commands(opd: OpdConfig) -> str:
    """Three follow-up commands that run unchanged."""
    here = Path.cwd()
    python, out = Path(sys.executable), Path(opd.out).parent
    if python.is_relative_to(here):
        python = python.relative_to(here)
    if out.is_relative_to(here):
        out = out.relative_to(here)
    return (
        "next: the same run on Ray, each component in a separate process; the run with another "
        "learning rate; the live report\n"
        f"  {python} -m cluster.train config={out}/opd out={out}/on-ray local=False\n"
        f"  {python} -m cluster.train config={out}/opd out={out}/slower lr=1e-4\n"
        f"  {python} -m cluster.report out={out}/opd serve=8080"
    )


def _check_results(before: float, after: float, teacher: float) -> None:
    if teacher < TEACHER_AT_LEAST:
        raise _Failed(f"the teacher reached {teacher:.1%}, less than {TEACHER_AT_LEAST:.0%}")
    if before >= STUDENT_BEFORE_BELOW:
        raise _Failed(f"the student started at {before:.1%}, too high to show an improvement")
    if after < STUDENT_OF_TEACHER * teacher:
        raise _Failed(
            f"the student ended at {after:.1%}, less than {STUDENT_OF_TEACHER:.0%} of the teacher's"
        )
