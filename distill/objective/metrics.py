"""Metrics of a step's groups: samples, their sampler, distance from the teacher, staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distill.objective.tallies import TURNS_SHOWN, gaps_of
from distill.records import GroupOutline
from distill.types import Segment, StopReason

# Metric of the learner (`objectives.teacher_cross_entropy`); it needs the log q_T of the sampler.
_OF_SAMPLER = "teacher_samples/forward_kl"


def group_metrics(groups_P: Sequence[GroupOutline], version: int) -> dict[str, float]:
    """Means over the action tokens (or trajectories) of `groups_P`, trained at weight `version`.

    docs/metrics.md has the meaning of each. If groups have teachers, tags or sources, reverse KL
    and reward are also reported for each of them, and for sources their share of the groups.

    Metrics of a teacher cover the groups that it scored. All of these metrics cover the policy's
    samples; the teacher's samples have `teacher_samples/*`, the only metrics of a step without
    samples of the policy.
    """
    by_teacher = [group for group in groups_P if group.by_teacher]
    metrics = _teacher_samples(by_teacher, len(groups_P))
    if len(by_teacher) == len(groups_P):
        return metrics
    return metrics | _policy_metrics([g for g in groups_P if not g.by_teacher], version)


def without_unknown(
    metrics: Mapping[str, float], groups_P: Sequence[GroupOutline]
) -> dict[str, float]:
    """The metrics of a step's groups, without those that need unknown log-probs."""
    if not any(group.as_text for group in groups_P):
        return dict(metrics)
    return {name: value for name, value in metrics.items() if name != _OF_SAMPLER}


def _teacher_samples(groups_P: Sequence[GroupOutline], of: int) -> dict[str, float]:
    """Share (of `of` groups), rewards and lengths of the groups that the teacher sampled.

    The learner measures the student's distance from them (`objectives.teacher_cross_entropy`).
    """
    if not groups_P:
        return {}
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    return {
        "teacher_samples/share": len(groups_P) / of,
        "teacher_samples/tokens": float(sum(group.tally.tokens for group in groups_P)),
        "teacher_samples/reward": float(np.mean([t.reward for t in trajectories])),
        "teacher_samples/response_length": float(np.mean([t.num_actions for t in trajectories])),
        "teacher_samples/eos_share": float(
            np.mean([t.stop_reason is StopReason.EOS for t in trajectories])
        ),
        **_means([group.metrics for group in groups_P]),
    }


def _means(metrics_P: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the mappings that have it."""
    return {
        name: float(np.mean([metrics[name] for metrics in metrics_P if name in metrics]))
        for name in sorted({name for metrics in metrics_P for name in metrics})
    }


def _policy_metrics(groups_P: Sequence[GroupOutline], version: int) -> dict[str, float]:
    tallies = [group.tally for group in groups_P]
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    tokens = sum(tally.tokens for tally in tallies)
    metrics = {
        "staleness/mean": (version * tokens - sum(t.versions for t in tallies)) / tokens,
        "staleness/max": float(version - min(tally.oldest for tally in tallies)),
        "reward/mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "reward/constant_groups": float(
            np.mean([group.constant_reward is not None for group in groups_P])
        ),
        "rollout/response_length": float(np.mean([t.num_actions for t in trajectories])),
        "rollout/eos_share": float(
            np.mean([trajectory.stop_reason is StopReason.EOS for trajectory in trajectories])
        ),
        "rollout/repeated_share": sum(t.repeated for t in tallies) / len(trajectories),
        "rollout/equal_groups": float(np.mean([tally.equal for tally in tallies])),
    }
    metrics |= _turn_metrics(groups_P)
    env = _means([trajectory.metrics for trajectory in trajectories])
    metrics |= {f"env/{name}": value for name, value in env.items()}
    metrics |= _means([group.metrics for group in groups_P])
    metrics |= _teacher_metrics(groups_P)
    scored = [tally for tally in tallies if tally.gap is not None]
    versions = _total([tally.teacher_versions for tally in scored])
    if scored and versions is not None:
        metrics["opd/teacher_age"] = version - versions / sum(tally.tokens for tally in scored)
    if (gap := _total([tally.reference_gap for tally in tallies])) is not None:
        metrics["reference/kl"] = gap / tokens
    bonuses = [tally.bonus for tally in tallies if tally.bonus is not None]
    if bonuses:
        metrics["reward/bonus"] = sum(bonuses) / len(trajectories)
    return metrics | _breakdown(groups_P)


def _total(parts: Sequence[float | None]) -> float | None:
    """Sum of the parts, or None if any part is None."""
    present = [part for part in parts if part is not None]
    return sum(present) if len(present) == len(parts) else None


def _turn_metrics(groups_P: Sequence[GroupOutline]) -> dict[str, float]:
    """Numbers of turns and segments, stop reasons, and the reverse KL of each of the first turns.

    The latter is included only if a trajectory has several turns. A turn's number is its position
    among the trained turns.
    """
    trajectories = [trajectory for group in groups_P for trajectory in group.trajectories_G]
    turns = sum(group.tally.turns for group in groups_P)
    metrics = {
        "rollout/turns": turns / len(trajectories),
        "rollout/segments": float(np.mean([len(t.segments) for t in trajectories])),
    }
    for reason in sorted({trajectory.stop_reason for trajectory in trajectories}):
        share = np.mean([trajectory.stop_reason is reason for trajectory in trajectories])
        metrics[f"rollout/stop/{reason.value}"] = float(share)
    if turns == len(trajectories):
        return metrics
    for number in range(TURNS_SHOWN):
        found = [gap for group in groups_P for gap in group.tally.turn_gaps[number : number + 1]]
        if tokens := sum(gap.tokens for gap in found):
            metrics[f"opd/reverse_kl/turn={number + 1}"] = sum(gap.gap for gap in found) / tokens
    return metrics


def _teacher_metrics(groups_P: Sequence[GroupOutline]) -> dict[str, float]:
    """The sampled reverse KL and bias of the groups that a teacher scored."""
    scored = [(group.tally, gap) for group in groups_P if (gap := group.tally.gap) is not None]
    if not scored:
        return {}
    tallies = [tally for tally, _ in scored]
    tokens = sum(tally.tokens for tally in tallies)
    size = sum(tally.gap_size for tally in tallies)
    metrics = {
        "opd/reverse_kl": sum(gap for _, gap in scored) / tokens,
        "opd/kl_top_share": sum(tally.largest_gaps for tally in tallies) / max(size, 1e-12),
    }
    if (at_q1 := _total([tally.gap_q1 for tally in tallies])) is not None:
        metrics["opd/reverse_kl_vs_q1"] = at_q1 / tokens
        metrics["opd/bias"] = metrics["opd/reverse_kl_vs_q1"] - metrics["opd/reverse_kl"]
    return metrics


class TokenGap(NamedTuple):
    """Statistics of one vocabulary token among a step's actions.

    How often it was sampled, the mean of its log p_T - log q_T, and its share of the step's sum of
    |log p_T - log q_T|.
    """

    id: int
    times: int
    mean: float
    share: float


class TokenTable(NamedTuple):
    """Sampled tokens of the vocabulary (`_U`): how often each was sampled, and the sums of its
    log p_T - log q_T and |log p_T - log q_T|."""

    ids_U: npt.NDArray[np.int32]
    times_U: npt.NDArray[np.int64]
    gaps_U: npt.NDArray[np.float64]
    sizes_U: npt.NDArray[np.float64]


def token_table(segments: Sequence[Segment]) -> TokenTable | None:
    """Table of the actions of the segments that a teacher scored; None if it scored none."""
    segments = [segment for segment in segments if segment.teacher_logprobs_T is not None]
    gaps_N = gaps_of(segments, [s.teacher_logprobs_T for s in segments]) if segments else None
    if gaps_N is None:
        return None
    sampled_N = np.concatenate([s.tokens_T[s.action_mask_T] for s in segments])
    return _summed(sampled_N, np.ones(len(sampled_N), np.int64), gaps_N, np.abs(gaps_N))


def _summed(
    ids_M: np.ndarray, times_M: np.ndarray, gaps_M: np.ndarray, sizes_M: np.ndarray
) -> TokenTable:
    ids_U, place_M = np.unique(ids_M, return_inverse=True)
    times_U, gaps_U, sizes_U = (
        np.bincount(place_M, values_M).astype(values_M.dtype)
        for values_M in (times_M, gaps_M, sizes_M)
    )
    return TokenTable(ids_U, times_U, gaps_U, sizes_U)


def tokens_by_gap(tables: Sequence[TokenTable | None], most: int) -> list[TokenGap]:
    """At most `most` tokens with the largest shares, the largest first.

    They show whether a few tokens of style dominate the training signal. Each table covers a part
    of a step.
    """
    present = [table for table in tables if table is not None]
    if not present:
        return []
    ids_U, times_U, gaps_U, sizes_U = _summed(*map(np.concatenate, zip(*present, strict=True)))
    means_U, shares_U = gaps_U / times_U, sizes_U / max(sizes_U.sum(), 1e-12)
    return [
        TokenGap(int(ids_U[u]), int(times_U[u]), float(means_U[u]), float(shares_U[u]))
        for u in np.argsort(-sizes_U, kind="stable")[:most]
    ]


def _breakdown(groups_P: Sequence[GroupOutline]) -> dict[str, float]:
    """Mean reward and reverse KL per teacher, tag and source; and each source's share of groups."""
    kinds: dict[str, list[GroupOutline]] = {}
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
        found = _teacher_metrics(groups)
        if found:
            metrics[f"opd/reverse_kl/{kind}"] = found["opd/reverse_kl"]
    return metrics


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its optimizer updates.

    `train/tokens` and `time/*` are summed, extremes stay extremes, and all others are means over
    trained tokens.
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
