"""Settings of small runs on the tiny checkpoints, and queues."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.opd import OpdConfig
from cluster.config.recipes import make
from cluster.config.supervised import SftConfig
from cluster.handles.calls import kill
from cluster.queue.group_queue import GroupQueue
from tests.conftest import TinyPair
from tests.queues import NewQueue, small_queue
from tests.rows import write_rows
from tests.waiting import DEADLINE_S


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


@pytest.fixture
def new_queue(ray_cluster: None, tmp_path: Path) -> Iterator[NewQueue]:
    made: list[GroupQueue] = []

    def new(**changes: Any) -> GroupQueue:
        given = {"journal": str(tmp_path / "ledger.jsonl"), "timeout_s": DEADLINE_S} | changes
        made.append(small_queue(**given))
        return made[-1]

    yield new
    for queue in made:
        kill(queue.actor)
