"""Canaries of frozen models in a learner find one changed number and another pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distill.handshake.canary import Drift
from distill.models.vocabulary_head import VocabularyHead
from learner.canaries import CopyAnswer, CopyQuestion, WatchedModel, watched
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.sharding import local
from learner.teachers import FrozenModel, LocalTeachers
from tests.conftest import TinyPair
from tests.learner.conftest import NewLearner
from tests.learner.two_workers import on_workers
from tests.samples import training_row

T = 0.7
FIRST = CopyQuestion(temperature=T, filler=(0, 6))
AGAIN = CopyQuestion(temperature=T)
WITH_BASE = CopyQuestion(temperature=T, base=True)


@pytest.fixture
def teachers(tiny_pair: TinyPair) -> LocalTeachers:
    return LocalTeachers({"": tiny_pair.teacher}, dtype=torch.float32, device="cpu")


def copy_in(teachers: LocalTeachers) -> FrozenModel:
    teacher = teachers.models[""]
    assert isinstance(teacher, FrozenModel)
    return teacher


@pytest.fixture
def copy(teachers: LocalTeachers) -> WatchedModel:
    [copy] = watched(teachers, token_budget=4096)
    return copy


def drift_of(answer: CopyAnswer, first: CopyAnswer) -> Drift:
    return first.scored.judge(answer.scored.answers[0])


def test_an_answer_is_read_off_the_distribution_that_the_loss_is_given(
    teachers: LocalTeachers, copy: WatchedModel
) -> None:
    answer = copy.answer(AGAIN).scored
    at_T = [request for request in answer.rows.requests if len(request.temperatures) == 2]
    rows = [
        training_row(1, len(request.tokens_T) - 1, temperature=T, tokens_T=request.tokens_T)
        for request in at_T
    ]
    expected_N = np.concatenate(teachers.models[""].logprobs(rows, 4096))
    np.testing.assert_allclose(answer.answers[0].at_T_N, expected_N, atol=1e-5)
    assert answer.answers[0].listed_N.shape == (16 * len(expected_N),)
    assert answer.info.dtype == "float32" and answer.info.vocab_size == 160


def test_one_changed_number_of_a_weight_is_found(
    teachers: LocalTeachers, copy: WatchedModel
) -> None:
    """No row shows the change: the embedding of a token that is in none of them."""
    first = copy.answer(FIRST)
    again = copy.answer(AGAIN)
    assert again.changed == () and again.digest == first.digest and not drift_of(again, first).why
    embedding = next(copy_in(teachers).model.parameters())
    seen = {int(token) for request in first.scored.rows.requests for token in request.tokens_T}
    unseen = next(token for token in range(160) if token not in seen)
    with torch.no_grad():
        embedding[unseen, 3] += 1e-3
    moved = copy.answer(AGAIN)
    assert len(moved.changed) == 1 and "embed_tokens" in moved.changed[0]
    assert moved.digest != first.digest
    assert copy.answer(AGAIN).changed == moved.changed, "not from one time to the next"


def test_a_pass_at_another_temperature_leaves_the_weights_and_is_found(
    teachers: LocalTeachers, copy: WatchedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copy.answer(FIRST)
    at_T = VocabularyHead.log_distribution
    monkeypatch.setattr(
        VocabularyHead, "log_distribution", lambda head, h, t, w: at_T(head, h, t * 0 + 1, w)
    )
    moved = copy.answer(AGAIN)
    assert moved.changed == () and "divided by T" in drift_of(moved, first).why


def test_an_adapter_s_base_is_watched_and_the_adapter_is_not(new_learner: NewLearner) -> None:
    learner = new_learner(lora_rank=2, lr=1e-2)
    [[first]] = learner.canary(WITH_BASE)
    assert first.teacher is None and first.changed == ()
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    [[same]] = learner.canary(WITH_BASE)
    assert same.changed == () and not drift_of(same, first).why
    with torch.no_grad():
        frozen = next(p for p in learner.model.parameters() if not p.requires_grad)
        frozen.add_(0.1)
    [[moved]] = learner.canary(WITH_BASE)
    assert len(moved.changed) == 1 and drift_of(moved, first).why


def _story(leader: Learner, _given: dict[str, Any]) -> Any:
    first = leader.canary(CopyQuestion(temperature=T, filler=(0, 6), base=True))
    again = leader.canary(WITH_BASE)
    with torch.no_grad():
        local(next(p for p in leader.model.parameters() if not p.requires_grad)).mul_(1.01)
    moved = leader.canary(WITH_BASE)
    return [
        [[each.changed for each in of_rank] for of_rank in asked] for asked in (again, moved)
    ], [[(each.teacher, each.digest) for each in of_rank] for of_rank in first]


@pytest.mark.slow
def test_of_a_base_that_is_sharded_each_worker_watches_its_share(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    config = LearnerConfig.of(model=tiny_pair.student, total_steps=1, device="cpu", lora_rank=2)
    (again, moved), [[(name, mine)], [(_, theirs)]] = on_workers(_story, config, tmp_path, (), {})
    assert name is None and mine != theirs
    assert again == [[()], [()]]
    [[of_first], [of_second]] = moved
    assert len(of_first) == 1 and of_second == ()
