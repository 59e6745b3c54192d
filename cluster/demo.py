"""`python -m cluster.demo out=DIR`: the main job, whole, on models that it makes itself.

two-digit sums -> a teacher that adds (SFT), a student that forgets to carry (SFT on a careless
book) -> OPD at T = 0.7 -> a table: accuracy and reverse KL, on sums that nobody was trained on
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import chz
from rich.console import Console
from rich.table import Table

from actors.config import EngineChoice
from cluster.command import run_command
from cluster.config_on_policy import OpdConfig
from cluster.config_supervised import SftConfig
from cluster.recipes.on_policy import run_on_policy
from cluster.recipes.supervised import run_sft
from cluster.run import RunFailed, ray_cluster
from distill.arithmetic import (
    ANSWER_TOKENS,
    Problems,
    train_tokenizer,
    write_careless_sft,
    write_prompts,
    write_sft,
)
from distill.errors import ConfigError
from distill.models import new_qwen3

HELD_OUT = 500
# How often the student's book forgets a carry.
FORGET_CARRY = 0.6
# What the demo promises; it fails, with exit code 1, if the promise is not kept.
TEACHER_AT_LEAST = 0.95
STUDENT_BEFORE_BELOW = 0.60
STUDENT_OF_TEACHER = 0.95


@chz.chz
class DemoConfig:
    """Distils a teacher of two-digit sums into a student that forgets to carry."""

    out: str = chz.field(
        doc="directory for data, models and runs; an earlier demo in it is removed"
    )
    temperature: float = chz.field(default=0.7, doc="rollout temperature T; on purpose not 1")
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: servers of our own; embedded: transformers in the actor's process; auto: "
        "sglang where it is installed",
    )
    steps: int = chz.field(default=120, doc="optimizer steps of the distillation")
    seed: int = chz.field(default=0, doc="seed of problems, models and training")


def demo(config: DemoConfig, console: Console) -> None:
    """Runs all stages and prints the table.

    Raises:
        RunFailed: an accuracy is not what the demo promises.
    """
    started = time.perf_counter()
    out = _fresh_directory(Path(config.out).resolve())
    problems = Problems.split(held_out=HELD_OUT, seed=config.seed)
    data = _write_data(out, problems, config.seed)
    distillation = _distillation(config, out, data)
    with ray_cluster(distillation):
        for name in ("teacher", "student"):
            console.rule(f"{name}: supervised fine-tuning")
            run_sft(_schooling(config, out, data, name), console)
        console.rule(f"on-policy distillation at T = {config.temperature:g}")
        run_on_policy(distillation, console)
    _report(out, time.perf_counter() - started, console)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    prompts: Path
    held_out: Path
    books: dict[str, Path]


def _fresh_directory(out: Path) -> Path:
    marker = out / ".isotherm-demo"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"out={out} is not empty and no demo made it; choose another out=")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    marker.touch()
    return out


def _write_data(out: Path, problems: Problems, seed: int) -> _Data:
    data = _Data(
        prompts=out / "prompts.jsonl",
        held_out=out / "held_out.jsonl",
        books={"teacher": out / "book.jsonl", "student": out / "careless_book.jsonl"},
    )
    write_prompts(data.prompts, problems.train)
    write_prompts(data.held_out, problems.held_out)
    write_sft(data.books["teacher"], problems.train)
    write_careless_sft(
        data.books["student"], problems.train, forget_carry=FORGET_CARRY, editions=4, seed=seed
    )
    for i, name in enumerate(data.books):
        start = out / "models" / f"{name}-untrained"
        tokenizer = train_tokenizer(start, problems.train)
        model = new_qwen3(
            vocab_size=len(tokenizer),
            hidden_size=64,
            layers=2,
            heads=4,
            context_length=32,
            eos_token_id=tokenizer.get_vocab()["<eos>"],
            pad_token_id=tokenizer.get_vocab()["<pad>"],
            seed=seed + 1 + i,
        )
        model.save_pretrained(start)
    return data


def _schooling(config: DemoConfig, out: Path, data: _Data, name: str) -> SftConfig:
    return SftConfig(
        model=str(out / "models" / f"{name}-untrained"),
        data=str(data.books[name]),
        out=str(out / name),
        steps=2000 if name == "student" else 1200,
        batch_size=128,
        lr=4e-3,
        lr_schedule="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        checkpoint_every=2000,
        seed=config.seed,
    )


def _distillation(config: DemoConfig, out: Path, data: _Data) -> OpdConfig:
    return OpdConfig(
        student=str(out / "student/final"),
        teacher=str(out / "teacher/final"),
        prompts=str(data.prompts),
        eval_prompts=str(data.held_out),
        eval_size=HELD_OUT,
        out=str(out / "opd"),
        temperature=config.temperature,
        engine=config.engine,
        steps=config.steps,
        prompts_per_step=64,
        group_size=4,
        max_new_tokens=ANSWER_TOKENS,
        lr=3e-4,
        lr_schedule="linear",
        warmup_steps=5,
        checkpoint_every=50,
        seed=config.seed,
    )


def _report(out: Path, seconds: float, console: Console) -> None:
    summary = json.loads((out / "opd/summary.json").read_text())
    before, after = summary["eval before"], summary["eval after"]
    teacher = summary["eval teacher"]
    table = Table(title=f"{HELD_OUT} held-out sums")
    for header in ("", "accuracy (greedy)", "reverse KL, nats/token"):
        table.add_column(header, justify="right" if header else "left")
    for name, metrics in (("student before", before), ("student after", after)):
        table.add_row(name, f"{metrics['eval/accuracy']:.1%}", f"{metrics['eval/reverse_kl']:.4f}")
    table.add_row("teacher", f"{teacher['eval/accuracy']:.1%}", "")
    console.print(table)
    console.print(
        f"{summary['tokens_per_s']:.0f} trained tokens per second; the whole demo took "
        f"{seconds:.0f} s\nthe student is in {summary['final']}, every step in "
        f"{out / 'opd/metrics.jsonl'}",
        highlight=False,
    )
    _keep_promises(before["eval/accuracy"], after["eval/accuracy"], teacher["eval/accuracy"])


def _keep_promises(before: float, after: float, teacher: float) -> None:
    if teacher < TEACHER_AT_LEAST:
        raise RunFailed(f"the teacher reached {teacher:.1%}, promised are {TEACHER_AT_LEAST:.0%}")
    if before >= STUDENT_BEFORE_BELOW:
        raise RunFailed(f"the student started at {before:.1%}, too good to show anything")
    if after < STUDENT_OF_TEACHER * teacher:
        raise RunFailed(
            f"the student ended at {after:.1%}, less than {STUDENT_OF_TEACHER:.0%} of the teacher"
        )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(DemoConfig, demo, argv)


if __name__ == "__main__":
    sys.exit(main())
