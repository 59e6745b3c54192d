"""pass@k against every choice of k, votes, and coverage of intervals."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.rewards.accuracy import interval, majority, pass_at_k, ratio_interval, student_quantile

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=7)


@given(rewards=REWARDS, data=st.data())
def test_pass_at_k_is_the_mean_best_of_every_choice(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    expected = fmean(max(chosen) for chosen in combinations(rewards, k))
    assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_the_most_frequent_answer_wins() -> None:
    assert majority(["18", "17", "18", None]) == 0
    assert majority([None, None, "3"]) == 2
    assert majority(["a", "b", "b", "a"]) == 0  # as frequent: the first
    assert majority([None, None]) is None and majority([]) is None


def once(rewards: Sequence[float]) -> list[list[float]]:
    return [[reward] for reward in rewards]


def test_an_interval_needs_two_prompts_and_never_leaves_the_possible() -> None:
    assert interval([[1.0]]) is None
    # Agresti and Coull (1998) tabulate Wilson's interval of 0 of 10.
    assert interval(once([0.0] * 10)) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert all((interval(once([0.0] * n)) or (-1,))[0] == 0 for n in range(2, 400))
    low, high = interval(once([1.0] * 10)) or (0, 0)
    assert low == pytest.approx(0.7225, abs=1e-4) and high == pytest.approx(1.0)


@given(data=st.data(), prompts=st.integers(2, 12), samples=st.integers(1, 8))
def test_an_interval_of_shares_holds_their_mean_within_0_and_1(
    data: st.DataObject, prompts: int, samples: int
) -> None:
    reward = data.draw(st.sampled_from([st.sampled_from([0.0, 1.0]), st.floats(0, 1)]))
    rewards_N = st.lists(reward, min_size=samples, max_size=samples)
    rewards_PN = data.draw(st.lists(rewards_N, min_size=prompts, max_size=prompts))
    low, high = interval(rewards_PN) or (1, 0)
    assert 0 <= low <= fmean(map(fmean, rewards_PN)) <= high <= 1
    assert high > low or not set().union(*rewards_PN) <= {0, 1}


@pytest.mark.parametrize("concentration", [0.5, None])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("chance", [0.5, 0.95])
def test_an_interval_has_its_nominal_coverage(
    chance: float, samples: int, concentration: float | None
) -> None:
    """Prompts of different or equal difficulty."""
    random = np.random.default_rng(3)
    share_DP1 = np.full((400, 10, 1), chance)
    if concentration is not None:
        a, b = concentration * chance, concentration * (1 - chance)
        share_DP1 = random.beta(a, b, share_DP1.shape)
    draws = (random.random((400, 10, samples)) < share_DP1).astype(float)
    bounds = [interval(rewards_PN.tolist()) for rewards_PN in draws]
    held = fmean(low <= chance <= high for low, high in filter(None, bounds))
    assert 0.88 < held <= 1  # Wilson's own least is 0.89 of 10 prompts at 0.95


def test_a_ratio_s_interval_has_its_nominal_coverage() -> None:
    """Sums over responses of different lengths, whose tokens are not independent."""
    random = np.random.default_rng(6)
    held = []
    for _ in range(400):
        counts_P = random.integers(5, 60, 20)
        sums_P = counts_P * random.normal(0.7, 0.3, 20)
        low, high = ratio_interval(sums_P.tolist(), counts_P.tolist()) or (1, 0)
        held.append(low <= 0.7 <= high)
    assert 0.92 < fmean(held) < 0.98
    assert ratio_interval([1.0], [3]) is None


# Of printed tables.
@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)],
)
def test_student_s_quantile(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=2e-3)
