"""Metrics of a step's groups: what was sampled, by whom, how far from the teacher, how stale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distill.types import StopReason, TrajectoryGroup


def group_metrics(groups_P: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """Means over the action tokens (or trajectories) of `groups_P`, trained at weight `version`.

    `opd/reverse_kl` is the sampled estimate of KL(p_T || q_T), `opd/reverse_kl_vs_q1` the same
    towards the teacher's unscaled q_1, and `opd/bias` the second less the first: the error of an
    objective that scores the teacher at temperature 1.
    """
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    segments = [segment for group in groups_P for segment in group.segments()]
    staleness_N = version - np.concatenate([s.versions_T[s.action_mask_T] for s in segments])
    lengths = [sum(s.num_actions for s in trajectory.segments) for trajectory in trajectories]
    metrics = {
        "staleness/mean": float(staleness_N.mean()),
        "staleness/max": float(staleness_N.max()),
        "reward/mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/eos_share": float(
            np.mean([trajectory.stop_reason is StopReason.EOS for trajectory in trajectories])
        ),
    }
    for name in sorted({name for group in groups_P for name in group.metrics}):
        values = [group.metrics[name] for group in groups_P if name in group.metrics]
        metrics[name] = float(np.mean(values))
    scored = [s for s in segments if s.teacher_logprobs_T is not None]
    if len(scored) == len(segments):
        behaviour_N = np.concatenate([s.behaviour_logprobs_T[s.action_mask_T] for s in segments])
        metrics["opd/reverse_kl"] = _mean_gap(
            behaviour_N,
            [s.teacher_logprobs_T for s in segments],
            [s.action_mask_T for s in segments],
        )
        metered = [s for s in segments if s.teacher_logprobs_q1_T is not None]
        if len(metered) == len(segments):
            biased = _mean_gap(
                behaviour_N,
                [s.teacher_logprobs_q1_T for s in segments],
                [s.action_mask_T for s in segments],
            )
            metrics["opd/reverse_kl_vs_q1"] = biased
            metrics["opd/bias"] = biased - metrics["opd/reverse_kl"]
    return metrics


def _mean_gap(behaviour_N: np.ndarray, teacher: list, masks: list[np.ndarray]) -> float:
    teacher_N = np.concatenate([t[mask] for t, mask in zip(teacher, masks, strict=True)])
    return float((behaviour_N.astype(np.float64) - teacher_N).mean())
