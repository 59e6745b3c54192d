"""Episodes per second of one task, played by `ToolUse` and by agents, on the embedded engine.

    python -m benchmarks.agents out=DIR [episodes=64] [rounds=5]

A tiny model, fine-tuned for 80 steps to call a calculator, answers products: about 20 tokens in two
turns, so that the cost of an agent outweighs that of the model. In each round every way plays the
same problems, alternately; ratios are medians over rounds.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import chz
from rich.console import Console
from rich.table import Table

import cluster.run
from actors.embedded.engine import EmbeddedEngine
from actors.envs.agent import Agent
from actors.rollout.episode import rollout_group
from cluster.command import run_command
from cluster.config.recipes import make
from cluster.demos.arithmetic import write_jsonl
from distill.engine import ScoringModel
from distill.envs.base import EnvContext, EnvDataset
from distill.envs.tool_use import ToolUse
from distill.rewards.registry import last_number
from distill.sampling import TrainSampling
from distill.tokenizer import load_tokenizer
from distill.tools.calculator import Calculator
from examples.agents import calculator
from examples.show.chat_worlds import (
    DIGITS_APART,
    product_prompts,
    product_rows,
    products,
    write_untrained,
)

GROUP_SIZE, NEW_TOKENS, CONTEXT = 4, 32, 640

WAYS = {
    "env=ToolUse": ToolUse(tools="calculator"),
    "module:function, one client kept": Agent(command="benchmarks.kept_client:solve"),
    "module:function": Agent(command="examples.agents.calculator:solve"),
    "a process per episode": Agent(command=f"{sys.executable} {calculator.__file__}"),
}


@chz.chz
class AgentsConfig:
    """Cost of an agent per episode."""

    out: str = chz.field(doc="directory of the models and prompts")
    episodes: int = chz.field(default=64, doc="episodes of a round, a multiple of 4")
    rounds: int = chz.field(default=5, doc="rounds, in each of which every way plays once")


def agents(config: AgentsConfig, console: Console) -> None:
    """Play the problems in every way, and print the table."""
    Path(config.out).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=config.out))
    model, prompts = _taught(work), work / "prompts.jsonl"
    write_jsonl(prompts, product_prompts(products(config.episodes // GROUP_SIZE, 1)))
    tokenizer = load_tokenizer(model)
    context = EnvContext(
        tokenizer=tokenizer,
        vocab_size=len(tokenizer),
        context_length=CONTEXT,
        max_new_tokens=NEW_TOKENS,
        reward=last_number,
    )
    engine = EmbeddedEngine(model_path=model, device="cpu", threads=1)
    datasets = {way: env(str(prompts), context) for way, env in WAYS.items()}
    seconds: dict[str, list[float]] = defaultdict(list)
    with asyncio.Runner() as runner:
        for dataset in datasets.values():  # kernels, and processes that are kept
            runner.run(_played(engine, dataset))
        for _ in range(config.rounds):
            for way, dataset in datasets.items():
                seconds[way].append(runner.run(_played(engine, dataset)))
    table = Table(title=f"{config.episodes} episodes, medians of {config.rounds} rounds")
    for heading in ("way", "ms an episode", "episodes/s, of env=ToolUse's"):
        table.add_column(heading)
    [plain, *_] = seconds.values()
    for way, each in seconds.items():
        ratio = median(a / b for a, b in zip(plain, each, strict=True))
        table.add_row(way, f"{median(each) / config.episodes * 1e3:.1f}", f"{ratio:.2f}")
    console.print(table)


async def _played(engine: ScoringModel, dataset: EnvDataset) -> float:
    """Seconds to play every problem once, all concurrently."""
    sampling = TrainSampling(temperature=0.7, max_new_tokens=NEW_TOKENS)
    began = time.perf_counter()
    groups = await asyncio.gather(
        *(
            rollout_group(
                engine, dataset.builder(problem, GROUP_SIZE), sampling, group_id=problem, seed=0
            )
            for problem in range(len(dataset))
        )
    )
    assert not any(group.metrics.get("rollout/failed_episodes") for group in groups)
    return time.perf_counter() - began


def _taught(work: Path) -> str:
    """Path of a model fine-tuned to call the calculator; it often does so correctly."""
    tools = [Calculator().schema]
    book = [{**row, "tools": tools} for row in product_rows(products(300, 0), guesses=0.0)]
    write_jsonl(work / "book.jsonl", book)
    write_untrained(str(work / "untrained"), book, DIGITS_APART, context_length=CONTEXT, seed=1)
    run = make(
        "sft",
        model=str(work / "untrained"), data=str(work / "book.jsonl"), out=str(work / "sft"),
        steps=80, batch_size=32, lr=4e-3, checkpoint_every=1000, local=True,
    )  # fmt: skip
    cluster.run.run(run, Console(quiet=True))
    return str(work / "sft/final")


if __name__ == "__main__":
    sys.exit(run_command(AgentsConfig, agents, None))
