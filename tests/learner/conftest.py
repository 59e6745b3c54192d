"""Learners on the tiny student."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from learner.config import LearnerConfig, OptimizerConfig
from learner.learner import Learner
from tests.conftest import TinyPair

NewLearner = Callable[..., Learner]


@pytest.fixture
def new_learner(tiny_pair: TinyPair, tmp_path: Path) -> NewLearner:
    """new_learner(model=, token_budget=, total_steps=, **optimizer): nothing is clipped unasked."""

    def new(
        *,
        model: str = tiny_pair.student,
        token_budget: int = 4096,
        total_steps: int = 10,
        **optimizer: object,
    ) -> Learner:
        settings = {"lr": 1e-2, "max_grad_norm": 1e9} | optimizer
        config = LearnerConfig(
            model=model,
            optimizer=OptimizerConfig(**settings),
            total_steps=total_steps,
            token_budget=token_budget,
            device="cpu",
        )
        return Learner(config, str(tmp_path / "failed"))

    return new
