"""Metrics of a step's groups: what was sampled, by whom, how far from the teacher, how stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from distill.advantages import has_constant_reward, reference_gaps
from distill.types import FloatArray, Segment, StopReason, TrajectoryGroup


def group_metrics(groups_P: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """Means over the action tokens (or trajectories) of `groups_P`, trained at weight `version`.

    `opd/reverse_kl` is the sampled estimate of KL(p_T || q_T), `opd/reverse_kl_vs_q1` the same
    towards the teacher's unscaled q_1, and `opd/bias` the second less the first: the error of an
    objective that scores the teacher at temperature 1. `reference/kl` is the sampled
    KL(p_T || ref_T). Where groups have teachers or tags, reverse KL and reward come once more for
    each of them.
    """
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    segments = [segment for group in groups_P for segment in group.segments()]
    staleness_N = version - np.concatenate([s.versions_T[s.action_mask_T] for s in segments])
    lengths = [sum(s.num_actions for s in trajectory.segments) for trajectory in trajectories]
    metrics = {
        "staleness/mean": float(staleness_N.mean()),
        "staleness/max": float(staleness_N.max()),
        "reward/mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "reward/constant_groups": float(np.mean([has_constant_reward(g) for g in groups_P])),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/eos_share": float(
            np.mean([trajectory.stop_reason is StopReason.EOS for trajectory in trajectories])
        ),
    }
    for name in sorted({name for group in groups_P for name in group.metrics}):
        values = [group.metrics[name] for group in groups_P if name in group.metrics]
        metrics[name] = float(np.mean(values))
    metrics |= _teacher_metrics(segments)
    if all(segment.reference_logprobs_T is not None for segment in segments):
        gaps_N = np.concatenate([reference_gaps(segment) for segment in segments])
        metrics["reference/kl"] = float(gaps_N.mean(dtype=np.float64))
    bonuses = [s.bonuses_T.sum() for s in segments if s.bonuses_T is not None]
    if bonuses:
        metrics["reward/bonus"] = float(np.sum(bonuses) / len(trajectories))
    return metrics | _breakdown(groups_P)


def _teacher_metrics(segments: Sequence[Segment]) -> dict[str, float]:
    """The sampled reverse KL and the bias meter; nothing where some segment was not scored."""
    at_T = _gaps(segments, [s.teacher_logprobs_T for s in segments])
    if at_T is None:
        return {}
    metrics = {"opd/reverse_kl": float(at_T.mean())}
    at_q1 = _gaps(segments, [s.teacher_logprobs_q1_T for s in segments])
    if at_q1 is not None:
        metrics["opd/reverse_kl_vs_q1"] = float(at_q1.mean())
        metrics["opd/bias"] = metrics["opd/reverse_kl_vs_q1"] - metrics["opd/reverse_kl"]
    return metrics


def _gaps(segments: Sequence[Segment], teacher: Sequence[FloatArray | None]) -> np.ndarray | None:
    """log p_T - log q of all action tokens, in float64; None where a segment has no log q."""
    gaps = []
    for segment, teacher_T in zip(segments, teacher, strict=True):
        if teacher_T is None:
            return None
        mask_T = segment.action_mask_T
        gaps.append(segment.behaviour_logprobs_T[mask_T].astype(np.float64) - teacher_T[mask_T])
    return np.concatenate(gaps)


def _breakdown(groups_P: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean reward and reverse KL of the groups of each teacher and of each tag."""
    kinds: dict[str, list[TrajectoryGroup]] = {}
    for group in groups_P:
        if group.teacher:
            kinds.setdefault(f"teacher={group.teacher}", []).append(group)
        if group.tag is not None:
            kinds.setdefault(f"tag={group.tag}", []).append(group)
    metrics = {}
    for kind, groups in sorted(kinds.items()):
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories_G]
        metrics[f"reward/mean/{kind}"] = float(np.mean(rewards))
        segments = [segment for group in groups for segment in group.segments()]
        found = _teacher_metrics(segments)
        if found:
            metrics[f"opd/reverse_kl/{kind}"] = found["opd/reverse_kl"]
    return metrics


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its optimizer updates.

    `train/tokens` and `time/*` add up, extremes stay extremes, and all else is a mean over trained
    tokens.
    """
    metrics: dict[str, float] = {
        "train/updates": len(updates),
        "train/tokens": sum(update["train/tokens"] for update in updates),
    }
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        if name.endswith("_max"):
            metrics[name] = max(values)
        elif name.endswith("_min"):
            metrics[name] = min(values)
        elif name.startswith("time/"):
            metrics[name] = sum(values)
        elif name != "train/tokens":
            weights = [update["train/tokens"] for update in having]
            metrics[name] = float(np.average(values, weights=weights))
    return metrics
