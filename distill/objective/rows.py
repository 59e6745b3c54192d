"""Training rows from what was sampled: one per segment, with all that the objective asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from distill.objective.advantages import clipped, discounted_future_sum, on_actions
from distill.objective.batching import OtherRows, TrainingRow
from distill.objective.objectives import TokenTerms, policy_terms
from distill.objective.settings import ObjectiveConfig
from distill.types import (
    BoolArray,
    FloatArray,
    Segment,
    TokenArray,
    Trajectory,
    TrajectoryGroup,
)

# log p_T of each row's trained tokens, by some weights: one array per row.
Score = Callable[[Sequence[TrainingRow]], Sequence[FloatArray]]


def policy_rows(
    groups_P: Sequence[TrajectoryGroup],
    objective: ObjectiveConfig,
    teacher_weights: Mapping[str, float] | None = None,
    stop_event: tuple[int, ...] = (),
) -> list[TrainingRow]:
    """One row per segment, with its terms of the objective, at the segment's own temperature.

    A trajectory's rows are one sequence.

    Raises:
        DataError: a segment lacks a score that the objective needs.
    """
    return [
        _policy_row(group, trajectory, segment, of_segment)
        for group, trajectory, terms in policy_terms(
            groups_P, objective, teacher_weights, stop_event
        )
        for segment, of_segment in zip(trajectory.segments, terms, strict=True)
    ]


def _policy_row(
    group: TrajectoryGroup, trajectory: Trajectory, segment: Segment, terms: TokenTerms
) -> TrainingRow:
    tokens = sum(each.num_actions for each in trajectory.segments)
    return TrainingRow(
        tokens_T=segment.tokens_T,
        loss_mask_T=segment.action_mask_T,
        advantages_T=terms.advantages_T,
        behaviour_logprobs_T=segment.behaviour_logprobs_T,
        temperature=segment.temperature,
        source=f"group {group.group_id}",
        teacher=group.teacher,
        teacher_coef=terms.teacher_coef,
        teacher_context_T=segment.teacher_context_T,
        teacher_replaces=segment.teacher_replaces,
        teacher_top=segment.teacher_top,
        sampled_kl_coef_T=terms.sampled_kl_coef_T,
        clipped_kl_coef_T=terms.clipped_kl_coef_T,
        teacher_gaps_T=terms.teacher_gaps_T,
        experts_TLK=segment.experts_TLK,
        ends_sequence=segment is trajectory.segments[-1],
        other_rows=OtherRows(tokens=tokens - segment.num_actions),
    )


def with_other_rows(
    rows_D: Sequence[TrainingRow], objective: ObjectiveConfig, score: Score
) -> list[TrainingRow]:
    """The rows of an update, those of one sequence knowing of each other what the loss needs.

    Args:
        score: by the weights that the update starts from. It is asked only for sequences of several
            rows, and only where a loss joins their tokens: gspo's ratio, discounted future terms.
    """
    joined = [rows for rows in _sequences(rows_D) if len(rows) > 1]
    if not joined or not (objective.loss == "gspo" or objective.kl_discount_factor):
        return list(rows_D)
    scored = iter(score([row for rows in joined for row in rows]))
    filled = {
        id(row): replace(row, other_rows=others)
        for rows in joined
        for row, others in zip(
            rows, _others(rows, [next(scored) for _ in rows], objective), strict=True
        )
    }
    return [filled.get(id(row), row) for row in rows_D]


def _sequences(rows_D: Sequence[TrainingRow]) -> Iterator[list[TrainingRow]]:
    rows: list[TrainingRow] = []
    for row in rows_D:
        rows.append(row)
        if row.ends_sequence:
            yield rows
            rows = []
    assert not rows, f"{rows[0].source}: its sequence has no end among the rows"


def _others(
    rows: Sequence[TrainingRow], logprobs: Sequence[FloatArray], objective: ObjectiveConfig
) -> list[OtherRows]:
    """`OtherRows` of each of a sequence's rows."""
    log_ratios, future_kls, following = [], [], 0.0
    for row, logprobs_N in reversed(list(zip(rows, logprobs, strict=True))):
        mask_T = row.loss_mask_T
        moved_N = logprobs_N.astype(np.float64) - row.behaviour_logprobs_T[mask_T]
        old_N = row.behaviour_logprobs_T[mask_T]
        if objective.correction != "none":  # without proximal log-probs the ratio is 1
            proximal_T = row.proximal_logprobs_T
            old_N = logprobs_N if proximal_T is None else proximal_T[mask_T]
        log_ratios.insert(0, float((logprobs_N.astype(np.float64) - old_N).sum()))
        future_kls.insert(0, following)
        kl_N = np.append(_moved_kl(row, moved_N, objective.kl_clip), following)
        following = float(discounted_future_sum(kl_N, objective.kl_discount_factor)[0])
    return [
        replace(row.other_rows, log_ratio=sum(log_ratios) - log_ratio, future_kl=future_kl)
        for row, log_ratio, future_kl in zip(rows, log_ratios, future_kls, strict=True)
    ]


def _moved_kl(row: TrainingRow, moved_N: np.ndarray, kl_clip: float | None) -> np.ndarray:
    """What log pi in place of log mu adds to the sampled KLs of a row's tokens, weighted."""
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
    """Each group with its rows, of those that `policy_rows` made of `groups_P`, in order.

    A group's rows are its segments', one each, in the order of `group.segments()`.
    """
    assert len(rows_D) == sum(len(list(group.segments())) for group in groups_P)
    rows = iter(rows_D)
    for group in groups_P:
        yield group, list(islice(rows, len(list(group.segments()))))


def with_reference(
    groups_P: Sequence[TrajectoryGroup],
    logprobs: Score,
) -> list[TrajectoryGroup]:
    """The groups with `reference_logprobs_T`, by a reference that scores rows' trained tokens."""
    segments = [segment for group in groups_P for segment in group.segments()]
    scored = iter(
        logprobs(
            [
                row_to_score(s.tokens_T, s.action_mask_T, s.temperature, "a segment to score")
                for s in segments
            ]
        )
    )

    def filled(segment: Segment) -> Segment:
        return replace(segment, reference_logprobs_T=on_actions(segment, next(scored)))

    return [
        replace(
            group,
            trajectories_G=tuple(
                replace(member, segments=tuple(map(filled, member.segments)))
                for member in group.trajectories_G
            ),
        )
        for group in groups_P
    ]


def row_to_score(
    tokens_T: TokenArray, mask_T: BoolArray, temperature: float, source: str
) -> TrainingRow:
    """A row whose masked tokens the learner scores; it is never trained."""
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return TrainingRow(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        advantages_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        temperature=temperature,
        source=source,
    )


def advantage_metrics(rows_D: Sequence[TrainingRow]) -> dict[str, float]:
    """Mean, standard deviation and extremes of all trained tokens' advantages as sampled."""
    advantages_N = np.concatenate([row.advantages_T[row.loss_mask_T] for row in rows_D])
    return {
        "advantage/mean": float(advantages_N.mean(dtype=np.float64)),
        "advantage/std": float(advantages_N.std(dtype=np.float64)),
        "advantage/max": float(advantages_N.max()),
        "advantage/min": float(advantages_N.min()),
    }
