"""Accuracy from a few responses per prompt: pass@k, majority votes, confidence intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean, stdev

# Of a confidence interval.
CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def pass_at_k(rewards_N: Sequence[float], k: int) -> float:
    """The expected best reward of k responses, without bias, from n >= k independent ones.

    For rewards of 0 and 1 it is the chance that one of k is right: 1 - C(n - c, k) / C(n, k) with c
    right ones (Chen et al., 2021, arXiv:2107.03374, eq. 1). In general, the mean of the maximum
    over all C(n, k) choices of k: the i-th smallest reward is the largest of C(i - 1, k - 1) of
    them.
    """
    n = len(rewards_N)
    assert 1 <= k <= n
    ordered = sorted(rewards_N)
    return sum(ordered[i] * math.comb(i, k - 1) for i in range(k - 1, n)) / math.comb(n, k)


def majority(answers_N: Sequence[Hashable | None]) -> int | None:
    """The place of the first response that gives the most frequent answer; None if none has one.

    Of answers that are as frequent, the one given first wins. A response without an answer (None)
    does not vote.
    """
    votes = Counter(answer for answer in answers_N if answer is not None)
    if not votes:
        return None
    [(winner, _)] = votes.most_common(1)  # in order of first appearance
    return answers_N.index(winner)


def interval(values_P: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of a mean over prompts; None of fewer than two prompts.

    One value per prompt, whatever it was averaged over: responses to one prompt are not independent
    of one another (Miller, 2024, arXiv:2411.00640, "clustered standard errors"). Values of 0 and 1
    alone get Wilson's interval (1927), which holds for few prompts and near 0 and 1; others the
    normal approximation.
    """
    n = len(values_P)
    if n < 2:
        return None
    mean = fmean(values_P)
    low, high = -math.inf, math.inf
    if set(values_P) <= {0, 1}:
        low, high = 0.0, 1.0
        centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z * math.sqrt(mean * (1 - mean) / n + (_Z / (2 * n)) ** 2) / (1 + _Z**2 / n)
    else:
        centre, half = mean, _Z * stdev(values_P) / math.sqrt(n)
    # Rounding must not part them, nor take a share beyond its bounds.
    return max(low, min(centre - half, mean)), min(high, max(centre + half, mean))
