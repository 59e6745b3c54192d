"""An advantage and a loss as a user would write them: built-in ones over again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from distill.objective.group_rewards import GroupRewards


def global_advantage(rewards_P: Sequence[GroupRewards]) -> list[np.ndarray]:
    """As baseline=global and scale_by_std=True."""
    counted_N = np.concatenate([group.rewards_G[group.counted_G] for group in rewards_P])
    return [(g.rewards_G - counted_N.mean()) / (counted_N.std() + 1e-6) for g in rewards_P]


POLICY_GRADIENT = "tests.e2e.objectives:policy_gradient"


def policy_gradient(logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor) -> Tensor:
    """As loss=importance_sampling."""
    return -(logprobs_N - old_N).exp() * advantages_N
