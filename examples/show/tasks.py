"""`python -m examples.show task=tools|rl_tools|selfplay|condensed out=DIR`: a complete recipe.

Each task generates its data and tiny models, trains the models by SFT, runs one recipe, and prints
metrics before and after it. The exit code is 1 if a metric misses its target.

    task       recipe         what the student learns
    tools      opd_tools      to call a calculator, as its teacher does, instead of guessing
    rl_tools   rl_tools       the same from the reward alone, without a teacher
    selfplay   selfplay       tic-tac-toe; at first it often moves to a taken square
    condensed  opd_condensed  to read documents twice as long as its context, with notes
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import cluster.run
from cluster.base.outcomes import RunFailed
from cluster.config.on_policy import RolloutConfig
from cluster.config.recipes import make
from cluster.config.supervised import SftConfig
from cluster.demos.arithmetic import write_jsonl
from cluster.recipes.opening import connected
from cluster.run_files.out_directory import claimed_directory
from distill.envs.games.tic_tac_toe import TicTacToeGames
from distill.envs.reading import Reading
from examples.show.chat_worlds import (
    CAPITALS_APART,
    DIGITS_APART,
    SQUARES_APART,
    Row,
    documents,
    game_rows,
    product_prompts,
    product_rows,
    products,
    reading_rows,
    write_untrained,
)
from examples.show.config import ShowConfig, Task

STUDENT, TEACHER = "student", "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """Supervised fine-tuning on `rows`.

    `after`: name of the trained model to start from; None: a new model.
    """

    rows: Sequence[Row]
    steps: int
    lr: float = 4e-3
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A task's files and models.

    Attributes:
        fine_tuning: fine-tuning of each model by name, in order.
        prompts, held_out: rows of the recipe; empty if its environment generates problems.
        apart: see `train_chat_tokenizer`.
    """

    fine_tuning: Mapping[str, FineTuning]
    prompts: Sequence[Row] = ()
    held_out: Sequence[Row] = ()
    apart: str
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Target of a metric in the final evaluation: a lower or an upper bound."""

    metric: str
    title: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """A task: the function that builds its world, the recipe's settings, and its targets."""

    world: Callable[[int], World]
    recipe: str
    settings: Mapping[str, Any]
    targets: tuple[Target, ...]


def _products_world(seed: int) -> World:
    pairs = products(4300, seed)
    train, held_out = pairs[:4000], pairs[4000:]
    return World(
        fine_tuning={
            TEACHER: FineTuning(rows=product_rows(train, guesses=0.0), steps=350),
            STUDENT: _student_with_errors(product_rows(train, guesses=0.93, seed=seed)),
        },
        prompts=product_prompts(train),
        held_out=product_prompts(held_out),
        apart=DIGITS_APART,
        context_length=128,
    )


def _games_world(seed: int) -> World:
    return World(
        fine_tuning={
            TEACHER: FineTuning(rows=game_rows(3000, blunders=0.0, seed=seed), steps=800),
            STUDENT: _student_with_errors(game_rows(1000, blunders=0.6, seed=seed)),
        },
        apart=SQUARES_APART,
        context_length=160,
    )


_NUMBERS, _LINES_PER_PART = 40, 8


def _documents_world(seed: int) -> World:
    rows = documents(2300, _NUMBERS, seed)
    train, held_out = rows[:2000], rows[2000:]
    return World(
        fine_tuning={
            TEACHER: FineTuning(
                rows=reading_rows(train, lines_per_part=_LINES_PER_PART, forgets=0.0), steps=400
            ),
            STUDENT: _student_with_errors(
                reading_rows(train, lines_per_part=_LINES_PER_PART, forgets=0.9, seed=seed)
            ),
        },
        prompts=train,
        held_out=held_out,
        apart=CAPITALS_APART,
        context_length=48,
    )


def _student_with_errors(rows: Sequence[Row]) -> FineTuning:
    """A student: the teacher, fine-tuned on conversations with errors."""
    return FineTuning(rows=rows, steps=60, lr=1e-3, after=TEACHER)


_TOOLS = {"steps": 40, "prompts_per_step": 32, "group_size": 4, "max_new_tokens": 24, "lr": 3e-4}
_ACCURACY = Target(metric="eval/accuracy", title="accuracy (greedy)", at_least=0.9)
SHOWS: dict[Task, Show] = {
    "tools": Show(
        world=_products_world, recipe="opd_tools", settings=_TOOLS, targets=(_ACCURACY,)
    ),
    "rl_tools": Show(
        world=_products_world, recipe="rl_tools", settings=_TOOLS, targets=(_ACCURACY,)
    ),
    "selfplay": Show(
        world=_games_world,
        recipe="selfplay",
        settings={
            "env": TicTacToeGames(rules=False),
            "steps": 100, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 5e-4,
            "entropy_coef": 0.02, "eval_temperature": 0.7, "eval_size": 100, "eval_samples": 4,
        },
        targets=(
            Target(metric="eval/illegal", title="games lost by an illegal move", at_most=0.05),
            Target(metric="eval/won", title="games won against a random player", at_least=0.5),
        ),
    ),
    "condensed": Show(
        world=_documents_world,
        recipe="opd_condensed",
        settings={
            "env": Reading(terse=True, part_tokens=2 * _LINES_PER_PART),
            "steps": 60, "prompts_per_step": 16, "group_size": 4, "max_new_tokens": 4, "lr": 3e-4,
        },
        targets=(_ACCURACY,),
    ),
}  # fmt: skip


def show(config: ShowConfig, console: Console) -> None:
    """Generate the data and models, run the recipe, and print the table.

    Raises:
        RunFailed: a metric misses its target.
    """
    with claimed_directory(config.out, "show", console.print) as out:
        _show(config, out, console)


def _show(config: ShowConfig, out: Path, console: Console) -> None:
    started = time.perf_counter()
    chosen = SHOWS[config.task]
    world = chosen.world(config.seed)
    _write(out, world, config.seed)
    run = _run_config(config, chosen, world, out)
    with connected(run):
        for name in world.fine_tuning:
            console.rule(f"{name}: supervised fine-tuning")
            cluster.run.run(_sft_config(out, name, world.fine_tuning[name], config.seed), console)
        console.rule(f"recipe={run.recipe} at T = {config.temperature:g}")
        cluster.run.run(run, console)
    _report(chosen, Path(run.out), time.perf_counter() - started, console)


def _write(out: Path, world: World, seed: int) -> None:
    """Write prompts and fine-tuning rows, and an untrained model for each new model."""
    write_jsonl(out / "prompts.jsonl", world.prompts)
    write_jsonl(out / "held_out.jsonl", world.held_out)
    for number, (name, fine_tuning) in enumerate(world.fine_tuning.items()):
        write_jsonl(_sft_file(out, name), fine_tuning.rows)
        if fine_tuning.after is None:
            write_untrained(
                _untrained(out, name),
                fine_tuning.rows,
                world.apart,
                context_length=world.context_length,
                seed=seed + number,
            )


def _sft_file(out: Path, name: str) -> Path:
    return out / f"{name}-rows.jsonl"


def _untrained(out: Path, name: str) -> Path:
    return out / "models" / f"{name}-untrained"


def _sft_config(out: Path, name: str, fine_tuning: FineTuning, seed: int) -> SftConfig:
    start = (
        _untrained(out, name) if fine_tuning.after is None else out / fine_tuning.after / "final"
    )
    return make(
        "sft",
        model=str(start),
        data=str(_sft_file(out, name)),
        out=str(out / name),
        steps=fine_tuning.steps,
        batch_size=64,
        lr=fine_tuning.lr,
        lr_schedule="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        checkpoint_every=10_000,
        seed=seed,
    )


def _run_config(config: ShowConfig, chosen: Show, world: World, out: Path) -> RolloutConfig:
    settings: dict[str, Any] = {
        "student": str(out / STUDENT / "final"),
        "out": str(out / "run"),
        "temperature": config.temperature,
        "engine": config.engine,
        "lr_schedule": "linear",
        "warmup_steps": 5,
        "checkpoint_every": 50,
        "seed": config.seed,
    }
    if chosen.recipe.startswith("opd"):
        settings["teacher"] = str(out / TEACHER / "final")
    if world.prompts:
        settings["prompts"] = str(out / "prompts.jsonl")
        settings["eval_source"] = str(out / "held_out.jsonl")
        settings["eval_size"] = len(world.held_out)
    settings |= chosen.settings
    if config.steps is not None:
        settings["steps"] = config.steps
    run = make(chosen.recipe, **settings)
    assert isinstance(run, RolloutConfig)
    return run


def _report(chosen: Show, run: Path, seconds: float, console: Console) -> None:
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["eval before"], summary["eval after"]
    table = Table(title="on held-out problems")
    for header in ("", "before", "after", "target"):
        table.add_column(header, justify="right" if header else "left")
    for target in chosen.targets:
        bound = f">= {target.at_least:.0%}" if target.at_least else f"<= {target.at_most:.0%}"
        name = target.metric
        table.add_row(target.title, f"{before[name]:.1%}", f"{after[name]:.1%}", bound)
    if "eval/reverse_kl" in after:
        kls = (f"{metrics['eval/reverse_kl']:.4f}" for metrics in (before, after))
        table.add_row("reverse KL, nats/token", *kls, "")
    console.print(table)
    console.print(
        f"{seconds:.0f} s in all; the student is in {summary['final']}; "
        f"python -m cluster.report out={run} shows its rollouts",
        highlight=False,
    )
    for target in chosen.targets:
        if not target.is_met(after[target.metric]):
            raise RunFailed(f"{target.title}: {after[target.metric]:.1%} misses the target")
