"""Advantages: numbers on tokens that say how much more, or less, of each we want. No gradients."""

from __future__ import annotations

import numpy as np

from distill.errors import DataError
from distill.types import FloatArray, Segment, TrajectoryGroup


def group_centred(rewards_G: FloatArray) -> FloatArray:
    """A_i = r_i - mean_G(r): GRPO's baseline (Shao et al. 2024), without the division."""
    rewards_G = np.asarray(rewards_G, dtype=np.float32)
    return rewards_G - rewards_G.mean()


def discounted_future_sum(values_N: FloatArray, discount: float) -> FloatArray:
    """S_t = v_t + g v_{t+1} + g^2 v_{t+2} + ...; with g = 0, v itself."""
    if discount == 0:
        return values_N
    sums_N = np.empty_like(values_N)
    running = 0.0
    for t in range(len(values_N) - 1, -1, -1):
        running = float(values_N[t]) + discount * running
        sums_N[t] = running
    return sums_N


def opd_advantages(segment: Segment, kl_coef: float, kl_discount_factor: float) -> FloatArray:
    """A_t = -kl_coef * sum_{s >= t} g^{s-t} (log p_T(y_s) - log q_T(y_s)) on actions, 0 elsewhere.

    log p_T is the behaviour log-prob, log q_T the teacher's, both at the segment's temperature, so
    E[A_t] = -kl_coef * KL(p_T || q_T) at g = 0.

    Raises:
        DataError: the segment has not been scored by a teacher.
    """
    if segment.teacher_logprobs_T is None:
        raise DataError("teacher_logprobs_T is missing: the segment was not scored by a teacher")
    mask_T = segment.action_mask_T
    gap_N = segment.behaviour_logprobs_T[mask_T] - segment.teacher_logprobs_T[mask_T]
    advantages_T = np.zeros(len(segment), dtype=np.float32)
    advantages_T[mask_T] = -kl_coef * discounted_future_sum(gap_N, kl_discount_factor)
    return advantages_T


def segment_advantages(
    group: TrajectoryGroup, *, kl_coef: float, kl_discount_factor: float, reward_coef: float
) -> list[tuple[Segment, FloatArray]]:
    """Every segment of the group with its advantages: the OPD term plus the centred task reward."""
    rewards_G = np.array([trajectory.reward for trajectory in group.trajectories_G], np.float32)
    centred_G = reward_coef * group_centred(rewards_G)
    rows = []
    for trajectory, reward in zip(group.trajectories_G, centred_G, strict=True):
        for segment in trajectory.segments:
            advantages_T = reward * segment.action_mask_T.astype(np.float32)
            if kl_coef:
                advantages_T += opd_advantages(segment, kl_coef, kl_discount_factor)
            rows.append((segment, advantages_T))
    return rows
