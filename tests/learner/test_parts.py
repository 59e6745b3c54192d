"""Parts of a step in micro-batches of any size: the sum of their losses."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.objective.batching import Batch, TrainingRow
from distill.objective.losses import Metrics, StepCounts
from learner.forward import Forward, LossFunction
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PreferenceLoss, cross_entropy_loss
from tests.learner.conftest import (
    IMPORTANCE_SAMPLING,
    NewLearner,
    assert_same,
    gradients,
    gradients_of,
    naive_logprobs,
    near_policy,
)
from tests.samples import TEMPERATURE, demonstration, training_row

ROWS = [training_row(2 + i, 3 + 2 * i, seed=i, temperature=TEMPERATURE + 0.3 * i) for i in range(6)]
DEMONSTRATIONS = [demonstration(2 + i, 9 - i, seed=40 + i) for i in range(4)]


def with_random_reference(rows: list[TrainingRow]) -> list[TrainingRow]:
    return [
        replace(row, reference_logprobs_T=training_row(len(row) - 1, 1, seed=i).advantages_T)
        for i, row in enumerate(rows)
    ]


def naive_policy(model: PreTrainedModel, rows: list[TrainingRow]) -> Tensor:
    total, tokens = torch.zeros(()), 0
    for row in rows:
        for t, logprob in zip(
            row.loss_mask_T.nonzero()[0], naive_logprobs(model, row), strict=True
        ):
            ratio = (logprob - float(row.behaviour_logprobs_T[t])).exp()
            total = total - ratio * float(row.advantages_T[t])
            tokens += 1
    return total / tokens


def naive_sft(model: PreTrainedModel, rows: list[TrainingRow]) -> Tensor:
    return -torch.cat([naive_logprobs(model, row) for row in rows]).mean()


def naive_dpo(model: PreTrainedModel, rows: list[TrainingRow], beta: float) -> Tensor:
    total = torch.zeros(())
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        gained = []
        for row in (chosen, rejected):
            assert row.reference_logprobs_T is not None
            reference = float(row.reference_logprobs_T[row.loss_mask_T].sum())
            gained.append(naive_logprobs(model, row).sum() - reference)
        total = total - (1 / (1 + (-beta * (gained[0] - gained[1])).exp())).log()
    return total / (len(rows) // 2)


@pytest.mark.parametrize("budget", [1, 4096])
def test_several_parts_are_the_sum_of_their_losses(
    new_learner: NewLearner, plain_model: PreTrainedModel, budget: int
) -> None:
    learner = new_learner(token_budget=budget)
    rows, pairs = near_policy(learner, ROWS), with_random_reference(DEMONSTRATIONS)
    metrics = learner.step(
        Part(rows_D=rows, loss=IMPORTANCE_SAMPLING),
        Part(rows_D=DEMONSTRATIONS, loss=cross_entropy_loss, coef=0.3),
        Part(rows_D=pairs, loss=PreferenceLoss(beta=0.2), rows_per_unit=2, coef=2.0),
    )
    policy, sft = naive_policy(plain_model, rows), naive_sft(plain_model, DEMONSTRATIONS)
    total = policy + 0.3 * sft + 2 * naive_dpo(plain_model, pairs, beta=0.2)
    total.backward()
    assert_same(gradients(learner), gradients_of(plain_model), share=1e-4)
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["train/nll"] == pytest.approx(sft.item(), rel=1e-4)  # without its coef
    every = [*rows, *DEMONSTRATIONS, *pairs]
    assert metrics["train/tokens"] == sum(row.num_trained for row in every)
    assert {"train/ratio", "train/ess", "dpo/margin"} <= metrics.keys()


def fixed_metrics(made: list[dict[str, float]]) -> LossFunction:
    """Loss whose micro-batches report `made` one after the other."""
    left = iter(made)

    def loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        metrics = {name: torch.tensor(value) for name, value in next(left).items()}
        return forward(batch).logprobs_N.sum(), metrics

    return loss


@pytest.mark.parametrize("largest", [3.0, -3.0])
def test_sums_are_added_and_extremes_kept(new_learner: NewLearner, largest: float) -> None:
    values = [largest - 1, largest, largest - 2]
    reports = [{"a/b": value, "a/c_max": value, "a/c_min": value} for value in values]
    part = Part(rows_D=ROWS[:3], loss=fixed_metrics(reports))
    metrics = new_learner(token_budget=1).step(part)
    assert metrics["a/b"] == sum(values)
    assert (metrics["a/c_max"], metrics["a/c_min"]) == (largest, largest - 2)


def test_losses_see_the_counts_of_their_own_part(new_learner: NewLearner) -> None:
    seen: list[tuple[str, StepCounts]] = []

    def noting(name: str) -> Callable[..., tuple[Tensor, Metrics]]:
        def loss(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
            seen.append((name, counts))
            return forward(batch).logprobs_N.sum(), {}

        return loss

    learner: Learner = new_learner(token_budget=1)
    learner.step(Part(rows_D=ROWS[:2], loss=noting("a")), Part(rows_D=ROWS[2:3], loss=noting("b")))
    assert seen == [("a", StepCounts(8, 2))] * 2 + [("b", StepCounts(7, 1))]


class _Held(torch.autograd.Function):
    """Identity whose graph holds an object, as that of a divergence holds a teacher's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, held: set[int]) -> Tensor:
        ctx.held = held
        return loss.clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, None]:
        return grad, None


def test_nothing_that_a_micro_batch_holds_outlives_it(new_learner: NewLearner) -> None:
    earlier: list[weakref.ref[set[int]]] = []

    def holding(forward: Forward, batch: Batch, counts: StepCounts) -> tuple[Tensor, Metrics]:
        assert not any(held() for held in earlier), "the last micro-batch's is still in memory"
        loss, metrics = cross_entropy_loss(forward, batch, counts)
        held = {1}
        earlier.append(weakref.ref(held))
        return _Held.apply(loss, held), metrics

    new_learner(token_budget=1).step(Part(rows_D=DEMONSTRATIONS, loss=holding))
    assert len(earlier) == len(DEMONSTRATIONS)
