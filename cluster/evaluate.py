"""`python -m cluster.evaluate model=DIR prompts=FILE`: a checkpoint at your serving decoder."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import chz
from rich.console import Console
from rich.table import Table

from actors.config import choose_engine, running_engines
from actors.evaluate import Evaluator, Response, summarise
from actors.sglang_external import is_url
from cluster.command import run_command
from cluster.config import LocalEngineConfig
from distill.errors import ConfigError
from distill.models import context_length, load_config, vocab_size
from distill.prompts import load_prompts
from distill.rewards import load_reward
from distill.sampling import EvalSampling, TrainSampling
from distill.tokenizer import check_same_tokenizer, load_tokenizer


@chz.chz
class EvaluateConfig(LocalEngineConfig):
    """Responses of one model to a file of prompts; accuracy where the prompts have answers."""

    model: str = chz.field(doc="checkpoint to evaluate: a Hugging Face directory (or hub name)")
    prompts: str = chz.field(doc="JSONL with `prompt` or `messages`, optionally `answer`")
    max_new_tokens: int = chz.field(default=256, doc="longest response, tokens")
    eval_temperature: float = chz.field(default=0.0, doc="of the serving decoder; 0 is greedy")
    eval_top_p: float = chz.field(default=1.0, doc="top-p of the serving decoder; 1 is off")
    eval_top_k: int = chz.field(default=0, doc="top-k of the serving decoder; 0 is off")
    reward: str = chz.field(
        default="exact_match",
        doc="what accuracy is the mean of: exact_match, last_number or contains, against "
        "`answer`; or package.module:function of (response, answer)",
    )
    limit: int | None = chz.field(default=None, doc="use the first so many prompts")
    teacher: str | None = chz.field(
        default=None, doc="with temperature=T: also KL(p_T || q_T) towards this checkpoint"
    )
    temperature: float | None = chz.field(default=None, doc="the T of that KL")
    num_samples: int = chz.field(default=4, doc="samples per prompt for that KL")
    out: str | None = chz.field(default=None, doc="write metrics and every response here, as JSON")

    @chz.validate
    def _consistent(self) -> None:
        self.sampling()
        load_reward(self.reward)
        if (self.teacher is None) != (self.temperature is None):
            raise ConfigError("teacher= and temperature= go together: KL(p_T || q_T) needs both")
        if self.teacher is not None and is_url(self.teacher):
            raise ConfigError(
                f"teacher={self.teacher} must be a checkpoint here: evaluation shakes no hands, so "
                "whether a running server scores at T is not known. cluster.calibrate proves it"
            )
        if self.temperature is not None:
            self.train_sampling()
        if self.num_samples < 1:
            raise ConfigError(f"num_samples={self.num_samples} must be at least 1")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit={self.limit} must be at least 1")

    def sampling(self) -> EvalSampling:
        return EvalSampling(
            temperature=self.eval_temperature,
            max_new_tokens=self.max_new_tokens,
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
        )

    def train_sampling(self) -> TrainSampling:
        assert self.temperature is not None
        return TrainSampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)


def evaluate(config: EvaluateConfig, console: Console) -> None:
    """Prints a table; writes `out` if asked to."""
    tokenizer = load_tokenizer(config.model)
    model_config = load_config(config.model)
    prompts_P = load_prompts(
        config.prompts,
        tokenizer,
        vocab_size=vocab_size(model_config),
        context_length=context_length(model_config),
        max_new_tokens=config.max_new_tokens,
    )[: config.limit]
    if config.teacher is not None:
        check_same_tokenizer(tokenizer, load_tokenizer(config.teacher))
    evaluator = Evaluator(prompts_P, tokenizer, load_reward(config.reward))
    metrics, responses = asyncio.run(_measure(config, evaluator))
    console.print(f"engine: {choose_engine(config.engine)}", highlight=False)
    table = Table(title=f"{config.model}: {len(prompts_P)} prompts")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    if config.out is not None:
        report = {"metrics": metrics, "responses": [asdict(response) for response in responses]}
        Path(config.out).write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"every response is in {config.out}")


async def _measure(
    config: EvaluateConfig, evaluator: Evaluator
) -> tuple[dict[str, float], list[Response]]:
    models = [config.model] if config.teacher is None else [config.model, config.teacher]
    async with running_engines(*map(config.engine_config, models)) as (engine, *teachers):
        responses = await evaluator.respond(engine, config.sampling())
        metrics = summarise(responses)
        for teacher in teachers:
            metrics["eval/reverse_kl"] = await evaluator.reverse_kl(
                engine, {"": teacher}, config.train_sampling(), config.num_samples
            )
    return metrics, responses


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(EvaluateConfig, evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
