"""`python -m cluster.forecast student=DIR teacher=DIR prompts=FILE temperature=T`: will it work?

Both models answer some prompts, and both score all answers at T. This takes a minute instead of the
hours of a run, and predicts most causes of a failed run: a teacher that is no better than the
student, is the same as the student, or prefers tokens that the student never samples; and responses
that do not fit.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import chz
import numpy as np
from rich.console import Console
from rich.table import Table

from actors.config import choose_dtype, running_engines
from cluster.command import run_command
from cluster.config.common import LocalEngineConfig, ModelSettings
from cluster.config.early_checks import WRITTEN, model_field
from cluster.config.env import EnvSettings
from cluster.config.evaluation import SamplingSettings
from cluster.config.on_policy import RolloutConfig
from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.rows import PromptSettings
from cluster.config.teachers import LocalTeacherSettings
from cluster.jsonl_log import write_json
from distill.errors import ConfigError
from distill.objective.settings import ObjectiveConfig
from distill.rules import IN_MEMORY, at_least, setting
from distill.settings import ESSENTIAL, Section, changed, section_field

if TYPE_CHECKING:
    from cluster.config.rollout_checks import RolloutInputs


@chz.chz
class ForecastTeacherSettings(LocalTeacherSettings):
    """The teacher of the distillation to forecast."""

    model: str = model_field(doc="teacher checkpoint", metadata=ESSENTIAL)


@chz.chz
class ForecastSamplingSettings(SamplingSettings):
    """Answers of both models."""

    group_size: int = setting(
        at_least(2, "the noise within prompts is measured"),
        IN_MEMORY,
        default=2,
        doc="number of answers of each model to each prompt",
    )


@chz.chz
class ForecastPromptSettings:
    """Choice of the prompts that are answered."""

    section: ClassVar[Section] = Section.EVALUATION
    within: ClassVar[str] = "eval."

    size: int = setting(
        at_least(2, "the noise between prompts is measured"),
        default=64,
        doc="number of prompts to answer, chosen by the seed",
    )


@chz.chz
class ForecastConfig(
    EnvSettings,
    LocalEngineConfig,
):
    """Forecast a distillation from answers of student and teacher to some prompts."""

    model: ModelSettings = section_field(ModelSettings)
    teacher: ForecastTeacherSettings = section_field(ForecastTeacherSettings)
    data: PromptSettings = section_field(PromptSettings)
    sampling: ForecastSamplingSettings = section_field(ForecastSamplingSettings)
    eval: ForecastPromptSettings = section_field(ForecastPromptSettings)
    seed: int = chz.field(default=0, doc="seed for choosing the prompts")
    out: str | None = chz.field(
        default=None, doc="JSON file to write all numbers to", metadata=ESSENTIAL | WRITTEN
    )

    @chz.validate
    def _teacher_is_a_checkpoint(self) -> None:
        self.teacher.require_checkpoint("a forecast")

    def run(self) -> OpdConfig:
        """Settings of the distillation to forecast; nothing is written to its `out`."""
        return make(
            "opd",
            model=chz.asdict(self.model),
            teacher=self.teacher.model,
            data=chz.asdict(self.data),
            temperature=self.sampling.temperature,
            out="unused",
            max_new_tokens=self.sampling.max_new_tokens,
            eval_size=0,
            engine={"kind": self.engine.kind, "dtype": self.engine.dtype},
            device=self.cluster.device,
            env=self.env,
            reward=chz.asdict(self.reward),
        )


def forecast(config: ForecastConfig, console: Console) -> None:
    """Print the numbers and the verdict; write them to `out` if it is set."""
    from cluster.config.estimator import with_estimator  # imports torch; --help does not need it
    from cluster.config.learning_rate import suggested_lr
    from cluster.config.rollout_checks import check_rollout
    from cluster.inspect.forecast.judge import Pair, judge
    from distill.models.loading import ends_of, load_config
    from distill.tokenizer import load_tokenizer

    run, why = with_estimator(config.run())
    inputs = check_rollout(run)
    measured = asyncio.run(_measured(config, run, inputs))
    models = (config.model.path, config.teacher.model)
    tokenizers = [load_tokenizer(model) for model in models]
    ends = [ends_of(model, tokenizer) for model, tokenizer in zip(models, tokenizers, strict=True)]
    pair = Pair(
        same_ends=ends[0] == ends[1],
        same_template=tokenizers[0].chat_template == tokenizers[1].chat_template,
    )
    width = load_config(config.model.path).get_text_config().hidden_size
    found = judge(measured, pair, suggested_lr("opd", width, adapter=False))
    step = changed(run, prompts_per_step=found.prompts_per_step, group_size=found.group_size)
    scored = step.scored_by_teacher().share
    found = replace(
        found, teacher_tokens=scored * found.teacher_tokens, teacher_s=scored * found.teacher_s
    )
    console.print(_table(measured))
    for warning in found.warnings:
        console.print(f"- {warning}", highlight=False)
    console.print(f"verdict: {found.verdict}", highlight=False)
    console.print(why, highlight=False)
    if measured.noise_of != run.objective.estimator:
        console.print(
            f"the noise was measured with estimator={measured.noise_of}: "
            f"estimator={run.objective.estimator} has less noise, and may need fewer prompts per "
            "step than suggested here",
            highlight=False,
        )
    console.print(
        f"suggested settings: estimator={run.objective.estimator} lr={found.lr:g} "
        f"prompts_per_step={found.prompts_per_step} group_size={found.group_size}; in a step "
        f"the teacher scores {found.teacher_tokens:,.0f} tokens, in {found.teacher_s:.2g} s at "
        "the speed measured here",
        highlight=False,
    )
    if config.out is not None:
        settings = asdict(found) | {"estimator": run.objective.estimator}
        written = {"pair": asdict(pair), "measured": asdict(measured), "forecast": settings}
        write_json("out", Path(config.out), written)
        console.print(f"all numbers are in {config.out}", highlight=False)


async def _measured(config: ForecastConfig, run: RolloutConfig, inputs: RolloutInputs) -> Any:
    import torch

    from cluster.inspect.forecast.measure import TOP, measure
    from learner.config import LearnerConfig
    from learner.learner import Learner
    from learner.policy_loss import PolicyObjectiveLoss
    from learner.teachers import LocalTeachers

    count = min(config.eval.size, len(inputs.train))
    if count < 2:
        raise ConfigError(
            f"prompts={config.data.source} has {count} prompts; give at least two",
            field="data.source",
        )
    chosen_P = np.random.default_rng(config.seed).choice(len(inputs.train), count, replace=False)
    engines = [
        config.engine_config(config.model.path, inputs.stops),
        config.engine_config(config.teacher.model, inputs.stops, config.teacher.server_flags),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        learner = Learner(
            LearnerConfig.of(
                model=config.model.path,
                total_steps=1,
                device=config.cluster.device,
                dtype=choose_dtype("auto", config.cluster.device),
                threads=config.cluster.threads,
                stops=inputs.stops,
            ),
            dump_dir=scratch,
        )
        objective, event, teachers = ObjectiveConfig(), inputs.stops.event, None
        if run.objective.estimator == "full":
            objective = run.objective
            models = {name: each.model for name, each in run.teacher_models().items()}
            dtype = getattr(torch, config.engine.dtype_on(learner.device))
            teachers = LocalTeachers(models, dtype=dtype, device=learner.device, event=event)
        async with running_engines(*engines) as (student, teacher):
            sizes = [(await engine.info()).vocab_size for engine in (student, teacher)]
            return await measure(
                student,
                teacher,
                learner,
                inputs.train,
                chosen_P=sorted(chosen_P.tolist()),
                samples=config.sampling.group_size,
                sampling=run.sampling.train(),
                top=min(TOP, *sizes),
                loss=PolicyObjectiveLoss(objective=objective, teachers=teachers, stop_event=event),
            )


def _table(measured: Any) -> Table:
    table = Table(title="Responses of student and teacher, and their distance")
    for header in ("", "student", "teacher"):
        table.add_column(header, justify="left" if not header else "right")
    student, teacher = measured.student, measured.teacher

    def row(name: str, *values: float | None) -> None:
        table.add_row(name, *("-" if value is None else f"{value:.3g}" for value in values))

    row("tokens per response", student.tokens, teacher.tokens)
    row("responses that end with a stop token", student.eos_share, teacher.eos_share)
    row("responses that are cut off", student.cut_share, teacher.cut_share)
    row("reward", student.reward, teacher.reward)
    row(
        "KL to the other model on own samples, nats per token",
        measured.reverse_kl,
        measured.forward_kl,
    )
    row("positions at which the other model shares the likeliest tokens",
        measured.teacher_holds, measured.student_holds)  # fmt: skip
    row("reverse KL in the first quarter of a response", measured.kl_early, None)
    row("reverse KL in the last quarter of a response", measured.kl_late, None)
    row(
        f"noise scale of the gradient ({measured.noise_of}), responses",
        measured.noise.samples,
        None,
    )
    noise = measured.noise
    between = f"{noise.between:.3g} +- {noise.between_error:.2g}"
    table.add_row("squared noise within a prompt", f"{noise.within:.3g}", "-")
    table.add_row("squared noise between prompts, with the standard error", between, "-")
    return table


main = partial(run_command, ForecastConfig, forecast)
