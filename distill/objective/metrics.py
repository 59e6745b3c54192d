"""Metrics of a step's groups: what was sampled, by whom, how far from the teacher, how stale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distill.objective.advantages import reference_gaps
from distill.objective.repetition import repeated_share
from distill.types import FloatArray, Segment, StopReason, Trajectory, TrajectoryGroup

# Share of the tokens, those furthest from the teacher, of which `opd/kl_top_share` tells.
_TOP = 0.01
# Of longer episodes, the reverse KL of so many turns is told apart.
_TURNS_SHOWN = 8


def group_metrics(groups_P: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """Means over the action tokens (or trajectories) of `groups_P`, trained at weight `version`.

    `opd/reverse_kl` is the sampled estimate of KL(p_T || q_T), `opd/reverse_kl_vs_q1` the same
    towards the teacher's unscaled q_1, and `opd/bias` the second less the first: the error of an
    objective that scores the teacher at temperature 1. `reference/kl` is the sampled
    KL(p_T || ref_T). `opd/kl_top_share` is the share of sum |log p - log q| that the hundredth of
    the tokens has which is furthest off, and `rollout/repeated_share` that of `repeated_share`.
    Where groups have teachers, tags or sources, reverse KL and reward come once more for each of
    them, and for sources their share of the groups.
    """
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    segments = [segment for group in groups_P for segment in group.segments()]
    staleness_N = version - np.concatenate([s.versions_T[s.action_mask_T] for s in segments])
    lengths = [sum(s.num_actions for s in trajectory.segments) for trajectory in trajectories]
    metrics = {
        "staleness/mean": float(staleness_N.mean()),
        "staleness/max": float(staleness_N.max()),
        "reward/mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "reward/constant_groups": float(
            np.mean([group.constant_reward is not None for group in groups_P])
        ),
        "rollout/response_length": float(np.mean(lengths)),
        "rollout/eos_share": float(
            np.mean([trajectory.stop_reason is StopReason.EOS for trajectory in trajectories])
        ),
    }
    metrics["rollout/repeated_share"] = float(
        np.mean(
            [
                repeated_share([s.tokens_T[s.action_mask_T] for s in t.segments])
                for t in trajectories
            ]
        )
    )
    metrics |= _turn_metrics(trajectories)
    for name in sorted({name for t in trajectories for name in t.metrics}):
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[f"env/{name}"] = float(np.mean(values))
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


def turns_of(trajectory: Trajectory) -> list[tuple[Segment, slice]]:
    """The trained turns of a trajectory as slices: runs of action tokens, in order."""
    turns = []
    for segment in trajectory.segments:
        edges = np.flatnonzero(np.diff(segment.action_mask_T.astype(np.int8), append=0))
        starts, stops = edges[::2] + 1, edges[1::2] + 1
        turns += [(segment, slice(a, b)) for a, b in zip(starts, stops, strict=True)]
    return turns


def _turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Numbers of turns and segments, stop reasons, and the reverse KL of each of the first turns
    where some trajectory has several.

    A turn's number is its place among the turns that are trained.
    """
    turns_by_trajectory = [turns_of(trajectory) for trajectory in trajectories]
    metrics = {
        "rollout/turns": float(np.mean([len(turns) for turns in turns_by_trajectory])),
        "rollout/segments": float(np.mean([len(t.segments) for t in trajectories])),
    }
    for reason in sorted({trajectory.stop_reason for trajectory in trajectories}):
        share = np.mean([trajectory.stop_reason is reason for trajectory in trajectories])
        metrics[f"rollout/stop/{reason.value}"] = float(share)
    if all(len(turns) == 1 for turns in turns_by_trajectory):
        return metrics
    for number in range(_TURNS_SHOWN):
        gaps = [
            segment.behaviour_logprobs_T[where].astype(np.float64)
            - segment.teacher_logprobs_T[where]
            for turns in turns_by_trajectory
            for segment, where in turns[number : number + 1]
            if segment.teacher_logprobs_T is not None
        ]
        if gaps:
            metrics[f"opd/reverse_kl/turn={number + 1}"] = float(np.concatenate(gaps).mean())
    return metrics


def _teacher_metrics(segments: Sequence[Segment]) -> dict[str, float]:
    """The sampled reverse KL and the bias meter; nothing where some segment was not scored."""
    at_T = _gaps(segments, [s.teacher_logprobs_T for s in segments])
    if at_T is None:
        return {}
    metrics = {"opd/reverse_kl": float(at_T.mean()), "opd/kl_top_share": _top_share(at_T)}
    at_q1 = _gaps(segments, [s.teacher_logprobs_q1_T for s in segments])
    if at_q1 is not None:
        metrics["opd/reverse_kl_vs_q1"] = float(at_q1.mean())
        metrics["opd/bias"] = metrics["opd/reverse_kl_vs_q1"] - metrics["opd/reverse_kl"]
    return metrics


class TokenGap(NamedTuple):
    """A token of the vocabulary in a step's actions: how often it was sampled, the mean of its
    log p_T - log q_T, and its share of the step's sum of |log p_T - log q_T|."""

    id: int
    times: int
    mean: float
    share: float


def tokens_by_gap(groups_P: Sequence[TrajectoryGroup], most: int) -> list[TokenGap]:
    """The tokens with the largest shares, at most so many, the largest first.

    What a student is mostly taught may be a few tokens of style. Nothing where some segment was not
    scored by a teacher.
    """
    segments = [segment for group in groups_P for segment in group.segments()]
    gaps_N = _gaps(segments, [s.teacher_logprobs_T for s in segments])
    if gaps_N is None:
        return []
    sampled_N = np.concatenate([s.tokens_T[s.action_mask_T] for s in segments])
    ids_U, place_N, counts_U = np.unique(sampled_N, return_inverse=True, return_counts=True)
    sizes_U = np.bincount(place_N, np.abs(gaps_N))
    means_U = np.bincount(place_N, gaps_N) / counts_U
    shares_U = sizes_U / max(sizes_U.sum(), 1e-12)
    return [
        TokenGap(int(ids_U[u]), int(counts_U[u]), float(means_U[u]), float(shares_U[u]))
        for u in np.argsort(-sizes_U, kind="stable")[:most]
    ]


def _top_share(gaps_N: np.ndarray) -> float:
    """Share of sum |gap| of the hundredth of the tokens with the largest, rounded up; 0 of none."""
    sizes_N, top = np.abs(gaps_N), math.ceil(_TOP * len(gaps_N))
    largest_N = np.partition(sizes_N, len(sizes_N) - top)[-top:]
    return float(largest_N.sum() / max(sizes_N.sum(), 1e-12))


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
    """Mean reward and reverse KL of the groups of each teacher, tag and source; sources' shares."""
    kinds: dict[str, list[TrajectoryGroup]] = {}
    for group in groups_P:
        if group.teacher:
            kinds.setdefault(f"teacher={group.teacher}", []).append(group)
        if group.tag is not None:
            kinds.setdefault(f"tag={group.tag}", []).append(group)
        if group.source:
            kinds.setdefault(f"source={group.source}", []).append(group)
    metrics = {}
    for kind, groups in sorted(kinds.items()):
        rewards = [trajectory.reward for group in groups for trajectory in group.trajectories_G]
        metrics[f"reward/mean/{kind}"] = float(np.mean(rewards))
        if kind.startswith("source="):
            metrics[f"rollout/share/{kind}"] = len(groups) / len(groups_P)
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
