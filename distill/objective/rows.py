"""Training rows from samples: one per segment, with everything that the objective needs.

`policy_rows` builds the rows of whole groups. A learner with several workers first builds only the
metadata of the rows (`RowMeta`) and distributes the rows to workers by it; the worker that trains a
row builds it from its trajectory (`trajectory_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from distill.objective.advantages import clipped, discounted_future_sum
from distill.objective.batching import OtherRows, TrainingRow
from distill.objective.objectives import (
    advantages_of,
    imitation_terms,
    reference_gap_sum,
    teacher_coef,
    trajectory_terms,
)
from distill.objective.settings import ObjectiveConfig
from distill.records import RowPlace, TrajectoryGroupMeta
from distill.types import (
    BoolArray,
    FloatArray,
    Segment,
    TokenArray,
    Trajectory,
    TrajectoryGroup,
)

# Maps rows to log p_T of their trained tokens under some weights: one array per row.
Score = Callable[[Sequence[TrainingRow]], Sequence[FloatArray]]


def policy_rows(
    groups_P: Sequence[TrajectoryGroup],
    objective: ObjectiveConfig,
    teacher_weights: Mapping[str, float] | None = None,
    stop_event: tuple[int, ...] = (),
) -> list[TrainingRow]:
    """Training rows of groups: one row per segment, with its terms, at the segment's temperature.

    The rows of a trajectory form one sequence. The teacher of a group has the weight kl_coef times
    its entry in `teacher_weights` (1 without weights). The tokens of `stop_event` count as one
    outcome (`distill.stops`), as in the log-probs of the segments.

    Raises:
        DataError: a segment lacks a score that the objective needs.
    """
    mean_kl = 0.0
    if objective.reference_kl_coef:
        segments = [s for group in groups_P if not group.by_teacher for s in group.segments()]
        mean_kl = reference_gap_sum(segments) / max(1, sum(s.num_actions for s in segments))
    advantages_P = advantages_of(groups_P, objective)
    return [
        row
        for group, advantages_G in zip(groups_P, advantages_P, strict=True)
        for trajectory, advantage in zip(group.trajectories_G, advantages_G, strict=True)
        for row in trajectory_rows(
            trajectory,
            objective,
            group_id=group.group_id,
            teacher=group.teacher,
            by_teacher=group.by_teacher,
            advantage=float(advantage),
            coef=teacher_coef(group.teacher, objective, teacher_weights),
            mean_kl=mean_kl,
            stop_event=stop_event,
        )
    ]


def trajectory_rows(
    trajectory: Trajectory,
    objective: ObjectiveConfig,
    *,
    group_id: int,
    teacher: str,
    by_teacher: bool,
    advantage: float,
    coef: float,
    mean_kl: float,
    stop_event: tuple[int, ...],
) -> list[TrainingRow]:
    """Rows of a trajectory, which form one sequence.

    Args:
        by_teacher: True if the teacher sampled the trajectory.
        advantage, coef, mean_kl, stop_event: see `trajectory_terms`.
    """
    if by_teacher:
        terms = imitation_terms(trajectory, coef)
    else:
        terms = trajectory_terms(
            trajectory,
            objective,
            advantage=advantage,
            coef=coef,
            mean_kl=mean_kl,
            stop_event=stop_event,
        )
    tokens = sum(segment.num_actions for segment in trajectory.segments)
    return [
        TrainingRow(
            tokens_T=segment.tokens_T,
            loss_mask_T=segment.action_mask_T,
            advantages_T=of_segment.advantages_T,
            behaviour_logprobs_T=segment.behaviour_logprobs_T,
            temperature=segment.temperature,
            source=f"group {group_id}",
            teacher=teacher,
            teacher_coef=of_segment.teacher_coef,
            teacher_context_T=segment.teacher_context_T,
            teacher_replaces=segment.teacher_replaces,
            teacher_top=segment.teacher_top,
            teacher_states=segment.teacher_states,
            sampled_kl_coef_T=of_segment.sampled_kl_coef_T,
            clipped_kl_coef_T=of_segment.clipped_kl_coef_T,
            teacher_gaps_T=of_segment.teacher_gaps_T,
            experts_TLK=segment.experts_TLK,
            ends_sequence=segment is trajectory.segments[-1],
            other_rows=OtherRows(tokens=tokens - segment.num_actions),
        )
        for segment, of_segment in zip(trajectory.segments, terms, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMeta:
    """`RowShape` of a segment: the placeholder of a training row that is not built yet."""

    place: RowPlace
    tokens: int
    first_trained: int
    num_trained: int
    context_key: bytes
    prefix_key: bytes
    teacher: str
    ends_sequence: bool

    def __len__(self) -> int:
        return self.tokens


def row_metas(group: TrajectoryGroupMeta) -> list[RowMeta]:
    """Metadata of all rows of a group, in the order of `policy_rows`."""
    numbers = [
        (g, n, n == count - 1) for g, count in enumerate(group.segments_G) for n in range(count)
    ]
    return [
        RowMeta(
            place=RowPlace(group.group_id, member, number),
            tokens=group.tokens_S[s],
            first_trained=group.first_actions_S[s],
            num_trained=group.actions_S[s],
            context_key=group.contexts_S[s],
            prefix_key=group.prefixes_S[s],
            teacher=group.teacher,
            ends_sequence=is_last,
        )
        for s, (member, number, is_last) in enumerate(numbers)
    ]


def joins_tokens(objective: ObjectiveConfig) -> bool:
    """True if the loss of a token depends on tokens of other rows of its sequence."""
    return objective.loss == "gspo" or bool(objective.kl_discount_factor)


class RowSums(NamedTuple):
    """Sums over one row that the other rows of its sequence need.

    Attributes:
        tokens: number of trained tokens.
        log_ratio: sum of log pi - log old over the trained tokens.
        kl: sum of c (log pi - log mu), discounted from the first trained token.
    """

    tokens: int
    log_ratio: float
    kl: float


def row_sums(row: TrainingRow, logprobs_N: FloatArray, objective: ObjectiveConfig) -> RowSums:
    """Sums of a row; `logprobs_N` are under the weights at the start of the update."""
    mask_T = row.loss_mask_T
    moved_N = logprobs_N.astype(np.float64) - row.behaviour_logprobs_T[mask_T]
    old_N = row.behaviour_logprobs_T[mask_T]
    if objective.correction != "none":  # without proximal log-probs the ratio is 1
        proximal_T = row.proximal_logprobs_T
        old_N = logprobs_N if proximal_T is None else proximal_T[mask_T]
    kl_N = _moved_kl(row, moved_N, objective.kl_clip)
    return RowSums(
        tokens=len(logprobs_N),
        log_ratio=float((logprobs_N.astype(np.float64) - old_N).sum()),
        kl=float(discounted_future_sum(kl_N, objective.kl_discount_factor)[0]),
    )


def with_sums_of_others(
    row: TrainingRow, number: int, sums: Sequence[RowSums], objective: ObjectiveConfig
) -> TrainingRow:
    """Copy of a row that includes the sums over the other rows of its sequence.

    `sums` has one entry per row of the sequence, and `number` is the index of `row` in it.
    """
    log_ratio = sum(each.log_ratio for each in sums) - sums[number].log_ratio
    future_kl = 0.0
    for each in reversed(sums[number + 1 :]):
        future_kl = each.kl + objective.kl_discount_factor**each.tokens * future_kl
    return replace(
        row, other_rows=replace(row.other_rows, log_ratio=log_ratio, future_kl=future_kl)
    )


def _moved_kl(row: TrainingRow, moved_N: np.ndarray, kl_clip: float | None) -> np.ndarray:
    """Weighted change of a row's sampled KL terms when log pi replaces log mu, shape (N,)."""
    mask_T, kl_N = row.loss_mask_T, np.zeros_like(moved_N)
    if (coef_T := row.sampled_kl_coef_T) is not None:
        kl_N += coef_T[mask_T] * moved_N
    if (coef_T := row.clipped_kl_coef_T) is not None and row.teacher_gaps_T is not None:
        gap_N = row.teacher_gaps_T[mask_T]
        kl_N += coef_T[mask_T] * (clipped(gap_N + moved_N, kl_clip) - clipped(gap_N, kl_clip))
    return kl_N


def rows_by_group(
    groups_P: Sequence[TrajectoryGroup], rows_D: Sequence[TrainingRow]
) -> Iterator[tuple[TrajectoryGroup, list[TrainingRow]]]:
    """Pairs of a group and its rows. `rows_D` are the rows that `policy_rows` built of `groups_P`.

    A group has one row per segment, in the order of `group.segments()`.
    """
    assert len(rows_D) == sum(len(list(group.segments())) for group in groups_P)
    rows = iter(rows_D)
    for group in groups_P:
        yield group, list(islice(rows, len(list(group.segments()))))


def segment_to_score(segment: Segment) -> TrainingRow:
    """Row of a segment whose actions the learner scores."""
    return row_to_score(
        segment.tokens_T, segment.action_mask_T, segment.temperature, "a segment to score"
    )


def row_to_score(
    tokens_T: TokenArray, mask_T: BoolArray, temperature: float, source: str
) -> TrainingRow:
    """Row whose masked tokens the learner scores; it is never trained."""
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return TrainingRow(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        advantages_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        temperature=temperature,
        source=source,
    )


class AdvantageStats(NamedTuple):
    """Statistics of the sampled advantages of trained tokens: population variance and extremes."""

    tokens: int
    mean: float
    variance: float
    largest: float
    smallest: float


def advantage_stats(rows_D: Sequence[TrainingRow]) -> AdvantageStats | None:
    """Advantage statistics of all trained tokens of the rows, or None without rows."""
    if not rows_D:
        return None
    advantages_N = np.concatenate([row.advantages_T[row.loss_mask_T] for row in rows_D])
    return AdvantageStats(
        tokens=len(advantages_N),
        mean=float(advantages_N.mean(dtype=np.float64)),
        variance=float(advantages_N.var(dtype=np.float64)),
        largest=float(advantages_N.max()),
        smallest=float(advantages_N.min()),
    )


def advantage_metrics(
    parts: Sequence[AdvantageStats | None], objective: ObjectiveConfig
) -> dict[str, float]:
    """Mean, standard deviation and extremes of the advantages over all parts of a step.

    Empty if the objective has no advantages (for example, a divergence of whole distributions) and
    no token has a reward of its own.
    """
    present = [part for part in parts if part is not None]
    rewarded = any(part.largest or part.smallest for part in present)
    if not present or not (objective.has_advantages or rewarded):
        return {}
    weights = [part.tokens for part in present]
    mean = float(np.average([part.mean for part in present], weights=weights))
    second = [part.variance + (part.mean - mean) ** 2 for part in present]
    return {
        "advantage/mean": mean,
        "advantage/std": float(np.average(second, weights=weights)) ** 0.5,
        "advantage/max": max(part.largest for part in present),
        "advantage/min": min(part.smallest for part in present),
    }
