"""Advantages of samples: the rewards of a step's groups, compared with a baseline.

This is the only part of the objective that compares several groups, and its only input is
`GroupRewards`. `distill.objective.objectives` applies a sample's advantage to its tokens. Numpy, no
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distill.errors import DataError
from distill.objective.custom import own_advantage
from distill.objective.group_rewards import GroupRewards
from distill.objective.settings import ObjectiveConfig, is_own
from distill.types import FloatArray, same_reward

# Added to a standard deviation before dividing by it.
STD_FLOOR = 1e-6


def sample_advantages(
    rewards_P: Sequence[GroupRewards], objective: ObjectiveConfig
) -> list[FloatArray]:
    """reward_coef * A_i of each group's members; one array of shape (G,) per group of the step.

    Rewards that do not count have an advantage of 0 and are not part of a baseline.

    Raises:
        DataError: a custom `baseline` failed.
    """
    if not objective.reward_coef:
        return [_zeros(group) for group in rewards_P]
    if is_own(objective.baseline):
        made_P = own_advantage(objective.baseline)(rewards_P)
    elif objective.baseline == "global":
        made_P = _global_advantages(rewards_P, objective.scale_by_std)
    else:
        made_P = [_in_group(group, objective) for group in rewards_P]
    coef = np.float32(objective.reward_coef)
    return [
        np.where(group.counted_G, coef * made_G, np.float32(0))
        for group, made_G in zip(rewards_P, made_P, strict=True)
    ]


def _in_group(group: GroupRewards, objective: ObjectiveConfig) -> FloatArray:
    """A_i of the members that count, compared with one another; 0 for all other members."""
    made_G = _zeros(group)
    if objective.baseline != "leave_one_out" or group.counted_G.sum() > 1:
        counted = group.rewards_G[group.counted_G]
        if len(counted):
            made_G[group.counted_G] = reward_advantages(
                counted, baseline=objective.baseline, scale_by_std=objective.scale_by_std
            )
    return made_G


def _global_advantages(rewards_P: Sequence[GroupRewards], scale_by_std: bool) -> list[FloatArray]:
    """A_i = r_i - mean of the whole step, optionally divided by the step's standard deviation.

    The normalisation of REINFORCE++ (Hu 2025).
    """
    counted_N = np.concatenate([group.rewards_G[group.counted_G] for group in rewards_P])
    if not len(counted_N) or same_reward(counted_N):
        return [_zeros(group) for group in rewards_P]
    scale = counted_N.std() + STD_FLOOR if scale_by_std else 1.0
    mean = counted_N.mean()
    return [((group.rewards_G - mean) / scale).astype(np.float32) for group in rewards_P]


def _zeros(group: GroupRewards) -> FloatArray:
    return np.zeros(len(group.rewards_G), np.float32)


def group_centred(rewards_G: npt.ArrayLike) -> FloatArray:
    """A_i = r_i - mean_G(r): GRPO's baseline (Shao et al. 2024), without the division.

    Exactly 0 for a constant group (`same_reward`). Otherwise the rounding error of its mean,
    divided by a standard deviation that is also only rounding error, would become an advantage. The
    mean is computed in float64.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if same_reward(rewards_G):
        return np.zeros(len(rewards_G), np.float32)
    return (rewards_G - rewards_G.mean()).astype(np.float32)


def leave_one_out(rewards_G: npt.ArrayLike) -> FloatArray:
    """A_i = r_i - mean of the other members (RLOO: Kool et al. 2019, Ahmadian et al. 2024).

    Raises:
        DataError: a group of one has no other members.
    """
    size = len(np.asarray(rewards_G))
    if size < 2:
        raise DataError("leave_one_out needs a group of at least 2", field="baseline")
    return group_centred(rewards_G) * np.float32(size / (size - 1))


def reward_advantages(rewards_G: npt.ArrayLike, *, baseline: str, scale_by_std: bool) -> FloatArray:
    """Rewards minus their baseline; with `scale_by_std` divided by std_G(r) (population) + 1e-6."""
    advantages_G = (leave_one_out if baseline == "leave_one_out" else group_centred)(rewards_G)
    if scale_by_std:
        spread = np.asarray(rewards_G, np.float64).std() + STD_FLOOR
        advantages_G = advantages_G / np.float32(spread)
    return advantages_G
