"""estimator=full of a teacher that is the learner's own model, against a copy of that teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.checkpoint import CheckpointStore
from learner.config import ShadowRule
from learner.frozen import LocalTeachers
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.learner.conftest import NewLearner
from tests.learner.routing import other_experts
from tests.samples import training_row
from tests.weights import gather_all

FULL = ObjectiveConfig(estimator="full")
OWN = PolicyObjectiveLoss(objective=FULL, own_teacher=True)
EMA = ShadowRule(ema=0.8)
RULES = [None, ShadowRule(every=2), EMA]
NAMES = ["live", "lag", "ema"]
# A context that all share, and that pays to be run once.
CONTEXT_T = np.arange(40, 75, dtype=np.int32)


def rows(step: int) -> list[TrainingRow]:
    """Of some the teacher sees another context, of one it sees what the student saw."""
    told = [
        replace(
            training_row(3, 4 + i, seed=9 * step + i),
            teacher_context_T=CONTEXT_T[: 35 - i],
            teacher_replaces=3,
        )
        for i in range(3)
    ]
    made = [*told, training_row(2, 6, seed=step)]
    zeros = (np.zeros(len(row), np.float32) for row in made)
    return [
        replace(row, advantages_T=zeros_T, teacher_coef=1.0)
        for row, zeros_T in zip(made, zeros, strict=True)
    ]


def train(learner: Learner, first: int, steps: int) -> list[dict[str, float]]:
    made = []
    for step in range(first, first + steps):
        made.append(learner.step(Part(rows_D=rows(step), loss=OWN)))
        learner.follow(step + 1)
    return made


def trained(learner: Learner) -> dict[str, torch.Tensor]:
    named = learner.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_dir(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("replays", [False, True], ids=["own routes", "replayed routes"])
def test_of_a_mixture_its_steps_are_those_of_a_frozen_copy(
    new_learner: NewLearner, mixture: str, rule: ShadowRule | None, replays: bool
) -> None:
    """The student goes through the experts that the engine chose, and its routers are balanced by
    its own passes; the teacher routes by itself, and is no part of the balance."""
    settings = {"model": mixture, "replays_routing": replays, "router_aux_coef": 0.1}
    learner, twin = (new_learner(shadow=rule, **settings) for _ in range(2))
    diverged = []
    for step in range(3):
        made_of = other_experts(mixture, rows(step), seed=step) if replays else rows(step)
        part = Part(rows_D=made_of, loss=OWN)
        made = learner.step(part)
        teachers = LocalTeachers({"": mixture}, dtype=torch.float32, device="cpu")
        with nullcontext() if rule is None else twin.as_teacher():
            frozen = teachers.models[""].model
            frozen.load_state_dict(twin.model.state_dict())
        loss = PolicyObjectiveLoss(objective=FULL, teachers=teachers)
        expected = twin.step(replace(part, loss=loss))
        for each in (learner, twin):
            each.follow(step + 1)
        names = ["opd/divergence", "train/loss", "train/grad_norm", "train/router_aux"]
        for name in [*names, *(["train/routing_mismatch"] if replays else [])]:
            assert made[name] == pytest.approx(expected[name], rel=1e-5), name
        for name, weight in trained(twin).items():
            torch.testing.assert_close(trained(learner)[name], weight, atol=1e-6, rtol=1e-5)
        diverged.append(made["opd/divergence"])
    assert min(diverged) > 1e-3


def copied(learner: Learner, path: str) -> LocalTeachers:
    """A copy of the model that is the learner's teacher now, as a frozen model of its own."""
    teachers = LocalTeachers({"": path}, dtype=torch.float32, device="cpu")
    with nullcontext() if learner.own_teacher is None else learner.as_teacher():
        model = teachers.models[""].model
        missed = model.load_state_dict(gather_all(learner.weights()), strict=False)
    assert not missed.unexpected_keys
    return teachers


@pytest.mark.parametrize(
    ("rule", "adapter"),
    [*((rule, {}) for rule in RULES), (EMA, {"lora_rank": 2})],
    ids=[*NAMES, "ema-adapter"],
)
def test_its_steps_are_those_of_a_frozen_copy(
    new_learner: NewLearner, tiny_pair: TinyPair, rule: ShadowRule | None, adapter: dict
) -> None:
    """Step by step, through every movement of the teacher."""
    learner, twin = (new_learner(shadow=rule, **adapter) for _ in range(2))
    diverged = []
    for step in range(4):
        part = Part(rows_D=rows(step), loss=OWN)
        made = learner.step(part)
        loss = PolicyObjectiveLoss(objective=FULL, teachers=copied(twin, tiny_pair.student))
        expected = twin.step(replace(part, loss=loss))
        for each in (learner, twin):
            each.follow(step + 1)
        for name in ("opd/divergence", "train/loss", "train/grad_norm"):
            assert made[name] == pytest.approx(expected[name], rel=1e-5), name
        for name, weight in trained(twin).items():
            torch.testing.assert_close(trained(learner)[name], weight, atol=1e-6, rtol=1e-5)
        diverged.append(made["opd/divergence"])
    assert min(diverged) > 1e-3


def test_the_live_teacher_differs_by_what_it_is_told_alone(new_learner: NewLearner) -> None:
    learner = new_learner()
    plain = [replace(row, teacher_context_T=None, teacher_replaces=0) for row in rows(0)]
    made = learner.step(Part(rows_D=plain, loss=OWN))
    assert made["opd/divergence"] == pytest.approx(0.0, abs=1e-6)
    assert made["train/grad_norm"] == pytest.approx(0.0, abs=1e-4)
    told = new_learner().step(Part(rows_D=rows(0), loss=OWN))
    assert told["opd/divergence"] > 1e-2 and told["train/grad_norm"] > 1e-2


@pytest.mark.parametrize(
    "how", [{"gradient_checkpointing": True}, {"packing": True}, {"token_budget": 60}], ids=str
)
def test_how_rows_are_run_changes_nothing(new_learner: NewLearner, how: dict) -> None:
    plain, other = new_learner(shadow=EMA), new_learner(shadow=EMA, **how)
    for ours, theirs in zip(train(other, 0, 3), train(plain, 0, 3), strict=True):
        assert ours["opd/divergence"] == pytest.approx(theirs["opd/divergence"], rel=1e-4)
    start = trained(new_learner(shadow=EMA))
    for name, weight in trained(plain).items():
        # AdamW moves a weight by its learning rate however small the gradient: an element whose
        # gradient is rounding alone may go either way.
        moved = (weight - start[name]).norm()
        assert (trained(other)[name] - weight).norm() <= 0.02 * moved, name


def test_in_bfloat16_the_live_teacher_rounds_as_the_student_does(new_learner: NewLearner) -> None:
    learner = new_learner(dtype="bfloat16")
    plain = [replace(row, teacher_context_T=None, teacher_replaces=0) for row in rows(0)]
    made = learner.step(Part(rows_D=plain, loss=OWN))
    assert made["opd/divergence"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("rule", "adapter"),
    [*((rule, {}) for rule in RULES), (EMA, {"lora_rank": 2})],
    ids=[*NAMES, "ema-adapter"],
)
def test_a_resumed_run_goes_on_bit_by_bit(
    new_learner: NewLearner,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    rule: ShadowRule | None,
    adapter: dict,
) -> None:
    learner = new_learner(shadow=rule, **adapter)
    train(learner, 0, 3)
    write = partial(learner.save, tokenizer=tokenizer)
    checkpoint = CheckpointStore(tmp_path / "run", keep=1).save(step=3, write=write, delivery={})
    made = train(learner, 3, 2)
    start = {"lora_adapter": checkpoint.adapter_dir} if adapter else {"model": checkpoint.model_dir}
    again = new_learner(shadow=rule, **start)
    again.load_trainer_state(checkpoint.path)
    assert losses(train(again, 3, 2)) == losses(made)
    for name, weight in trained(learner).items():
        assert torch.equal(trained(again)[name], weight), name


def losses(steps: Sequence[dict[str, float]]) -> list[float]:
    return [step["train/loss"] for step in steps]
