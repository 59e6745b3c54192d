"""Metrics of a step's groups: samples, their sampler, distance from the teacher, staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distill.records import TrajectoryGroupMeta
from distill.types import Segment

# Metric of the learner (`objectives.teacher_cross_entropy`) that needs the sampler's log q_T.
_OF_SAMPLER = "teacher_samples/forward_kl"


def group_metrics(groups_P: Sequence[TrajectoryGroupMeta], version: int) -> dict[str, float]:
    """Means over the action tokens (or trajectories) of `groups_P`, trained at weight `version`.

    docs/metrics.md explains each metric. If groups have teachers, tags or sources, reverse KL and
    reward are also reported for each teacher, tag and source, and for each source its share of the
    groups.

    Metrics of a teacher cover the groups that the teacher scored. All metrics cover the policy's
    samples, except `teacher_samples/*`, which cover the teacher's samples and are the only metrics
    of a step without samples of the policy.
    """
    by_teacher = [group for group in groups_P if group.by_teacher]
    metrics = _teacher_samples(by_teacher, len(groups_P))
    if len(by_teacher) == len(groups_P):
        return metrics
    return metrics | _policy_metrics([g for g in groups_P if not g.by_teacher], version)


def without_unknown(
    metrics: Mapping[str, float], groups_P: Sequence[TrajectoryGroupMeta]
) -> dict[str, float]:
    """The metrics of a step's groups, without those that need unknown log-probs."""
    if not any(group.as_text for group in groups_P):
        return dict(metrics)
    return {name: value for name, value in metrics.items() if name != _OF_SAMPLER}


def _teacher_samples(groups_P: Sequence[TrajectoryGroupMeta], of: int) -> dict[str, float]:
    """Share (of `of` groups), rewards and lengths of the groups that the teacher sampled.

    The student's distance from these samples is a metric of the learner
    (`objectives.teacher_cross_entropy`).
    """
    if not groups_P:
        return {}
    ratios = _ratios(groups_P)
    return {
        "teacher_samples/share": len(groups_P) / of,
        "teacher_samples/tokens": float(sum(sum(group.actions_S) for group in groups_P)),
        "teacher_samples/reward": ratios["reward/mean"],
        "teacher_samples/response_length": ratios["rollout/response_length"],
        "teacher_samples/eos_share": ratios["rollout/eos_share"],
        **_means([group.metrics for group in groups_P]),
    }


def _means(metrics_P: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the mappings that have it."""
    return {
        name: float(np.mean([metrics[name] for metrics in metrics_P if name in metrics]))
        for name in sorted({name for metrics in metrics_P for name in metrics})
    }


def _policy_metrics(groups_P: Sequence[TrajectoryGroupMeta], version: int) -> dict[str, float]:
    reasons = [reason for group in groups_P for reason in group.stop_reasons_G]
    metrics = _ratios(groups_P)
    if metrics["rollout/turns"] == 1:  # every trajectory has a single turn
        metrics.pop("opd/reverse_kl/turn=1", None)
    metrics["staleness/mean"] = version - metrics.pop("staleness/version")
    metrics["staleness/max"] = float(version - min(group.oldest_version for group in groups_P))
    metrics["reward/constant_groups"] = float(
        np.mean([group.constant_reward is not None for group in groups_P])
    )
    metrics |= {
        f"rollout/stop/{reason.value}": reasons.count(reason) / len(reasons)
        for reason in sorted(set(reasons))
    }
    if bonuses := [
        group.sums["reward/bonus"][0] for group in groups_P if "reward/bonus" in group.sums
    ]:
        metrics["reward/bonus"] = sum(bonuses) / len(reasons)  # groups without bonuses count as 0
    if (age := metrics.pop("opd/teacher_version", None)) is not None:
        metrics["opd/teacher_age"] = version - age
    if "opd/reverse_kl_vs_q1" in metrics:
        metrics["opd/bias"] = metrics["opd/reverse_kl_vs_q1"] - metrics["opd/reverse_kl"]
    env = _means([each for group in groups_P for each in group.metrics_G])
    metrics |= {f"env/{name}": value for name, value in env.items()}
    metrics |= _means([group.metrics for group in groups_P])
    return metrics | _breakdown(groups_P)


def _ratios(groups_P: Sequence[TrajectoryGroupMeta]) -> dict[str, float]:
    """Ratios of the totals of the groups' sums, by name.

    Ratios named `opd/*` cover the groups that a teacher scored, others cover all groups. A ratio is
    left out if a group that it covers lacks the sum, except the ratios of turns, which cover the
    groups that have the turn.
    """
    scored = [group for group in groups_P if "opd/reverse_kl" in group.sums]
    ratios = {}
    for name in dict.fromkeys(name for group in groups_P for name in group.sums):
        partial = name.startswith("opd/reverse_kl/turn=")
        covered = scored if name.startswith("opd/") and not partial else groups_P
        sums = [group.sums[name] for group in covered if name in group.sums]
        if sums and (partial or len(sums) == len(covered)):
            ratios[name] = sum(total for total, _ in sums) / sum(weight for _, weight in sums)
    return ratios


class TokenGap(NamedTuple):
    """Statistics of one vocabulary token among a step's actions.

    Attributes:
        id: token id.
        times: number of times that the token was sampled.
        mean: mean of its log p_T - log q_T.
        share: its share of the step's sum of |log p_T - log q_T|.
    """

    id: int
    times: int
    mean: float
    share: float


class TokenTable(NamedTuple):
    """Distinct sampled tokens (`_U`), the number of times that each was sampled (`times_U`), and
    for each the sums of log p_T - log q_T (`gaps_U`) and |log p_T - log q_T| (`sizes_U`)."""

    ids_U: npt.NDArray[np.int32]
    times_U: npt.NDArray[np.int64]
    gaps_U: npt.NDArray[np.float64]
    sizes_U: npt.NDArray[np.float64]


def token_table(segments: Sequence[Segment]) -> TokenTable | None:
    """Table of the actions of the segments that a teacher scored; None if there are none."""
    scored = [(s, s.teacher_logprobs_T) for s in segments if s.teacher_logprobs_T is not None]
    if not scored:
        return None
    gaps_N = np.concatenate(
        [
            s.behaviour_logprobs_T[s.action_mask_T].astype(np.float64) - teacher_T[s.action_mask_T]
            for s, teacher_T in scored
        ]
    )
    sampled_N = np.concatenate([s.tokens_T[s.action_mask_T] for s, _ in scored])
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

    These tokens show whether a few tokens of style dominate the training signal. Each table covers
    a part of a step.
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


def _breakdown(groups_P: Sequence[TrajectoryGroupMeta]) -> dict[str, float]:
    """Mean reward and reverse KL per teacher, tag and source, and each source's share of groups."""
    kinds: dict[str, list[TrajectoryGroupMeta]] = {}
    for group in groups_P:
        if group.teacher:
            kinds.setdefault(f"teacher={group.teacher}", []).append(group)
        if group.tag is not None:
            kinds.setdefault(f"tag={group.tag}", []).append(group)
        if group.source:
            kinds.setdefault(f"source={group.source}", []).append(group)
    metrics = {}
    for kind, groups in sorted(kinds.items()):
        ratios = _ratios(groups)
        metrics[f"reward/mean/{kind}"] = ratios["reward/mean"]
        if kind.startswith("source="):
            metrics[f"rollout/share/{kind}"] = len(groups) / len(groups_P)
        if "opd/reverse_kl" in ratios:
            metrics[f"opd/reverse_kl/{kind}"] = ratios["opd/reverse_kl"]
    return metrics


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from the metrics of its optimizer updates.

    `train/tokens` and `time/*` are summed, `*_max` and `*_min` are the extremes over the updates,
    and all other metrics are means weighted by trained tokens.
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
