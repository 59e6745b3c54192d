"""Settings of small runs on the tiny checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.on_policy import OpdConfig
from cluster.config.recipes import make
from cluster.config.supervised import SftConfig
from tests.conftest import TinyPair
from tests.rows import write_rows


@pytest.fixture
def opd(tiny_pair: TinyPair, tmp_path: Path) -> Callable[..., OpdConfig]:
    """opd(**changes): settings of a run that passes every check."""

    def settings(**changes: object) -> OpdConfig:
        return make(
            "opd",
            **{
                "student": tiny_pair.student, "teacher": tiny_pair.teacher,
                "prompts": tiny_pair.prompts, "out": str(tmp_path / "out"), "temperature": 0.7,
                "max_new_tokens": 8, "estimator": "sampled",
            }
            | changes,
        )  # fmt: skip

    return settings


@pytest.fixture
def sft(tiny_pair: TinyPair, tmp_path: Path) -> Callable[..., SftConfig]:
    """sft(**changes): the same for supervised fine-tuning."""
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(6)]
    data = write_rows(tmp_path / "data.jsonl", *rows)

    def settings(**changes: object) -> SftConfig:
        return make(
            "sft",
            **{"model": tiny_pair.student, "data": data, "out": str(tmp_path / "out")} | changes,
        )

    return settings
