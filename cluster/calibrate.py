"""`python -m cluster.calibrate student=DIR teacher=DIR temperature=T`: the handshake by itself."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import chz
from rich.console import Console

from actors.config import EngineConfig
from cluster.command import run_command
from cluster.handshake import handshake
from cluster.tracking import agreement_table
from distill.batching import TrainingRow
from distill.calibration import CalibrationReport
from distill.sampling import check_temperature
from distill.tokenizer import check_same_tokenizer, load_tokenizer
from distill.types import FloatArray
from learner.config import LearnerConfig
from learner.learner import Learner


@chz.chz
class CalibrateConfig:
    """Do student, teacher and learner score the same tokens alike, at T and a second T?"""

    student: str = chz.field(doc="student checkpoint: a Hugging Face directory (or hub name)")
    teacher: str = chz.field(doc="teacher checkpoint; shares the student's tokenizer")
    temperature: float = chz.field(doc="the rollout temperature T > 0 to prove")
    engine: Literal["embedded"] = chz.field(
        default="embedded", doc="embedded: transformers in this process"
    )
    dtype: Literal["float32", "bfloat16"] = chz.field(default="float32", doc="engine precision")
    device: Literal["auto", "cpu", "cuda"] = chz.field(default="auto", doc="where it runs")
    threads: int = chz.field(default=2, doc="torch threads on CPU")
    out: str | None = chz.field(default=None, doc="write the report here, as JSON")

    @chz.validate
    def _in_range(self) -> None:
        check_temperature(self.temperature, "temperature")


def calibrate(config: CalibrateConfig, console: Console) -> None:
    """Prints the agreement table; raises CalibrationError (exit code 3) on disagreement."""
    check_same_tokenizer(load_tokenizer(config.student), load_tokenizer(config.teacher))
    report = asyncio.run(_handshake(config))
    console.print(agreement_table(report))
    if config.out is not None:
        Path(config.out).write_text(json.dumps(report.to_json(), indent=1) + "\n")
    report.require_agreement()


async def _handshake(config: CalibrateConfig) -> CalibrationReport:
    policy, teacher = (
        engine_config.engine_class(**engine_config.arguments())
        for engine_config in (
            EngineConfig(
                kind=config.engine,
                model=model,
                dtype=config.dtype,
                device=config.device,
                threads=config.threads,
            )
            for model in (config.student, config.teacher)
        )
    )
    with tempfile.TemporaryDirectory() as scratch:
        learner = Learner(
            LearnerConfig(
                model=config.student, total_steps=1, device=config.device, threads=config.threads
            ),
            dump_dir=scratch,
        )

        async def learner_logprobs(rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
            return learner.logprobs(rows_D)

        return await handshake(
            policy=policy,
            teacher=teacher,
            learner=learner_logprobs,
            temperature=config.temperature,
        )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return run_command(CalibrateConfig, calibrate, argv)


if __name__ == "__main__":
    sys.exit(main())
