"""Schedules on a job of long-tailed answers, with real engines, learner, ledger and pushes.

    python -m benchmarks.long_tails out=DIR [steps=60] [seeds=3] [engines=1,2]

The weights of student and teacher are written by hand, so that the distribution of lengths is
known. Letters belong to five classes. After a letter comes another letter of its class, or EOS.
Answers of a class have geometric lengths with a mean of 6, 12, 24, 48 or 96 tokens, truncated at
256; the 99th percentile is 7 times the mean. Teacher and student have the same probability of EOS
and differ in the letters. The student learns the letters, so training does not change the lengths.
All schedules train the same prompts in total.

    tokens/s  trained tokens, from the step at which the pipeline is in steady state
    wait      share of the time in which the learner waits for groups
    stale     mean versions between sampling and training of a token; age: largest of a group
    KL        exact reverse KL per token on held-out prompts, before all steps and after
"""

from __future__ import annotations

import json
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3ForCausalLM

import cluster.run
from cluster.command import run_command
from cluster.config.recipes import make
from distill.errors import ConfigError
from distill.models.loading import new_qwen3
from tests.tiny import EOS, PAD, VOCAB_SIZE, save_tokenizer

MEANS = (6, 12, 24, 48, 96)
LETTERS = 4  # of a class
MAX_NEW_TOKENS = 256
TEMPERATURE = 0.7
PROMPTS_PER_STEP, GROUP_SIZE = 8, 4
# Steps until the first long answers are trained.
SETTLING = 8
_ALPHABET = string.ascii_lowercase[: LETTERS * len(MEANS)]
# Ids of the letters: behind pad, eos and unk come string.printable's digits.
_FIRST = 3 + string.printable.index("a")

SCHEDULES: dict[str, dict[str, Any]] = {
    "H = 1": {"max_staleness": 1},
    "H = 4 (default)": {},
    "H = 4, 1.75 steps": {"groups_in_flight": 14},
}


@chz.chz
class LongTailsConfig:
    """Schedules on real jobs with long-tailed answers."""

    out: str = chz.field(doc="new directory of the models, the runs and long_tails.json")
    steps: int = chz.field(default=60, doc="steps of each run")
    seeds: int = chz.field(default=1, doc="runs of each schedule")
    engines: str = chz.field(default="1,2", doc="numbers of policy engines, with commas")


def write_pair(root: Path) -> tuple[str, str, str]:
    """Write student, teacher and prompts; returns the three paths."""
    student = _write(root / "student", layers=2, follows=0.0, seed=1)
    teacher = _write(root / "teacher", layers=4, follows=2.0, seed=2)
    chance = np.random.default_rng(0)
    classes = [_ALPHABET[i : i + LETTERS] for i in range(0, len(_ALPHABET), LETTERS)]
    rows = [
        {"prompt": "".join(chance.choice(list(classes[i % len(classes)]), 8))} for i in range(600)
    ]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return student, teacher, str(prompts)


def _write(directory: Path, *, layers: int, follows: float, seed: int) -> str:
    """Write a model whose next token depends on the last one alone, at TEMPERATURE.

    Args:
        follows: nats by which the next letter of the class is likelier than the class's others.
    """
    config = new_qwen3(
        vocab_size=VOCAB_SIZE, hidden_size=128, layers=layers, heads=2, context_length=512,
        eos_token_id=EOS, pad_token_id=PAD, seed=seed,
    ).config  # fmt: skip
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        layers_of: Any = model.model.layers
        for layer in layers_of:  # they add nothing yet, and can learn to
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding_VD, head_VD = model.model.embed_tokens.weight, model.lm_head.weight
        letters = slice(_FIRST, _FIRST + len(_ALPHABET))
        embedding_VD[letters] = torch.eye(len(_ALPHABET), embedding_VD.shape[1])
        # A unit vector has the norm sqrt(D) behind the final RMSNorm.
        scale = TEMPERATURE / embedding_VD.shape[1] ** 0.5
        head_VD[:, : len(_ALPHABET)] = scale * _logprobs_VL(follows)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


def _logprobs_VL(follows: float) -> torch.Tensor:
    """Log-probs of each token after each letter."""
    logprobs_VL = torch.full((VOCAB_SIZE, len(_ALPHABET)), -20.0)
    for at in range(len(_ALPHABET)):
        number, place = divmod(at, LETTERS)
        end = 1 / MEANS[number]
        weights = torch.zeros(LETTERS)
        weights[(place + 1) % LETTERS] = follows
        first = _FIRST + number * LETTERS
        logprobs_VL[first : first + LETTERS, at] = weights.log_softmax(0) + np.log1p(-end)
        logprobs_VL[EOS, at] = np.log(end)
    return logprobs_VL


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Columns of the table, see the module."""

    tokens_per_s: float
    wait: float
    stale: float
    age: float
    tokens: int
    before: float
    after: float


def measure_long_tails(
    root: Path, *, steps: int, seeds: int, engines: list[int], console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Run each schedule on each number of engines, alternately; outcomes by name."""
    pair = write_pair(root)
    found: dict[str, list[dict[str, Any]]] = {}
    for number in engines:
        for seed in range(seeds):
            for i, (schedule, settings) in enumerate(SCHEDULES.items()):
                name = f"{schedule}, {number} engine{'s' * (number > 1)}"
                out = root / f"run-{number}-{seed}-{i}"
                outcome = _run(pair, out, steps, seed, {**settings, "policy_engines": number})
                found.setdefault(name, []).append(asdict(outcome))
                console.print(f"{name}, seed {seed}: {outcome}", highlight=False)
    return found


def _run(
    pair: tuple[str, str, str], out: Path, steps: int, seed: int, settings: dict[str, Any]
) -> Outcome:
    student, teacher, prompts = pair
    config = make(
        "opd",
        student=student, teacher=teacher, prompts=prompts, out=str(out), seed=seed, steps=steps,
        temperature=TEMPERATURE, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS, lr=1e-4, engine="embedded", checkpoint_every=10_000,
        eval_size=32, estimator="sampled", **settings,
    )  # fmt: skip
    cluster.run.run(config, Console(quiet=True))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    made = [line for line in lines if "time/step" in line]
    usual = made[SETTLING:]
    seconds = sum(line["time/step"] for line in usual)
    summary = json.loads((out / "summary.json").read_text())
    return Outcome(
        tokens_per_s=sum(line["train/tokens"] for line in usual) / seconds,
        wait=sum(line["time/wait"] for line in usual) / seconds,
        stale=float(np.mean([line["staleness/mean"] for line in usual])),
        age=max(line["staleness/max"] for line in usual),
        tokens=int(sum(line["train/tokens"] for line in made)),
        before=summary["eval before"]["eval/reverse_kl"],
        after=summary["eval after"]["eval/reverse_kl"],
    )


def long_tails_table(found: dict[str, list[dict[str, Any]]]) -> Table:
    """Console table: means over seeds, and the smallest and largest KL."""
    table = Table(title="long-tailed answers")
    for column in ("", "tokens/s", "wait", "stale", "age", "tokens", "KL before", "KL after"):
        table.add_column(column, justify="right" if column else "left")
    for name, outcomes in found.items():
        of = {key: [outcome[key] for outcome in outcomes] for key in outcomes[0]}
        after = f"{np.mean(of['after']):.4f}"
        if len(outcomes) > 1:
            after += f" ({min(of['after']):.4f} to {max(of['after']):.4f})"
        table.add_row(
            name, f"{np.mean(of['tokens_per_s']):.0f}", f"{np.mean(of['wait']):.0%}",
            f"{np.mean(of['stale']):.2f}", f"{max(of['age']):.0f}", f"{np.mean(of['tokens']):.0f}",
            f"{np.mean(of['before']):.3f}", after,
        )  # fmt: skip
    return table


def print_table(config: LongTailsConfig, console: Console) -> None:
    root = Path(config.out)
    try:
        engines = [int(number) for number in config.engines.split(",")]
    except ValueError:
        raise ConfigError(f"engines={config.engines} must be numbers with commas: 1,2") from None
    root.mkdir(parents=True)
    found = measure_long_tails(
        root, steps=config.steps, seeds=config.seeds, engines=engines, console=console
    )
    (root / "long_tails.json").write_text(json.dumps(found, indent=1) + "\n")
    console.print(long_tails_table(found))


if __name__ == "__main__":
    raise SystemExit(run_command(LongTailsConfig, print_table, None))
