"""`python -m cluster.calibrate student=DIR teacher=DIR temperature=T`: the handshake alone."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import chz
from rich.console import Console

from actors.config import running_engines
from actors.sglang.address import is_url
from cluster.command import run_command
from cluster.config.common import LocalEngineConfig, ModelSettings
from cluster.config.early_checks import WRITTEN, model_field
from cluster.config.evaluation import TemperatureSettings
from cluster.config.teachers import LocalTeacherSettings
from cluster.jsonl_log import write_json
from cluster.run_files.tracking import agreement_table
from distill.handshake.comparison import CalibrationReport
from distill.settings import ESSENTIAL, Section, section_field
from distill.stops import StopTokens
from distill.tokenizer import (
    TokenizerProbe,
    check_same_tokenizer,
    fingerprint,
    load_tokenizer,
    probe_tokenizer,
)
from distill.types import FloatArray
from learner.config import LearnerConfig

if TYPE_CHECKING:
    from distill.objective.batching import TrainingRow


@chz.chz
class CalibratedTeacherSettings(LocalTeacherSettings):
    """The teacher whose scores are compared."""

    model: str = model_field(
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); it shares the student's tokenizer",
        metadata=ESSENTIAL,
    )


@chz.chz
class CalibrateConfig(LocalEngineConfig):
    """Check that student, teacher and learner score the same tokens alike, at T and 1.5 T."""

    section: ClassVar[Section] = Section.MODEL

    model: ModelSettings = section_field(ModelSettings)
    teacher: CalibratedTeacherSettings = section_field(CalibratedTeacherSettings)
    sampling: TemperatureSettings = section_field(TemperatureSettings)
    out: str | None = chz.field(
        default=None, doc="file for the report, as JSON", metadata=ESSENTIAL | WRITTEN
    )


def calibrate(config: CalibrateConfig, console: Console) -> None:
    """Print the agreement table; raise CalibrationError (exit code 3) on disagreement."""
    # These import torch, which settings must not.
    from distill.models.loading import ends_of, load_config, vocab_size

    student = load_tokenizer(config.model.path)
    prints = {"student": asdict(fingerprint(student))}
    ends: list[frozenset[int] | None] = [ends_of(config.model.path, student)]
    if not is_url(config.teacher.model):  # the handshake checks a running server
        teacher = load_tokenizer(config.teacher.model)
        check_same_tokenizer(student, teacher)
        prints["teacher"] = asdict(fingerprint(teacher))
        ends.append(ends_of(config.teacher.model, teacher))
    else:
        ends.append(None)
    stops = config.model.stops(student, ends, vocab_size(load_config(config.model.path)))
    report = asyncio.run(_handshake(config, probe_tokenizer(student), stops))
    console.print(f"stops at {stops.described(student)}", highlight=False)
    console.print(f"engine: {config.engine.kind_on(config.cluster.device)}", highlight=False)
    console.print(agreement_table(report))
    console.print(report.verdict(), highlight=False)
    if config.out is not None:
        made = report.to_json() | {"tokenizers": prints, "stop_tokens": stops.to_json()}
        write_json("out", Path(config.out), made)
    report.require_agreement()


async def _handshake(
    config: CalibrateConfig, tokenizer: TokenizerProbe, stops: StopTokens
) -> CalibrationReport:
    from cluster.handshake.handshake import handshake
    from learner.learner import Learner  # imports torch, which settings must not

    with tempfile.TemporaryDirectory() as scratch:
        learner_config = LearnerConfig.of(
            model=config.model.path,
            total_steps=1,
            device=config.cluster.device,
            threads=config.cluster.threads,
            stops=stops,
        )
        learner = Learner(learner_config, dump_dir=scratch)

        async def learner_logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
            return learner.logprobs(rows_D)

        engines = [
            config.engine_config(config.model.path, stops),
            config.engine_config(config.teacher.model, stops, config.teacher.server_flags),
        ]
        async with running_engines(*engines) as (policy, teacher):
            return await handshake(
                policies={"policy": policy},
                teachers={"teacher": teacher},
                learner=learner_logprobs,
                tokenizer=tokenizer,
                temperature=config.sampling.temperature,
                learner_dtype=learner_config.dtype,
            )


main = partial(run_command, CalibrateConfig, calibrate)


if __name__ == "__main__":
    sys.exit(main())
