"""`python -m cluster.evaluate model=DIR prompts=FILE,...`: a checkpoint at your serving decoder."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import chz
from rich.console import Console
from rich.table import Table

from actors.config import running_engines
from actors.rollout.evaluator import EvaluatedResponse, Evaluator
from cluster.command import run_command
from cluster.config.common import LocalEngineConfig, ModelSettings
from cluster.config.early_checks import WRITTEN, model_field
from cluster.config.env import EnvSettings
from cluster.config.evaluation import DecoderSettings, LengthSettings
from cluster.config.rows import ROWS, PromptSettings, RowCheck, reader_of, unweighted_sources
from cluster.config.teachers import LocalTeacherSettings
from cluster.jsonl_log import write_json
from distill.data.row_reader import RowReader
from distill.envs.base import TEACHER, EnvContext, EnvDataset, problems_of
from distill.errors import ConfigError
from distill.rewards.accuracy import CONFIDENCE
from distill.rewards.model_reward import REWARD_MODEL
from distill.rules import IN_MEMORY, at_least, needs, setting
from distill.sampling import TrainSampling
from distill.settings import ESSENTIAL, section_field
from distill.stops import StopTokens
from distill.tokenizer import check_same_tokenizer, load_tokenizer


@chz.chz
class EvaluatedSettings(PromptSettings):
    """Prompts of an evaluation, and how their columns are read."""

    source: str | None = chz.field(
        default=None,
        doc="rows with `prompt` or `messages`, optionally `answer`, from any source of "
        "docs/data.md; several sources, separated by commas, are evaluated separately, each under "
        "its name",
        metadata=ESSENTIAL | ROWS,
    )


@chz.chz
class EvaluatedDecoderSettings(DecoderSettings):
    """The serving decoder, and the number of problems."""

    size: int | None = setting(
        at_least(1),
        default=None,
        doc="number of problems of each source to evaluate, from the first; default: all",
    )


@chz.chz
class KlTeacherSettings(LocalTeacherSettings):
    """The teacher towards which KL(p_T || q_T) is evaluated."""

    model: str | None = model_field(
        default=None,
        doc="checkpoint of a teacher, to also evaluate KL(p_T || q_T) at temperature=T",
    )


@chz.chz
class KlSamplingSettings(LengthSettings):
    """Length of responses, and the samples for the KL towards a teacher."""

    temperature: float | None = chz.field(
        default=None, doc="temperature T of the KL towards teacher="
    )
    group_size: int = setting(
        at_least(1),
        IN_MEMORY,
        needs("teacher.model"),
        default=4,
        doc="samples per prompt for the KL towards teacher=",
    )


@chz.chz
class EvaluateConfig(
    EnvSettings,
    LocalEngineConfig,
):
    """Evaluate a model on prompts: its responses, and its accuracy where prompts have answers."""

    model: ModelSettings = section_field(ModelSettings)
    data: EvaluatedSettings = section_field(EvaluatedSettings)
    teacher: KlTeacherSettings = section_field(KlTeacherSettings)
    sampling: KlSamplingSettings = section_field(KlSamplingSettings)
    eval: EvaluatedDecoderSettings = section_field(EvaluatedDecoderSettings)
    out: str | None = chz.field(
        default=None,
        doc="file for the metrics and every response, as JSON",
        metadata=ESSENTIAL | WRITTEN,
    )

    @chz.validate
    def _consistent(self) -> None:
        self.data.check(self.env)
        self.files()
        if (self.teacher.model is None) != (self.sampling.temperature is None):
            raise ConfigError(
                "teacher= and temperature= go together: KL(p_T || q_T) needs both",
                field="teacher.model",
            )
        self.teacher.require_checkpoint("evaluation")
        if self.sampling.temperature is not None:
            self.train_sampling()

    def files(self) -> Mapping[str, str | None]:
        """Prompt sources by name; the environment's name with None if it reads no prompts.

        Raises:
            ConfigError: a source is given twice or with a weight.
        """
        if self.data.source is None:
            return {type(self.env).__name__: None}
        sources = unweighted_sources("data.source", self.data.source)
        return {source.name: source.place for source in sources}

    def row_readers(self) -> Mapping[str, tuple[RowReader, RowCheck]]:
        """Reader of the prompts, and what checks a row's fields."""
        return {"data.source": self.data.row_reader(self.env)}

    def train_sampling(self) -> TrainSampling:
        assert self.sampling.temperature is not None
        return TrainSampling(
            temperature=self.sampling.temperature, max_new_tokens=self.sampling.max_new_tokens
        )


def evaluate(config: EvaluateConfig, console: Console) -> None:
    """Print a table of metrics; write `out` if it is set."""
    from distill.models.loading import context_length, ends_of, load_config, vocab_size

    tokenizer = load_tokenizer(config.model.path)
    model_config = load_config(config.model.path)
    ends = [ends_of(config.model.path, tokenizer)]
    if config.teacher.model is not None:
        of_teacher = load_tokenizer(config.teacher.model)
        check_same_tokenizer(tokenizer, of_teacher)
        ends.append(ends_of(config.teacher.model, of_teacher))
    stops = config.model.stops(tokenizer, ends, vocab_size(model_config))
    tokenizer = config.model.choose_template(tokenizer)
    read = reader_of(config.data, config.env.row_fields)
    setting = EnvContext(
        tokenizer=tokenizer,
        vocab_size=vocab_size(model_config),
        context_length=context_length(model_config),
        max_new_tokens=config.sampling.max_new_tokens,
        reward=config.reward.load(),
        read=read,
        long=config.data.long_rows(),
    )
    env = config.env.evaluation()
    evaluators = {
        name: Evaluator(_first(problems_of(env, path, setting), config.eval.size), tokenizer)
        for name, path in config.files().items()
    }
    read.require_columns()
    results = asyncio.run(_measure(config, evaluators, stops))
    console.print(f"stops at {stops.described(tokenizer)}", highlight=False)
    console.print(f"engine: {config.engine.kind_on(config.cluster.device)}", highlight=False)
    console.print(_table(config, results))
    if config.out is not None:
        report = {
            "model": config.model.path,
            "serving decoder": asdict(config.eval.sampling(config.sampling.max_new_tokens)),
            "data sets": {
                name: {"metrics": metrics, "responses": [asdict(each) for each in responses]}
                for name, (metrics, responses) in results.items()
            },
        }
        write_json("out", Path(config.out), report)
        console.print(f"every response is in {config.out}")


def _first(problems: EnvDataset, size: int | None) -> EnvDataset:
    count = len(problems)
    return problems.subset(range(count if size is None else min(size, count)))


Results = dict[str, tuple[dict[str, float], list[EvaluatedResponse]]]


async def _measure(
    config: EvaluateConfig, evaluators: Mapping[str, Evaluator], stops: StopTokens
) -> Results:
    """Metrics and responses of each data set, on one set of engines."""
    results: Results = {}
    asked = _models_to_ask(config)
    decoder = config.eval.sampling(config.sampling.max_new_tokens)
    engines = [config.engine_config(config.model.path, stops)]
    if config.teacher.model is not None:
        flags = config.teacher.server_flags
        engines.append(config.engine_config(config.teacher.model, stops, flags))
    async with running_engines(*engines) as (engine, *teachers):
        if teachers:
            asked[TEACHER] = teachers[0]
        for name, evaluator in evaluators.items():
            responses = await evaluator.respond(engine, decoder, asked)
            metrics = evaluator.summarise(responses)
            for teacher in teachers:
                metrics |= await evaluator.reverse_kl(
                    engine,
                    {"": teacher},
                    config.train_sampling(),
                    config.sampling.group_size,
                    asked,
                )
            results[name] = metrics, responses
    return results


def _models_to_ask(config: EvaluateConfig) -> dict[str, Any]:
    """Load the models that environments may call besides the evaluated one: the reward model."""
    if config.reward_model is None:
        return {}
    from actors.embedded.reward_model import EmbeddedRewardModel

    dtype = config.engine.dtype_on(config.cluster.device)
    return {
        REWARD_MODEL: EmbeddedRewardModel(
            model_path=config.reward_model, dtype=dtype, device=config.cluster.device
        )
    }


def _table(config: EvaluateConfig, results: Results) -> Table:
    """Table with a row per metric and a column per data set."""
    decoder = config.eval.sampling(config.sampling.max_new_tokens)
    how = "greedy" if decoder.temperature == 0 else f"temperature {decoder.temperature:g}"
    table = Table(
        title=f"{config.model.path}, {how}",
        caption=f"_low, _high: {CONFIDENCE:.0%} confidence interval",
    )
    table.add_column("metric")
    for name, (_, responses) in results.items():
        prompts = len(responses) // decoder.num_samples
        table.add_column(f"{name} ({prompts} prompts)", justify="right")
    for metric in dict.fromkeys(metric for metrics, _ in results.values() for metric in metrics):
        values = [metrics.get(metric) for metrics, _ in results.values()]
        table.add_row(metric, *("" if value is None else f"{value:.4f}" for value in values))
    return table


main = partial(run_command, EvaluateConfig, evaluate)


if __name__ == "__main__":
    sys.exit(main())
