"""The model that scores pairs for DPO's reference."""

from pathlib import Path

import chz
import numpy as np
import pytest

import learner.memory
from cluster.config.recipes import make
from cluster.config.supervised import DpoConfig
from cluster.hosts.learner_actor import reference_logprobs
from distill.settings import changed
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.memory import FROZEN, TRAINED, estimate_memory
from learner.plan import Part
from learner.policy_loss import cross_entropy_loss
from tests.conftest import TinyPair
from tests.samples import training_row

ROWS = [training_row(3 + i, 4 + 2 * i, seed=i) for i in range(5)]


@pytest.fixture
def config(tiny_pair: TinyPair) -> LearnerConfig:
    return LearnerConfig.of(
        model=tiny_pair.student, lr=1e-2, total_steps=2, token_budget=40, device="cpu"
    )


def dpo(model: str, tmp_path: Path, **settings: str) -> DpoConfig:
    return make("dpo", model=model, data="pairs", out=str(tmp_path), **settings)


def test_the_learner_is_the_reference_before_its_first_step(
    config: LearnerConfig, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """With an adapter its base always is; no other model is loaded."""
    made = Learner(config, str(tmp_path))
    run = dpo(tiny_pair.student, tmp_path)
    assert reference_logprobs(run, made, config, resumed=False) == made.logprobs
    adapted = changed(config, lora_rank=2)
    other = Learner(adapted, str(tmp_path))
    for resumed in (False, True):
        assert reference_logprobs(run, other, adapted, resumed=resumed) == other.base_logprobs


@pytest.mark.parametrize("case", ["resumed", "another model"])
def test_any_other_reference_is_a_frozen_copy(
    config: LearnerConfig,
    tiny_pair: TinyPair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    theirs = tiny_pair.teacher if case == "another model" else tiny_pair.student
    expected = Learner(chz.replace(config, model=theirs), str(tmp_path)).logprobs(ROWS)
    made = Learner(config, str(tmp_path))
    made.step(Part(rows_D=ROWS, loss=cross_entropy_loss))
    run = dpo(tiny_pair.student, tmp_path, **({"reference": theirs} if "other" in case else {}))
    estimate = estimate_memory(theirs, FROZEN)
    trained = estimate_memory(theirs, TRAINED)
    assert estimate is not None and trained is not None and 4 * estimate.bytes == trained.bytes
    monkeypatch.setattr(learner.memory, "free_bytes", lambda device: estimate.bytes)
    scored = reference_logprobs(run, made, config, resumed=case == "resumed")(ROWS)
    for ours_N, theirs_N in zip(scored, expected, strict=True):
        np.testing.assert_allclose(ours_N, theirs_N, atol=1e-5)
