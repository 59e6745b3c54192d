"""`python -m cluster.demo out=DIR`: the main job, whole, on models that it makes itself.

two-digit sums -> a teacher that adds (SFT), a student that forgets to carry (SFT on a careless
book) -> OPD at T = 0.7 -> a table: accuracy and reverse KL, on sums that nobody was trained on
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.config.demos import DemoConfig
from cluster.config.on_policy import OpdConfig
from cluster.config.supervised import SftConfig
from cluster.demos.arithmetic import (
    ANSWER_TOKENS,
    Problems,
    train_tokenizer,
    write_careless_sft,
    write_prompts,
    write_sft,
)
from cluster.early_ends import RunFailed
from cluster.recipes.common import connected
from cluster.recipes.on_policy import run_on_policy
from cluster.recipes.supervised import run_sft
from distill.errors import ConfigError
from distill.models.loading import new_qwen3

HELD_OUT = 500
TEACHER, STUDENT = "teacher", "student"
# How often each model's book forgets a carry.
FORGET_CARRY = {TEACHER: 0.0, STUDENT: 0.6}
# What the demo promises; it fails, with exit code 1, if the promise is not kept.
TEACHER_AT_LEAST = 0.95
STUDENT_BEFORE_BELOW = 0.60
STUDENT_OF_TEACHER = 0.95


def demo(config: DemoConfig, console: Console) -> None:
    """Runs all stages and prints the table.

    Raises:
        RunFailed: an accuracy is not what the demo promises.
    """
    started = time.perf_counter()
    out = fresh_directory(Path(config.out).resolve(), "demo")
    data = write_data(out, FORGET_CARRY, config.seed)
    opd = distillation(config, out, data)
    with connected(opd):
        for name in FORGET_CARRY:
            console.rule(f"{name}: supervised fine-tuning")
            run_sft(schooling(out, data, name, config.seed), console)
        console.rule(f"on-policy distillation at T = {config.temperature:g}")
        run_on_policy(opd, console)
    _report(out, time.perf_counter() - started, console)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Files of the task: prompts to train on, held-out ones, a book per model."""

    prompts: Path
    held_out: Path
    books: dict[str, Path]


def fresh_directory(out: Path, command: str) -> Path:
    """`out`, empty; what an earlier run of the command left there is removed.

    Raises:
        ConfigError: it holds what the command did not make.
    """
    marker = out / f".isotherm-{command}"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"out={out} is not empty and no {command} made it; choose another out=")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    marker.touch()
    return out


def write_data(out: Path, forget_carry: Mapping[str, float], seed: int) -> Data:
    """Writes prompts, and for each name a book and an untrained model that is to learn from it.

    `forget_carry` is how often each book forgets a carry; 0 makes the book that is always right.
    """
    problems = Problems.split(held_out=HELD_OUT, seed=seed)
    data = Data(
        prompts=out / "prompts.jsonl",
        held_out=out / "held_out.jsonl",
        books={name: out / f"{name}-book.jsonl" for name in forget_carry},
    )
    write_prompts(data.prompts, problems.train)
    write_prompts(data.held_out, problems.held_out)
    for i, (name, often) in enumerate(forget_carry.items()):
        if often:
            write_careless_sft(
                data.books[name], problems.train, forget_carry=often, editions=4, seed=seed
            )
        else:
            write_sft(data.books[name], problems.train)
        _write_untrained(_untrained(out, name), problems, seed + 1 + i)
    return data


def _untrained(out: Path, name: str) -> Path:
    return out / "models" / f"{name}-untrained"


def _write_untrained(directory: Path, problems: Problems, seed: int) -> None:
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


def schooling(out: Path, data: Data, name: str, seed: int) -> SftConfig:
    """Supervised fine-tuning of the untrained model `name` on its book, into `out/name`."""
    return SftConfig(
        model=str(_untrained(out, name)),
        data=str(data.books[name]),
        out=str(out / name),
        # Four editions of a careless book are more to learn than one of the teacher's.
        steps=1200 if name == TEACHER else 2000,
        batch_size=128,
        lr=4e-3,
        lr_schedule="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        checkpoint_every=2000,
        seed=seed,
    )


def distillation(config: DemoConfig, out: Path, data: Data) -> OpdConfig:
    """What the demo runs, once its models have been to school."""
    return OpdConfig(
        student=str(out / STUDENT / "final"),
        teacher=str(out / TEACHER / "final"),
        prompts=str(data.prompts),
        eval_prompts=str(data.held_out),
        eval_size=HELD_OUT,
        out=str(out / "opd"),
        temperature=config.temperature,
        engine=config.engine,
        estimator="sampled",  # one log-prob a token is enough here
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
