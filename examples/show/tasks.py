"""`python -m examples.show task=tools|rl_tools|selfplay|condensed out=DIR`: a recipe, whole.

Each task makes its data and its tiny models, teaches them by SFT, runs one recipe on them, and
prints what that changed. It fails, with exit code 1, if what it promises did not come true.

    tools       opd_tools     products by a calculator, which the teacher calls; its student guesses
    rl_tools    rl_tools      the same student, and nobody but the reward
    selfplay    selfplay      tic-tac-toe from players that take any square, often a taken one
    condensed   opd_condensed documents twice as long as the context, read part by part, with notes
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
    game_book,
    product_book,
    product_prompts,
    products,
    reading_book,
    write_untrained,
)
from examples.show.config import ShowConfig, Task

STUDENT, TEACHER = "student", "teacher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schooling:
    """Supervised fine-tuning on a book, of a new model or of what another one became."""

    book: Sequence[Row]
    steps: int
    lr: float = 4e-3
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A task's files and models.

    Attributes:
        schooling: of each model, in order.
        prompts, held_out: rows of the recipe; none where its environment makes its own problems.
        apart: see `train_chat_tokenizer`.
    """

    schooling: Mapping[str, Schooling]
    prompts: Sequence[Row] = ()
    held_out: Sequence[Row] = ()
    apart: str
    context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Bound on a metric of the final evaluation, at least or at most."""

    metric: str
    title: str
    at_least: float | None = None
    at_most: float | None = None

    def kept(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """A task: how its world is made, its run, and its promises."""

    world: Callable[[int], World]
    recipe: str
    settings: Mapping[str, Any]
    promises: tuple[Promise, ...]


def _products_world(seed: int) -> World:
    pairs = products(4300, seed)
    train, held_out = pairs[:4000], pairs[4000:]
    return World(
        schooling={
            TEACHER: Schooling(book=product_book(train, guesses=0.0), steps=350),
            STUDENT: _spoilt(product_book(train, guesses=0.93, seed=seed)),
        },
        prompts=product_prompts(train),
        held_out=product_prompts(held_out),
        apart=DIGITS_APART,
        context_length=128,
    )


def _games_world(seed: int) -> World:
    return World(
        schooling={
            TEACHER: Schooling(book=game_book(3000, blunders=0.0, seed=seed), steps=800),
            STUDENT: _spoilt(game_book(1000, blunders=0.6, seed=seed)),
        },
        apart=SQUARES_APART,
        context_length=160,
    )


_NUMBERS, _A_PART = 40, 8


def _documents_world(seed: int) -> World:
    rows = documents(2300, _NUMBERS, seed)
    train, held_out = rows[:2000], rows[2000:]
    return World(
        schooling={
            TEACHER: Schooling(
                book=reading_book(train, lines_a_part=_A_PART, forgets=0.0), steps=400
            ),
            STUDENT: _spoilt(reading_book(train, lines_a_part=_A_PART, forgets=0.9, seed=seed)),
        },
        prompts=train,
        held_out=held_out,
        apart=CAPITALS_APART,
        context_length=48,
    )


def _spoilt(book: Sequence[Row]) -> Schooling:
    """A student that was as good as the teacher, and then read a careless book."""
    return Schooling(book=book, steps=60, lr=1e-3, after=TEACHER)


_TOOLS = {"steps": 40, "prompts_per_step": 32, "group_size": 4, "max_new_tokens": 24, "lr": 3e-4}
_ACCURACY = Promise(metric="eval/accuracy", title="accuracy (greedy)", at_least=0.9)
SHOWS: dict[Task, Show] = {
    "tools": Show(
        world=_products_world, recipe="opd_tools", settings=_TOOLS, promises=(_ACCURACY,)
    ),
    "rl_tools": Show(
        world=_products_world, recipe="rl_tools", settings=_TOOLS, promises=(_ACCURACY,)
    ),
    "selfplay": Show(
        world=_games_world,
        recipe="selfplay",
        settings={
            "env": TicTacToeGames(rules=False),
            "steps": 100, "prompts_per_step": 32, "group_size": 8, "max_new_tokens": 4, "lr": 5e-4,
            "entropy_coef": 0.02, "eval_temperature": 0.7, "eval_size": 100, "eval_samples": 4,
        },
        promises=(
            Promise(metric="eval/illegal", title="games lost by an illegal move", at_most=0.05),
            Promise(metric="eval/won", title="games won against a random player", at_least=0.5),
        ),
    ),
    "condensed": Show(
        world=_documents_world,
        recipe="opd_condensed",
        settings={
            "env": Reading(terse=True, part_tokens=2 * _A_PART),
            "steps": 60, "prompts_per_step": 16, "group_size": 4, "max_new_tokens": 4, "lr": 3e-4,
        },
        promises=(_ACCURACY,),
    ),
}  # fmt: skip


def show(config: ShowConfig, console: Console) -> None:
    """Makes the world, runs the recipe, and prints the table.

    Raises:
        RunFailed: a promise was not kept.
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
        for name in world.schooling:
            console.rule(f"{name}: supervised fine-tuning")
            cluster.run.run(_schooling(out, name, world.schooling[name], config.seed), console)
        console.rule(f"recipe={run.recipe} at T = {config.temperature:g}")
        cluster.run.run(run, console)
    _report(chosen, Path(run.out), time.perf_counter() - started, console)


def _write(out: Path, world: World, seed: int) -> None:
    """Files of prompts and books, and an untrained model for each book of a new one."""
    write_jsonl(out / "prompts.jsonl", world.prompts)
    write_jsonl(out / "held_out.jsonl", world.held_out)
    for number, (name, schooling) in enumerate(world.schooling.items()):
        write_jsonl(_book(out, name), schooling.book)
        if schooling.after is None:
            write_untrained(
                _untrained(out, name),
                schooling.book,
                world.apart,
                context_length=world.context_length,
                seed=seed + number,
            )


def _book(out: Path, name: str) -> Path:
    return out / f"{name}-book.jsonl"


def _untrained(out: Path, name: str) -> Path:
    return out / "models" / f"{name}-untrained"


def _schooling(out: Path, name: str, schooling: Schooling, seed: int) -> SftConfig:
    start = _untrained(out, name) if schooling.after is None else out / schooling.after / "final"
    return make(
        "sft",
        model=str(start),
        data=str(_book(out, name)),
        out=str(out / name),
        steps=schooling.steps,
        batch_size=64,
        lr=schooling.lr,
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
    table = Table(title="on problems that nobody was trained on")
    for header in ("", "before", "after", "promised"):
        table.add_column(header, justify="right" if header else "left")
    for promise in chosen.promises:
        bound = f">= {promise.at_least:.0%}" if promise.at_least else f"<= {promise.at_most:.0%}"
        name = promise.metric
        table.add_row(promise.title, f"{before[name]:.1%}", f"{after[name]:.1%}", bound)
    if "eval/reverse_kl" in after:
        kls = (f"{metrics['eval/reverse_kl']:.4f}" for metrics in (before, after))
        table.add_row("reverse KL, nats/token", *kls, "")
    console.print(table)
    console.print(
        f"{seconds:.0f} s in all; the student is in {summary['final']}; "
        f"python -m cluster.report out={run} shows its rollouts",
        highlight=False,
    )
    for promise in chosen.promises:
        if not promise.kept(after[promise.metric]):
            raise RunFailed(f"{promise.title}: {after[promise.metric]:.1%} is not as promised")
