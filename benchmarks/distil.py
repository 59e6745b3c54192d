"""Progress of each estimator of the teacher's term in a fixed number of steps, one run each.

    python -m benchmarks.distil out=DIR [student=DIR teacher=DIR prompts=FILE] [steps=60]

All runs have the same prompts, seed and learning rate, run in one process, and are synchronous.
They are compared by the exact KL(p_T || q_T) over the whole vocabulary, at each token that the
trained student samples on held-out prompts. Seconds are of training alone; on a shared machine they
are not meaningful.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import cluster.run
from actors.embedded.engine import EmbeddedEngine
from benchmarks.pair import docstrings, given_pair, make_taught_pair
from cluster.command import run_command
from cluster.config.estimator import state_bytes
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from distill.engine import GenerateRequest
from distill.errors import ConfigError
from distill.models.loading import load_causal_lm
from distill.objective.divergences import kl
from distill.sampling import TrainSampling
from distill.tokenizer import load_tokenizer

JUDGED_PROMPTS = 48


def _estimators(k: int, teacher: str) -> dict[str, dict[str, Any]]:
    top: dict[str, Any] = {"estimator": "top_k", "teacher_top_k": k}
    return {
        "sampled": {"estimator": "sampled"},
        f"top_k of the teacher, {k}": top | {"top_k_from": "teacher"},
        f"top_k of the student, {k}": top | {"top_k_from": "student"},
        f"union, {k} and {k}": top | {"top_k_from": "union"},
        "full": {"estimator": "full"},
        "full from hidden states": {"estimator": "full", "teacher.head": teacher},
    }


@chz.chz
class DistilConfig:
    """Estimators on one pair, compared by exact KL."""

    out: str = chz.field(doc="directory of the runs and of distil.json")
    student: str | None = chz.field(default=None, doc="checkpoint; default: made, 1.3 M parameters")
    teacher: str | None = chz.field(default=None, doc="checkpoint; default: made, 5.8 M parameters")
    prompts: str | None = chz.field(
        default=None, doc="JSONL; default: the standard library's prose"
    )
    temperature: float = chz.field(default=0.7, doc="T of everything")
    steps: int = chz.field(default=60, doc="optimizer steps, a multiple of 20: judged every 20th")
    top_k: int = chz.field(default=32, doc="tokens at which the teacher is asked")
    lr: float = chz.field(default=3e-4, doc="learning rate")
    only: str | None = chz.field(default=None, doc="only runs whose name contains this")
    settings: str = chz.field(default="{}", doc="more settings of every run, as a JSON object")

    @chz.validate
    def _in_range(self) -> None:
        given_pair(self.student, self.teacher, self.prompts)
        if self.steps < 20 or self.steps % 20:
            raise ConfigError(f"steps={self.steps} must be a multiple of 20")


def distil(config: DistilConfig, console: Console) -> None:
    """Train and judge, print the table, and write distil.json."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=out))
    given = given_pair(config.student, config.teacher, config.prompts)
    pair = given or make_taught_pair(work / "pair", docstrings())
    student, teacher = pair.student, pair.teacher
    trained, asked = split_prompts(pair.prompts, work)
    rows: list[dict[str, Any]] = []
    before = judge(student, teacher, asked, config.temperature)
    for name, settings in _estimators(config.top_k, teacher).items():
        if config.only and config.only not in name:
            continue
        settings = settings | json.loads(config.settings)
        run = make(
            "opd",
            student=student, teacher=teacher, prompts=str(trained), out=str(work / name),
            temperature=config.temperature, steps=config.steps, prompts_per_step=8, group_size=4,
            max_new_tokens=64, max_staleness=0, lr=config.lr, engine="embedded", local=True,
            eval_size=0, checkpoint_every=20, keep_every=20, keep="none", **settings,
        )  # fmt: skip
        cluster.run.run(run, console)
        kls = {
            step: judge(str(model), teacher, asked, config.temperature)
            for step, model in judged_weights(work / name)
        }
        seconds = [json.loads(line) for line in (work / name / "metrics.jsonl").open()]
        rows.append(
            {
                "estimator": name,
                "kl": kls,
                "seconds": sum(line["time/step"] for line in seconds if "time/step" in line),
                "bytes_per_token": bytes_of_teacher(run),
            }
        )
        (out / "distil.json").write_text(json.dumps({"before": before, "rows": rows}, indent=1))
        console.print(_table(before, rows))


def split_prompts(prompts: str, work: Path) -> tuple[Path, list[str]]:
    """Write the training prompts to a file; return it, and the last prompts for the judge."""
    lines = Path(prompts).read_text().splitlines(keepends=True)
    trained = work / "trained.jsonl"
    trained.write_text("".join(lines[:-JUDGED_PROMPTS]))
    return trained, [json.loads(line)["prompt"] for line in lines[-JUDGED_PROMPTS:]]


def judged_weights(run: Path) -> list[tuple[int, Path]]:
    """Step and model of each checkpoint."""
    found = sorted((run / "checkpoints").glob("step-*/model"))
    return [(int(path.parent.name.removeprefix("step-")), path) for path in found]


def bytes_of_teacher(run: OpdConfig) -> int:
    """Bytes per token of a teacher's answer.

    Float32 log-probs, with ids if the teacher chose the tokens. With a head: a hidden state. With
    estimator=full a copy in the learner sends nothing.
    """
    objective = run.objective
    if objective.estimator == "full":
        return sum(state_bytes(run, head)[0] for head in run.teacher_heads.values())
    return 4 * (1 + objective.asked_of_policy + 2 * objective.asked_of_teacher)


def judge(
    student: str, teacher: str, prompts: list[str], temperature: float, new_tokens: int = 64
) -> float:
    """Mean exact KL(p_T || q_T) over the student's own samples, two per prompt."""
    tokenizer = load_tokenizer(student)
    engine = EmbeddedEngine(model_path=student, device="cpu")
    requests = [
        GenerateRequest(
            prompt_tokens_T=np.array(tokenizer.encode(prompt), np.int32),
            sampling=TrainSampling(temperature=temperature, max_new_tokens=new_tokens),
            num_samples=2,
            seed=seed,
        )
        for seed, prompt in enumerate(prompts)
    ]

    async def sampled() -> list[Any]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    answers = asyncio.run(sampled())
    models = [
        load_causal_lm(path, dtype=torch.float32, device="cpu") for path in (student, teacher)
    ]
    total, tokens = 0.0, 0
    for request, samples in zip(requests, answers, strict=True):
        for sample in samples:
            start = len(request.prompt_tokens_T)
            chain_T = np.concatenate([request.prompt_tokens_T, sample.tokens_T])
            ids_1T = torch.from_numpy(chain_T.astype(np.int64))[None]
            with torch.no_grad():
                logits_NV = [
                    model(input_ids=ids_1T, use_cache=False).logits[0, start - 1 : -1]
                    for model in models
                ]
                log_p_NV, log_q_NV = (
                    (z_NV / temperature).log_softmax(dim=-1) for z_NV in logits_NV
                )
                total += kl(log_p_NV, log_q_NV).sum().item()
            tokens += len(sample.tokens_T)
    return total / tokens


def _table(before: float, rows: list[dict[str, Any]]) -> Table:
    steps = list(rows[0]["kl"])
    table = Table(title=f"KL(p_T || q_T) by the judge; before: {before:.2f}")
    table.add_column("estimator")
    for header in (*(f"step {step}" for step in steps), "seconds", "bytes a token"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row["estimator"],
            *(f"{row['kl'][step]:.2f}" for step in steps),
            f"{row['seconds']:.0f}",
            str(row["bytes_per_token"]),
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(DistilConfig, distil, None))
