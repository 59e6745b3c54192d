"""Sampled estimators away from the policy that sampled, exact over all responses.

All claim the gradient of the divergence of the learner's *present* policy from the teacher, in the
states that the sampling policy meets.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from distill.errors import ConfigError
from distill.objective.settings import ObjectiveConfig, OpdObjective
from tests.enumeration import (
    ESTIMATORS,
    KL_CLIP,
    TOP_K,
    World,
    clipped_kl,
    contexts,
    error,
    flat_gradient,
    responses,
    reverse_kl,
    state_logprobs,
    token_logprobs,
)

T = 0.7
# How far the learner's weights are from the sampler's, relatively.
DISTANCES = [0.01, 0.1, 0.4]
TOP: dict[str, Any] = {"estimator": "top_k", "teacher_top_k": TOP_K}
# Without clips that act, each of them has the gradient of the ratio.
EXACT: dict[str, dict[str, Any]] = {
    "importance_sampling": {}, "cispo, unclipped": {"loss": "cispo", "clip": (1.0, 1e6)},
    "top_k": TOP, "full": {"estimator": "full"},
    "reference": {"kl_coef": 0.0, "reference_kl_coef": 1.0},  # the reference is the teacher
    "both": {"kl_coef": 0.3, "reference_kl_coef": 0.7},
    "corrected": {"correction": "truncate", "correction_cap": 1e6},
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("away", DISTANCES)
@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
def test_off_policy_it_is_the_gradient_of_the_present_policy_s_kl(
    world: World, settings: dict[str, Any], away: float
) -> None:
    world.move_learner(away)
    made = world.expected_gradient(ObjectiveConfig(**settings), T)
    assert error(made, world.state_gradient(T, reverse_kl)) < 3e-5


WHOLE: list[dict[str, Any]] = [{"estimator": "full"}, TOP | {"divergence": "forward_kl"}]


@pytest.mark.parametrize("whole", WHOLE, ids=["full", "bucket"])
@pytest.mark.parametrize(
    "weighing", [{"loss": "ppo"}, {"loss": "cispo"}, {"loss": "gspo"}, {"correction": "mask"}],
    ids=str,
)  # fmt: skip
def test_losses_refused_without_advantages_would_change_nothing(
    world: World, whole: dict[str, Any], weighing: dict[str, Any]
) -> None:
    world.move_learner(0.4)
    with pytest.raises(ConfigError):
        OpdObjective(**whole, **weighing).check_weighing(bonuses=False)
    made = world.expected_gradient(ObjectiveConfig(**whole, **weighing), T)
    assert torch.equal(made, world.expected_gradient(ObjectiveConfig(**whole), T))


@pytest.mark.parametrize("whole", WHOLE, ids=["full", "bucket"])
def test_the_price_of_leaving_the_sampler_needs_no_advantage(
    world: World, whole: dict[str, Any]
) -> None:
    """So dro is not refused there."""
    world.move_learner(0.4)
    objective = OpdObjective(**whole, loss="dro")
    made = world.expected_gradient(objective, T)
    assert error(made, world.expected_gradient(ObjectiveConfig(**whole), T)) > 1e-3


@pytest.mark.parametrize("away", DISTANCES)
@pytest.mark.parametrize(
    "settings", [{}, TOP, {"estimator": "full"}], ids=["sampled", "top_k", "full"]
)
def test_off_policy_a_clip_is_of_the_present_policy_s_gap(
    world: World, settings: dict[str, Any], away: float
) -> None:
    """The gap of the sampler is not clipped, at any distance."""
    world.move_learner(away)
    objective = ObjectiveConfig(kl_clip=KL_CLIP, **settings)
    made = world.expected_gradient(objective, T)
    assert error(made, world.state_gradient(T, clipped_kl(KL_CLIP))) < 3e-5


def test_the_discounted_reference_is_the_sequence_s_kl_centred(world: World) -> None:
    """E_p[sum_t (kl_t - mean_kl)], the mean fixed; the reference here is the teacher."""
    world.move_learner(0.0)
    objective = ObjectiveConfig(kl_coef=0.0, reference_kl_coef=1.0, kl_discount_factor=1.0)
    made = world.expected_gradient(objective, T)
    with torch.no_grad():
        gaps = [
            token_logprobs(world.student, each, T) - token_logprobs(world.teacher, each, T)
            for each in responses()
        ]
    length = torch.zeros(())
    for each in responses():
        length = length + token_logprobs(world.current, each, T).sum().exp() * len(each)
    of_length = flat_gradient(length, world.current)
    claimed = world.sequence_gradient(T, T) - torch.cat(gaps).mean() * of_length
    assert error(made, claimed) < 3e-5
    assert error(made, world.state_gradient(T, reverse_kl)) > 0.02  # the immediate terms alone


@pytest.mark.parametrize("settings", [{}, TOP], ids=["sampled", "top_k"])
def test_the_sampler_s_log_prob_in_its_place_pushes_away_from_the_sampler(
    world: World, settings: dict[str, Any]
) -> None:
    """KL(p || q) - KL(p || mu), which the rows' coefficient of log p corrects."""
    world.move_learner(0.1)
    objective = ObjectiveConfig(**settings)
    batch = world.rollouts(objective, T)
    assert batch.sampled_kl_coef_N is not None
    loss = world.expected_loss(objective, replace(batch, sampled_kl_coef_N=None))
    made = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(world.learning.parameters()))]
    )
    assert error(made, world.state_gradient(T, reverse_kl)) > 0.05
    if not settings:
        states = [state_logprobs(world.student, c, T)[-1].detach() for c in contexts()]
        sampled_by = iter(states)

        def less_the_trust(log_p_V: Tensor, log_q_V: Tensor) -> Tensor:
            return reverse_kl(log_p_V, log_q_V) - reverse_kl(log_p_V, next(sampled_by))

        assert error(made, world.state_gradient(T, less_the_trust)) < 3e-5


def test_discounted_terms_are_off_by_the_ratios_of_the_tokens_between(world: World) -> None:
    """Exact on policy; off policy the documented error is of first order in the distance."""
    objective = ESTIMATORS["sampled, g=1"].objective
    errors = []
    for away in (0.0, *DISTANCES):
        world.move_learner(away)
        errors.append(error(world.expected_gradient(objective, T), world.sequence_gradient(T, T)))
    assert errors[0] < 3e-5 < errors[1] < errors[2] < errors[3]
    assert errors[1] < 0.1


# Several updates on one set of rollouts

UPDATES = 16
# The share of the KL at the start that is left at most: bounds, where they act, leave more.
LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "importance_sampling": ({}, 0.2), "cispo": ({"loss": "cispo"}, 0.2), "top_k": (TOP, 0.2),
    "ppo": ({"loss": "ppo"}, 0.5), "corrected": ({"correction": "truncate"}, 0.5),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "share"), LOSSES.values(), ids=LOSSES)
def test_many_updates_on_one_set_of_rollouts_close_the_kl(
    world: World, settings: dict[str, Any], share: float
) -> None:
    """Gradients are expectations, so the rest is no noise. The sampler's log-prob raises the KL."""
    kls = world.descend(ObjectiveConfig(**settings), 1.0, range(0, UPDATES + 1, 4))
    assert kls[-1] < share * kls[0]
    assert max(kls[3:]) < 0.6 * kls[0]
