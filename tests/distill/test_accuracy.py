"""pass@k against every choice of k, votes, and intervals that hold the truth as they say."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.rewards.accuracy import interval, majority, pass_at_k

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=7)


@given(rewards=REWARDS, data=st.data())
def test_pass_at_k_is_the_mean_best_of_every_choice(
    rewards: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    expected = fmean(max(chosen) for chosen in combinations(rewards, k))
    assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_pass_at_k_of_right_and_wrong_is_the_published_estimator() -> None:
    n, c, k = 10, 3, 4
    wrong_only = np.prod([1 - k / i for i in range(n - c + 1, n + 1)])
    assert pass_at_k([1.0] * c + [0.0] * (n - c), k) == pytest.approx(1 - wrong_only)
    assert pass_at_k([0.0, 1.0, 0.0], 1) == pytest.approx(1 / 3)


def test_the_most_frequent_answer_wins_and_silence_does_not_vote() -> None:
    assert majority(["18", "17", "18", None]) == 0
    assert majority([None, None, "3"]) == 2
    assert majority(["a", "b", "b", "a"]) == 0  # as frequent: the first
    assert majority([None, None]) is None and majority([]) is None


def test_an_interval_needs_two_prompts_and_never_leaves_the_possible() -> None:
    assert interval([1.0]) is None
    # Agresti and Coull (1998) tabulate Wilson's interval of 0 of 10.
    assert interval([0.0] * 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert all((interval([0.0] * n) or (-1,))[0] == 0 for n in range(2, 400))
    low, high = interval([1.0] * 10) or (0, 0)
    assert low == pytest.approx(0.7225, abs=1e-4) and high == pytest.approx(1.0)


@pytest.mark.parametrize("chance", [0.05, 0.5])
def test_an_interval_holds_the_truth_as_often_as_it_says(chance: float) -> None:
    draws = np.random.default_rng(3).random((2000, 40)) < chance
    bounds = [interval(values.astype(float).tolist()) for values in draws]
    held = fmean(low <= chance <= high for low, high in filter(None, bounds))
    assert 0.92 < held < 0.98


def test_responses_to_one_prompt_are_not_independent() -> None:
    """Means of 8 responses that always agree say no more than one response does."""
    values = np.random.default_rng(4).random((50, 1)) < 0.4
    once = interval(values[:, 0].astype(float).tolist())
    often = interval(np.repeat(values, 8, axis=1).mean(1).tolist())
    assert once == often
    graded = interval([0.25, 0.5, 0.75, 0.5])
    assert graded is not None
    assert graded == pytest.approx((0.5 - 0.2, 0.5 + 0.2), abs=2e-4)
