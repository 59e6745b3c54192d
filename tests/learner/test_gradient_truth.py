"""Every estimator against the exact gradient that it claims, over all sequences.

Rows, batch, forward and loss are the product's; see `enumeration.py`.
"""

from functools import cache

import chz
import pytest
from torch import Tensor

from distill.objective.settings import ObjectiveConfig
from tests.enumeration import (
    ESTIMATORS,
    KL_CLIP,
    TEMPERATURES,
    VOCAB,
    World,
    error,
    mean_gradient,
    responses,
    reverse_kl,
    state_logprobs,
)

WITH_FUTURE = ESTIMATORS["sampled, g=1"].objective
every_T = pytest.mark.parametrize("T", TEMPERATURES)
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
# Every estimator at one T that is not 1, and one with rewards to go and one distribution at others.
CASES = [(name, 0.5) for name in ESTIMATORS] + [
    (name, T) for name in ("sampled, g=1", "full, reverse_kl") for T in TEMPERATURES if T != 0.5
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Student and teacher end with different tokens; either counts as the stop outcome."""
    return World(tmp_path_factory.mktemp("two_ends"), stops=(1, 4))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The teacher has two ids that the student lacks."""
    return World(tmp_path_factory.mktemp("padded"), padding=2)


@pytest.fixture(scope="module", params=["plain", "two_ends", "padded"])
def by_states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The learner has only the teacher's head, and the rows its hidden states."""
    settings = {"plain": {}, "two_ends": {"stops": (1, 4)}, "padded": {"padding": 2}}
    root = tmp_path_factory.mktemp("by_states")
    return World(root, by_states=True, **settings[request.param])


@cache
def gradients_of(world: World, name: str, T: float, teacher_T: float) -> Tensor:
    """Gradient of every response, shape (responses, parameters)."""
    return world.gradients_by_response(ESTIMATORS[name].objective, T, teacher_T)


@cache
def claimed_by(world: World, name: str, T: float) -> Tensor:
    return world.claimed_gradient(ESTIMATORS[name], T)


@every_T
def test_the_enumeration_is_complete(world: World, T: float) -> None:
    assert len(responses()) == 1 + 4 * 1 + 16 * 5
    assert world.probabilities(T).sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("name", "T"), CASES)
def test_the_mean_is_the_claimed_gradient(world: World, name: str, T: float) -> None:
    made = world.expected_gradient(ESTIMATORS[name].objective, T)
    assert error(made, claimed_by(world, name, T)) < 3e-5


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if "kl_clip" not in name])
def test_a_teacher_s_padding_biases_none(padded: World, name: str, T: float = 0.5) -> None:
    """Padding is a constant of a state's divergence, or masked, whatever its mass."""
    mass = state_logprobs(padded.teacher, (0, 2), T)[:, VOCAB:].exp().sum(dim=1)
    assert mass.max() > 0.1
    made = padded.expected_gradient(ESTIMATORS[name].objective, T)
    assert error(made, claimed_by(padded, name, T)) < 3e-5


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name.startswith("full")])
@pytest.mark.parametrize("away", [0.0, 0.4])
def test_from_hidden_states_it_is_the_same(
    by_states: World, name: str, away: float, T: float = 0.5
) -> None:
    by_states.move_learner(away)
    made = by_states.expected_gradient(ESTIMATORS[name].objective, T)
    assert error(made, by_states.claimed_gradient(ESTIMATORS[name], T)) < 3e-5
    by_states.move_learner(0.0)


@every_T
def test_without_future_terms_the_sequence_kl_s_gradient_is_biased(world: World, T: float) -> None:
    """The gradient ignores that a token leads to other states."""
    made = world.expected_gradient(ObjectiveConfig(), T)
    assert error(made, claimed_by(world, "sampled, g=1", T)) > 0.02


@every_estimator
def test_rows_one_at_a_time_have_the_same_mean(world: World, name: str, T: float = 0.5) -> None:
    """Together, rows share their prompt's keys and values; one at a time they do not."""
    objective = ESTIMATORS[name].objective
    made = mean_gradient(gradients_of(world, name, T, T), world.probabilities(T))
    assert error(made, world.expected_gradient(objective, T)) < 3e-5


@every_T
@pytest.mark.parametrize(
    "name", ["sampled, g=0", "full, reverse_kl", "top_k of the student, reverse_kl"]
)
def test_a_clip_is_biased_where_it_acts_and_nowhere_else(world: World, name: str, T: float) -> None:
    """Gaps go up to 3.6, 1.8 and 0.8 nats."""
    plain = ESTIMATORS[name].objective
    truth = world.state_gradient(T, reverse_kl)
    bias = {
        clip: error(world.expected_gradient(chz.replace(plain, kl_clip=clip), T), truth)
        for clip in (0.25, KL_CLIP, 8.0)
    }
    assert bias[8.0] < 3e-5 < 0.02 < bias[KL_CLIP] < bias[0.25]


@pytest.mark.parametrize("T", [0.5, 2.0])
def test_a_teacher_scored_at_one_gives_another_objective(world: World, T: float) -> None:
    """An unscaled teacher is the gradient towards q_1."""
    made = world.expected_gradient(WITH_FUTURE, T, teacher_T=1.0)
    assert error(made, world.sequence_gradient(T, 1.0)) < 1e-5
    assert error(made, claimed_by(world, "sampled, g=1", T)) > 0.1


@pytest.mark.parametrize(
    "T", [pytest.param(T, marks=() if T == 0.5 else pytest.mark.slow) for T in TEMPERATURES]
)
@every_estimator
def test_stopping_with_either_of_two_tokens_is_one_event(
    two_ends: World, name: str, T: float
) -> None:
    """Tokens are sampled one by one; the gradient is that of the outcomes' divergence, exactly."""
    estimator = ESTIMATORS[name]
    assert two_ends.probabilities(T).sum().item() == pytest.approx(1, abs=1e-5)
    truth = two_ends.claimed_gradient(estimator, T)
    assert error(two_ends.expected_gradient(estimator.objective, T), truth) < 3e-5
    gradients_RW = two_ends.gradients_by_response(estimator.objective, T)
    one_by_one = mean_gradient(gradients_RW, two_ends.probabilities(T))
    assert error(one_by_one, truth) < 3e-5


def test_the_stop_event_off_policy(two_ends: World) -> None:
    """The ratio to the sampler is one of outcomes, too."""
    estimator = ESTIMATORS["sampled, g=0"]
    two_ends.move_learner(0.05)
    try:
        made = two_ends.expected_gradient(estimator.objective, 0.7)
        assert error(made, two_ends.claimed_gradient(estimator, 0.7)) < 3e-5
    finally:
        two_ends.move_learner(0.0)


@every_T
@pytest.mark.parametrize("ends", ["one end", "two ends"])
def test_teacher_samples_have_the_gradient_of_the_sequences_forward_kl(
    request: pytest.FixtureRequest, ends: str, T: float
) -> None:
    """At any distance and with any estimator of the student's samples: no ratio."""
    world = request.getfixturevalue("world" if ends == "one end" else "two_ends")
    objective = ObjectiveConfig(kl_coef=0.7, loss="ppo", kl_discount_factor=0.5)
    world.move_learner(0.3)
    try:
        made = world.gradient_of_teacher_samples(objective, T)
        assert error(made, 0.7 * world.sequence_forward_kl_gradient(T)) < 3e-5
    finally:
        world.move_learner(0.0)
