"""Variance of the gradient at equal teacher time: scoring parts of responses or fewer responses.

    python -m benchmarks.teacher_budget out=DIR [rows=128] [new_tokens=64]

Each way of scoring less is unbiased: a token that is scored with probability s counts 1 / s. The
variances of a step's gradient are compared at equal time, in which n rows of variance v that cost c
each have v c / (n c). The printed ratio is v c over that of scoring every token of fewer rows.
Above 1, a way is worse than a smaller batch.

The gradient is that of the output projection at the sampled tokens of a student's own responses.
Its expectation over the choice of parts is a closed form of inner products of single tokens'
gradients, so only the responses themselves are sampled. A prompt is read once per group. A
teacher's token costs `slower` times the student's forward pass; the student samples a token for 1
and trains it for 3, scored or not.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.pair import docstrings, make_taught_pair
from cluster.command import run_command

Sizes = np.ndarray  # (rows, tokens), float64


@chz.chz
class TeacherBudgetConfig:
    """Variance of the gradient at equal time, for ways of scoring less."""

    out: str = chz.field(doc="directory of teacher_budget.json and of the pair")
    student: str | None = chz.field(default=None, doc="checkpoint; default: the bench's own")
    teacher: str | None = chz.field(default=None, doc="checkpoint of the same tokenizer")
    prompts: str | None = chz.field(default=None, doc="JSONL with `prompt`")
    temperature: float = chz.field(default=0.7, doc="of samples and of both models")
    rows: int = chz.field(default=128, doc="responses, one to a prompt")
    new_tokens: int = chz.field(default=64, doc="of each")
    group_size: int = chz.field(default=4, doc="responses that share the reading of a prompt")
    share: float = chz.field(default=0.25, doc="of the tokens that are scored, on average")
    slower: float = chz.field(default=8.0, doc="a teacher's token over one of the student")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Responses and their gradients.

    Attributes:
        products: inner products of single tokens' gradients, (rows, tokens, tokens).
        surprise: -log p_T of each token, (rows, tokens).
        mean_squared: |E g|^2, without bias.
        prompt: prompt tokens attributed to one response.
    """

    products: np.ndarray
    surprise: Sizes
    mean_squared: float
    prompt: float

    @property
    def tokens(self) -> int:
        return self.surprise.shape[1]


@torch.no_grad()
def measure(
    config: TeacherBudgetConfig, student: str, teacher: str, prompts: str, full: bool
) -> Measured:
    """Gradients of the sampled estimator, or of the whole divergence in each state."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student)
    p: Any = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval()
    q = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    asked = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    products, surprise, lengths = [], [], []
    total = torch.zeros(p.get_output_embeddings().weight.shape)
    squared, T = 0.0, config.temperature
    for prompt in asked[: config.rows]:
        start = tokenizer(prompt, return_tensors="pt")["input_ids"]
        row = p.generate(
            start, attention_mask=torch.ones_like(start), do_sample=True, temperature=T, top_k=0,
            top_p=1.0, min_new_tokens=config.new_tokens, max_new_tokens=config.new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        first = start.shape[1]
        seen = p(row, output_hidden_states=True)
        log_p = torch.log_softmax(seen.logits[0, first - 1 : -1] / T, dim=-1)
        log_q = torch.log_softmax(q(row).logits[0, first - 1 : -1] / T, dim=-1)
        hidden = seen.hidden_states[-1][0, first - 1 : -1]
        at_logits = _by_state(log_p, log_q) if full else _by_token(log_p, log_q, row[0, first:])
        products.append((at_logits @ at_logits.T * (hidden @ hidden.T)).double().numpy())
        surprise.append(-log_p.gather(1, row[0, first:, None])[:, 0].double().numpy())
        lengths.append(first)
        total += at_logits.T @ hidden
        squared += float(products[-1].sum())
    n = len(products)
    return Measured(
        products=np.stack(products),
        surprise=np.stack(surprise),
        mean_squared=(float(total.double().square().sum()) - squared) / (n * (n - 1)),
        prompt=float(np.mean(lengths)) / config.group_size,
    )


def _by_token(log_p: Tensor, log_q: Tensor, tokens: Tensor) -> Tensor:
    """(log p - log q)(y) (e_y - p): gradient of the sampled token."""
    gap = (log_p - log_q).gather(1, tokens[:, None])
    return gap * (torch.nn.functional.one_hot(tokens, log_p.shape[1]) - log_p.exp())


def _by_state(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (log p - log q - KL): gradient of the state's reverse KL."""
    gap = log_p - log_q
    return log_p.exp() * (gap - (log_p.exp() * gap).sum(dim=-1, keepdim=True))


# Ways of scoring a share of the tokens.


def uniform(measured: Measured, share: float) -> Sizes:
    return np.full_like(measured.surprise, share)


def by_surprise(measured: Measured, share: float) -> Sizes:
    """Probabilities in proportion to -log p_T, and at least a tenth of the share."""
    return np.stack([_scaled(size_T, share, share / 10) for size_T in measured.surprise])


def falling(measured: Measured, share: float) -> Sizes:
    """Prefixes: each further token is scored with the same probability."""
    low, high, s_T = 0.0, 1e3, np.ones(measured.tokens)
    for _ in range(100):  # the rate at which the mean is the share
        rate = (low + high) / 2
        s_T = np.exp(-rate * np.arange(measured.tokens) / measured.tokens)
        low, high = (rate, high) if s_T.mean() > share else (low, rate)
    return np.broadcast_to(s_T, measured.surprise.shape)


def by_position(measured: Measured, share: float) -> Sizes:
    """Prefixes by the decrease of gradients along responses, which is not known in advance."""
    size_T = np.sqrt(np.mean([np.diag(K) for K in measured.products], axis=0))
    smooth_T = np.polyval(np.polyfit(np.arange(len(size_T)), size_T, 1), np.arange(len(size_T)))
    return np.broadcast_to(
        _scaled(np.minimum.accumulate(smooth_T), share, share / 10), measured.surprise.shape
    )


def whole(measured: Measured, _share: float) -> Sizes:
    return np.ones_like(measured.surprise)


def _scaled(size_T: np.ndarray, share: float, least: float) -> np.ndarray:
    """min(1, c size), at least `least`, with the share as its mean."""
    low, high, s_T = 0.0, 1e6, size_T
    for _ in range(200):
        c = (low + high) / 2
        s_T = np.clip(c * size_T, least, 1.0)
        low, high = (c, high) if s_T.mean() < share else (low, c)
    return s_T


# Time and variance of these ways.


def second_moment(products: np.ndarray, s_T: np.ndarray, prefixes: bool) -> float:
    """E |sum_t 1[t is scored] g_t / s_t|^2 over the choice: of single tokens, or of prefixes."""
    together = np.minimum.outer(s_T, s_T) if prefixes else np.outer(s_T, s_T)
    if not prefixes:
        np.fill_diagonal(together, s_T)
    return float((products * together / np.outer(s_T, s_T)).sum())


def teacher_tokens(s_T: np.ndarray, prefixes: bool) -> float:
    """Mean tokens of a response up to the last scored one; all of them are read."""
    if prefixes:
        return float(s_T.sum())
    return float((1 - np.cumprod((1 - s_T)[::-1])).sum())


def compare(measured: Measured, config: TeacherBudgetConfig) -> list[dict[str, Any]]:
    """Each way, relative to scoring every token of fewer rows."""
    ways = {
        "every token": (whole, True),
        "uniform tokens": (uniform, False),
        "tokens by surprise": (by_surprise, False),
        "prefixes, constant rate": (falling, True),
        "prefixes, best by position": (by_position, True),
    }
    own = measured.tokens + 3 * (measured.prompt + measured.tokens)
    made: list[dict[str, Any]] = []
    for name, (chances, prefixes) in ways.items():
        s = chances(measured, config.share)
        moments = [
            second_moment(K, s_T, prefixes) for K, s_T in zip(measured.products, s, strict=True)
        ]
        read = measured.prompt + float(np.mean([teacher_tokens(s_T, prefixes) for s_T in s]))
        made.append(
            {
                "way": name,
                "scored": float(s.mean()),
                "teacher_tokens": read,
                "variance": float(np.mean(moments)) - measured.mean_squared,
                "seconds": config.slower * read + own,
            }
        )
    first = dict(made[0])
    for row in made:
        variance = row["variance"] / first["variance"]
        row["variance"] = variance
        row["at_equal_teacher_time"] = variance * row["teacher_tokens"] / first["teacher_tokens"]
        row["at_equal_time"] = variance * row["seconds"] / first["seconds"]
    return made


def run(config: TeacherBudgetConfig, console: Console) -> None:
    """Measure, print and write the results."""
    work = Path(config.out)
    work.mkdir(parents=True, exist_ok=True)
    if config.student is None or config.teacher is None or config.prompts is None:
        pair = make_taught_pair(work / "pair", docstrings())
        student, teacher, prompts = pair.student, pair.teacher, pair.prompts
    else:
        student, teacher, prompts = config.student, config.teacher, config.prompts
    report = {}
    for estimator in ("sampled", "full"):
        measured = measure(config, student, teacher, prompts, full=estimator == "full")
        report[estimator] = rows = compare(measured, config)
        table = Table("way", "scored", "teacher reads", "variance", "at equal teacher time",
                      "at equal time", title=f"estimator={estimator}")  # fmt: skip
        for row in rows:
            table.add_row(
                row["way"], f"{row['scored']:.0%}", f"{row['teacher_tokens']:.1f}",
                f"{row['variance']:.2f}", f"{row['at_equal_teacher_time']:.2f}",
                f"{row['at_equal_time']:.2f}",
            )  # fmt: skip
        console.print(table)
    (work / "teacher_budget.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(TeacherBudgetConfig, run, sys.argv[1:]))
