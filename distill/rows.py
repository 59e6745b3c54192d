"""Training rows from what was sampled: one a segment, with all that the objective asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from distill.advantages import on_actions, opd_advantages, outside_top, policy_advantages
from distill.batching import TrainingRow
from distill.objective import ObjectiveConfig
from distill.types import BoolArray, FloatArray, Segment, TokenArray, TrajectoryGroup


def policy_rows(
    groups_P: Sequence[TrajectoryGroup],
    objective: ObjectiveConfig,
    teacher_weights: Mapping[str, float] | None = None,
) -> list[TrainingRow]:
    """One row a segment, weighted by its advantages, at the segment's own temperature.

    Each group's teacher counts kl_coef times its weight (1 without weights). Its part is an
    advantage where it is known by the sampled token alone, and `teacher_coef` where the learner
    computes a divergence.

    Raises:
        DataError: a segment lacks a score that the objective needs.
    """
    rows_D = []
    for group, segment, advantages_T in policy_advantages(groups_P, objective):
        coef = objective.kl_coef
        if coef:
            coef *= 1.0 if teacher_weights is None else teacher_weights[group.teacher]
            advantages_T = advantages_T + _teacher_advantages(segment, objective, coef)
        rows_D.append(
            TrainingRow(
                tokens_T=segment.tokens_T,
                loss_mask_T=segment.action_mask_T,
                weights_T=advantages_T,
                behaviour_logprobs_T=segment.behaviour_logprobs_T,
                temperature=segment.temperature,
                source=f"group {group.group_id}",
                teacher=group.teacher,
                teacher_coef=0.0 if objective.estimator == "sampled" else coef,
                teacher_context_T=segment.teacher_context_T,
                teacher_replaces=segment.teacher_replaces,
                teacher_top=segment.teacher_top,
            )
        )
    return rows_D


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
    logprobs: Callable[[Sequence[TrainingRow]], Sequence[FloatArray]],
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
        weights_T=zeros_T,
        behaviour_logprobs_T=zeros_T,
        temperature=temperature,
        source=source,
    )


def _teacher_advantages(segment: Segment, objective: ObjectiveConfig, coef: float) -> FloatArray:
    if objective.estimator == "sampled":
        return opd_advantages(segment, coef, objective.kl_discount_factor)
    if objective.estimator == "top_k" and objective.tail == "sampled":
        return outside_top(segment, opd_advantages(segment, coef, 0.0))
    return np.zeros(len(segment), np.float32)


def advantage_metrics(rows_D: Sequence[TrainingRow]) -> dict[str, float]:
    """Mean, standard deviation and extremes of the advantages of all trained tokens."""
    advantages_N = np.concatenate([row.weights_T[row.loss_mask_T] for row in rows_D])
    return {
        "advantage/mean": float(advantages_N.mean(dtype=np.float64)),
        "advantage/std": float(advantages_N.std(dtype=np.float64)),
        "advantage/max": float(advantages_N.max()),
        "advantage/min": float(advantages_N.min()),
    }
