"""Accuracy from a few responses per prompt: pass@k, majority votes, confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean, pvariance, stdev

# Level of the confidence intervals.
CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def pass_at_k(rewards_N: Sequence[float], k: int) -> float:
    """Unbiased estimate of the expected best reward of k responses, from n >= k independent ones.

    For rewards of 0 and 1 it is the probability that at least one of k responses is right:
    1 - C(n - c, k) / C(n, k), where c responses are right (Chen et al., 2021, arXiv:2107.03374,
    eq. 1). In general, it is the mean of the maximum over all C(n, k) choices of k responses: the
    i-th smallest reward is the maximum of C(i - 1, k - 1) choices.
    """
    n = len(rewards_N)
    assert 1 <= k <= n
    ordered = sorted(rewards_N)
    return sum(ordered[i] * math.comb(i, k - 1) for i in range(k - 1, n)) / math.comb(n, k)


def majority(answers_N: Sequence[Hashable | None]) -> int | None:
    """Index of the first response with the most frequent answer; None if there are no answers.

    Of equally frequent answers, the first wins. A response without an answer (None) does not vote.
    """
    votes = Counter(answer for answer in answers_N if answer is not None)
    if not votes:
        return None
    [(winner, _)] = votes.most_common(1)  # in order of first appearance
    return answers_N.index(winner)


def interval(rewards_PN: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % confidence interval of the mean reward over prompts; None for fewer than two prompts.

    Responses to one prompt are not independent, so the spread is that of the prompts' means
    (Miller, 2024, arXiv:2411.00640, "clustered standard errors"). If all rewards are 0 or 1, the
    interval is Wilson's (1927), which is valid for few prompts and near 0 and 1. With several
    responses per prompt, Wilson's n is the effective number of responses (Korn and Graubard, 1998),
    the number of independent responses with the same spread. For other rewards, the interval is
    Student's, clipped to [0, 1] if all rewards are within it.
    """
    means_P = [fmean(rewards_N) for rewards_N in rewards_PN]
    n = len(means_P)
    if n < 2:
        return None
    mean, rewards = fmean(means_P), {reward for rewards_N in rewards_PN for reward in rewards_N}
    low, high = (0.0, 1.0) if all(0 <= reward <= 1 for reward in rewards) else (-math.inf, math.inf)
    if rewards <= {0, 1}:
        centre, half = _wilson(mean, _effective_responses(means_P, max(map(len, rewards_PN))))
    else:
        centre, half = mean, student_quantile(n - 1) * stdev(means_P) / math.sqrt(n)
    # Rounding must not move the interval off the mean, nor beyond the bounds of the rewards.
    return max(low, min(centre - half, mean)), min(high, max(centre + half, mean))


def ratio_interval(sums_P: Sequence[float], counts_P: Sequence[int]) -> tuple[float, float] | None:
    """95 % confidence interval of sum / count over prompts; None for fewer than two prompts.

    Prompts are independent, but the terms of a prompt's sum are not. The standard error is that of
    the residuals sum_p - ratio * count_p (a ratio estimator by the delta method).
    """
    n, count = len(sums_P), sum(counts_P)
    if n < 2:
        return None
    ratio = math.fsum(sums_P) / count
    squared = math.fsum((s - ratio * c) ** 2 for s, c in zip(sums_P, counts_P, strict=True))
    half = student_quantile(n - 1) * math.sqrt(n / (n - 1) * squared) / count
    return ratio - half, ratio + half


def student_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else to 0.2 %.

    Uses the expansion around the normal quantile in Abramowitz and Stegun, 26.7.5.
    """
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**i for i, term in enumerate(terms))


def _effective_responses(means_P: Sequence[float], responses: int) -> float:
    """Effective number of responses: independent ones whose mean would vary as that of `means_P`.

    Args:
        responses: number of responses to each prompt. If there are several, the spread of the
            prompts' means is an estimate, so the result is reduced by the squared ratio of the
            normal to Student's quantile.
    """
    n, mean, spread = len(means_P), fmean(means_P), pvariance(means_P)
    if responses == 1 or mean in (0, 1):
        return n
    most = n * responses
    found = most if spread == 0 else min(most, n * mean * (1 - mean) / spread)
    return found * (_Z / student_quantile(n - 1)) ** 2


def _wilson(mean: float, n: float) -> tuple[float, float]:
    """(centre, half width) of Wilson's interval."""
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    return centre, _Z * math.sqrt(mean * (1 - mean) / n + (_Z / (2 * n)) ** 2) / (1 + _Z**2 / n)
