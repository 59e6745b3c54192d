"""estimator=full with the learner's own model as teacher, against a copy of that teacher."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from distill.objective.batching import TrainingRow
from distill.objective.settings import ObjectiveConfig
from learner.config import ShadowRule
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss
from learner.teachers import FrozenModel, LocalTeachers
from tests.conftest import TinyPair
from tests.families import family_dir
from tests.learner.conftest import NewLearner, adjusted
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
    """Rows of which some have another teacher context."""
    scored = [
        replace(
            training_row(3, 4 + i, seed=9 * step + i),
            teacher_context_T=CONTEXT_T[: 35 - i],
            teacher_replaces=3,
        )
        for i in range(3)
    ]
    made = [*scored, training_row(2, 6, seed=step)]
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_dir(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def assert_steps_of_a_copy(
    learner: Learner,
    twin: Learner,
    steps: Sequence[list[TrainingRow]],
    copied: Callable[[], LocalTeachers],
    metrics: Sequence[str] = (),
) -> None:
    """Compare step by step, through every movement of the teacher, with a frozen copy of it."""
    diverged = []
    for step, rows_D in enumerate(steps):
        part = Part(rows_D=rows_D, loss=OWN)
        made = learner.step(part)
        with nullcontext() if twin.own_teacher is None else twin.as_teacher():
            teachers = copied()
        loss = PolicyObjectiveLoss(objective=FULL, teachers=teachers)
        expected = twin.step(replace(part, loss=loss))
        for each in (learner, twin):
            each.follow(step + 1)
        for name in ("opd/divergence", "train/loss", "train/grad_norm", *metrics):
            assert made[name] == pytest.approx(expected[name], rel=1e-5), name
        for name, weight in adjusted(twin).items():
            torch.testing.assert_close(adjusted(learner)[name], weight, atol=1e-6, rtol=1e-5)
        diverged.append(made["opd/divergence"])
    assert min(diverged) > 1e-3


def frozen_at(path: str, state: Mapping[str, torch.Tensor]) -> LocalTeachers:
    teachers = LocalTeachers({"": path}, dtype=torch.float32, device="cpu")
    teacher = teachers.models[""]
    assert isinstance(teacher, FrozenModel)
    missed = teacher.model.load_state_dict(state, strict=False)
    assert not missed.unexpected_keys
    return teachers


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("replays", [False, True], ids=["own routes", "replayed routes"])
def test_steps_of_a_mixture_equal_those_of_a_frozen_copy(
    new_learner: NewLearner, mixture: str, rule: ShadowRule | None, replays: bool
) -> None:
    """The student uses the engine's experts, and its routers are balanced by its own passes.

    The teacher routes by itself, and does not count for the balance.
    """
    settings = {"model": mixture, "replays_routing": replays, "router_aux_coef": 0.1}
    learner, twin = (new_learner(shadow=rule, **settings) for _ in range(2))
    steps = [rows(step) for step in range(3)]
    if replays:
        steps = [other_experts(mixture, made, seed=step) for step, made in enumerate(steps)]
    metrics = ["train/router_aux", *(["train/routing_mismatch"] if replays else [])]
    assert_steps_of_a_copy(
        learner, twin, steps, lambda: frozen_at(mixture, twin.model.state_dict()), metrics
    )


@pytest.mark.parametrize(
    ("rule", "adapter"),
    [*((rule, {}) for rule in RULES), (EMA, {"lora_rank": 2})],
    ids=[*NAMES, "ema-adapter"],
)
def test_steps_equal_those_of_a_frozen_copy(
    new_learner: NewLearner, tiny_pair: TinyPair, rule: ShadowRule | None, adapter: dict[str, int]
) -> None:
    learner, twin = (new_learner(shadow=rule, **adapter) for _ in range(2))
    assert_steps_of_a_copy(
        learner, twin, [rows(step) for step in range(4)],
        lambda: frozen_at(tiny_pair.student, gather_all(twin.weights())),
    )  # fmt: skip


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-6), ("bfloat16", 1e-5)])
def test_the_live_teacher_differs_only_by_its_context(
    new_learner: NewLearner, dtype: str, atol: float
) -> None:
    """The teacher rounds as the student does."""
    learner = new_learner(dtype=dtype)
    plain = [replace(row, teacher_context_T=None, teacher_replaces=0) for row in rows(0)]
    made = learner.step(Part(rows_D=plain, loss=OWN))
    assert made["opd/divergence"] == pytest.approx(0.0, abs=atol)
    assert made["train/grad_norm"] == pytest.approx(0.0, abs=100 * atol)
    metrics = new_learner(dtype=dtype).step(Part(rows_D=rows(0), loss=OWN))
    assert metrics["opd/divergence"] > 1e-2 and metrics["train/grad_norm"] > 1e-2


@pytest.mark.parametrize(
    "how", [{"gradient_checkpointing": True}, {"packing": True}, {"token_budget": 60}], ids=str
)
def test_how_rows_are_run_changes_nothing(new_learner: NewLearner, how: dict) -> None:
    plain, other = new_learner(shadow=EMA), new_learner(shadow=EMA, **how)
    for ours, theirs in zip(train(other, 0, 3), train(plain, 0, 3), strict=True):
        assert ours["opd/divergence"] == pytest.approx(theirs["opd/divergence"], rel=1e-4)
    start = adjusted(new_learner(shadow=EMA))
    for name, weight in adjusted(plain).items():
        # AdamW moves a weight by its learning rate however small the gradient: an element whose
        # gradient is rounding alone may go either way.
        moved = (weight - start[name]).norm()
        assert (adjusted(other)[name] - weight).norm() <= 0.02 * moved, name
