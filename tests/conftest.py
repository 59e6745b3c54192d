"""What every test shares: one torch thread, one Ray, one pair of tiny checkpoints."""

from __future__ import annotations

import os

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_memory_monitor_refresh_ms="0",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray
import torch
from hypothesis import settings
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.tokenizer import load_tokenizer
from tests.tiny import save_tokenizer, tiny_model_dir

torch.set_num_threads(1)
# The machines are shared: no test is judged by the clock, and every run tries the same examples.
settings.register_profile("isotherm", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("isotherm")


@dataclass(frozen=True)
class TinyPair:
    """Two models of one tokenizer, and prompts for them."""

    student: str
    teacher: str
    prompts: str


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    root = tmp_path_factory.mktemp("tiny-pair")
    student = tiny_model_dir(root, seed=1, hidden_size=32, layers=1)
    teacher = tiny_model_dir(root, seed=2)
    for directory in (student, teacher):
        save_tokenizer(directory)
    prompts = root / "prompts.jsonl"
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(4) for b in range(5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyPair(student=student, teacher=teacher, prompts=str(prompts))


@pytest.fixture(scope="session")
def tokenizer(tiny_pair: TinyPair) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_pair.student)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()
