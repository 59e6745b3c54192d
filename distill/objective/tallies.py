"""Outlines of groups, with the sums from which a step's metrics are made (`distill.records`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest

import numpy as np

from distill.objective.advantages import reference_gaps
from distill.objective.repetition import repeated_share
from distill.records import GroupOutline, GroupTally, SegmentOutline, TrajectoryOutline, TurnGap
from distill.types import FloatArray, Segment, TokenArray, Trajectory, TrajectoryGroup

# Share of a group's tokens, those furthest from the teacher, that `opd/kl_top_share` covers.
_TOP = 0.01
_BY_CHANCE = 1e-6
# Number of first turns whose reverse KL is reported separately.
TURNS_SHOWN = 8


def outline(group: TrajectoryGroup) -> GroupOutline:
    """Outline of a group: the group without its tokens."""
    return GroupOutline(
        group_id=group.group_id,
        trajectories_G=tuple(map(_trajectory, group.trajectories_G)),
        tally=tally(group),
        constant_reward=group.constant_reward,
        metrics=group.metrics,
        teacher=group.teacher,
        tag=group.tag,
        source=group.source,
        answer=group.answer,
        by_teacher=group.by_teacher,
        as_text=group.as_text,
    )


def _trajectory(trajectory: Trajectory) -> TrajectoryOutline:
    return TrajectoryOutline(
        segments=tuple(map(_segment, trajectory.segments)),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
        metrics=trajectory.metrics,
        reward_counts=trajectory.reward_counts,
    )


def _segment(segment: Segment) -> SegmentOutline:
    first = segment.first_action
    return SegmentOutline(
        tokens=len(segment),
        num_actions=segment.num_actions,
        first_action=first,
        context=_digest(segment.tokens_T[:first]),
        prefix=_digest(segment.tokens_T[: first - 1]),
    )


def _digest(tokens_T: TokenArray) -> bytes:
    return blake2b(tokens_T.tobytes(), digest_size=8).digest()


def tally(group: TrajectoryGroup) -> GroupTally:
    """Sums over the group's action tokens."""
    segments = list(group.segments())
    versions_N = np.concatenate([s.versions_T[s.action_mask_T] for s in segments])
    turns = [turns_of(trajectory) for trajectory in group.trajectories_G]
    at_T = gaps_of(segments, [s.teacher_logprobs_T for s in segments])
    at_q1 = gaps_of(segments, [s.teacher_logprobs_q1_T for s in segments])
    bonuses = [float(s.bonuses_T.sum()) for s in segments if s.bonuses_T is not None]
    reference = None
    if all(segment.reference_logprobs_T is not None for segment in segments):
        gaps_N = np.concatenate([reference_gaps(segment) for segment in segments])
        reference = float(gaps_N.sum(dtype=np.float64))
    return GroupTally(
        tokens=len(versions_N),
        versions=int(versions_N.sum(dtype=np.int64)),
        oldest=int(versions_N.min()),
        repeated=sum(map(_repeated, group.trajectories_G)),
        turns=sum(map(len, turns)),
        turn_gaps=tuple(
            _turn_gap([turn for turn in number if turn is not None])
            for number in list(zip_longest(*turns))[:TURNS_SHOWN]
        ),
        gap=None if at_T is None else float(at_T.sum()),
        gap_q1=None if at_q1 is None else float(at_q1.sum()),
        gap_size=0.0 if at_T is None else float(np.abs(at_T).sum()),
        largest_gaps=0.0 if at_T is None else _sum_of_largest(np.abs(at_T)),
        reference_gap=reference,
        bonus=sum(bonuses) if bonuses else None,
        teacher_versions=_teacher_versions(segments),
        equal=_equal(group.trajectories_G),
    )


def _equal(members_G: Sequence[Trajectory]) -> bool:
    """True if all members are equal, and independent samples were so with p below _BY_CHANCE."""
    tokens_G = {tuple(s.tokens_T.tobytes() for s in member.segments) for member in members_G}
    if len(members_G) < 2 or len(tokens_G) > 1:
        return False
    logprob = sum(
        float(segment.behaviour_logprobs_T[segment.action_mask_T].sum(dtype=np.float64))
        for segment in members_G[0].segments
    )
    return (len(members_G) - 1) * logprob < math.log(_BY_CHANCE)


def _teacher_versions(segments: Sequence[Segment]) -> int | None:
    versions = [(s.teacher_version, s.num_actions) for s in segments]
    if any(version is None for version, _ in versions):
        return None
    return sum((version or 0) * tokens for version, tokens in versions)


def turns_of(trajectory: Trajectory) -> list[tuple[Segment, slice]]:
    """The trained turns of a trajectory as slices: runs of action tokens, in order."""
    turns = []
    for segment in trajectory.segments:
        edges = np.flatnonzero(np.diff(segment.action_mask_T.astype(np.int8), append=0))
        starts, stops = edges[::2] + 1, edges[1::2] + 1
        turns += [(segment, slice(a, b)) for a, b in zip(starts, stops, strict=True)]
    return turns


def _turn_gap(turns: Sequence[tuple[Segment, slice]]) -> TurnGap:
    """Sum of log p_T - log q_T over the scored turns of one number, and their token count."""
    gaps = [
        segment.behaviour_logprobs_T[where].astype(np.float64) - segment.teacher_logprobs_T[where]
        for segment, where in turns
        if segment.teacher_logprobs_T is not None
    ]
    return TurnGap(sum(float(gap_N.sum()) for gap_N in gaps), sum(map(len, gaps)))


def _repeated(trajectory: Trajectory) -> float:
    return repeated_share([s.tokens_T[s.action_mask_T] for s in trajectory.segments])


def _sum_of_largest(sizes_N: np.ndarray) -> float:
    """Sum of the largest hundredth of the values, its size rounded up."""
    top = math.ceil(_TOP * len(sizes_N))
    return float(np.partition(sizes_N, len(sizes_N) - top)[-top:].sum())


def gaps_of(segments: Sequence[Segment], teacher: Sequence[FloatArray | None]) -> np.ndarray | None:
    """log p_T - log q of all action tokens, in float64; None if a segment has no log q."""
    gaps = []
    for segment, teacher_T in zip(segments, teacher, strict=True):
        if teacher_T is None:
            return None
        mask_T = segment.action_mask_T
        gaps.append(segment.behaviour_logprobs_T[mask_T].astype(np.float64) - teacher_T[mask_T])
    return np.concatenate(gaps)
