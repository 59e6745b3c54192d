"""On-policy distillation, from the actors' side: the teacher scores what the student sampled.

Each segment is scored at the segment's own temperature; there is no other place to take it from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distill.errors import EngineError
from distill.interfaces import Engine, Score, ScoreRequest
from distill.sampling import UNSCALED
from distill.types import FloatArray, Segment, TrajectoryGroup


async def score_group(teacher: Engine, group: TrajectoryGroup) -> TrajectoryGroup:
    """The same group with `teacher_logprobs_T` (and q_1's, for the bias meter) on every segment.

    Raises:
        EngineError: the teacher answered with the wrong number of log-probs.
    """
    requests = [_request(segment) for segment in group.segments()]
    scores = iter(await teacher.score(requests))
    trajectories_G = []
    for trajectory in group.trajectories_G:
        segments = tuple(_scored(segment, next(scores)) for segment in trajectory.segments)
        trajectories_G.append(replace(trajectory, segments=segments))
    return replace(group, trajectories_G=tuple(trajectories_G))


def _request(segment: Segment) -> ScoreRequest:
    return ScoreRequest(
        tokens_T=segment.tokens_T,
        start=segment.first_action,
        temperatures=(segment.temperature, UNSCALED),
    )


def _scored(segment: Segment, score: Score) -> Segment:
    at_T, at_q1 = score.logprobs_by_temperature
    return replace(
        segment,
        teacher_logprobs_T=_full_length(segment, at_T),
        teacher_logprobs_q1_T=_full_length(segment, at_q1),
    )


def _full_length(segment: Segment, logprobs_N: FloatArray) -> FloatArray:
    expected = len(segment) - segment.first_action
    if len(logprobs_N) != expected:
        raise EngineError(f"the teacher returned {len(logprobs_N)} log-probs for {expected} tokens")
    logprobs_T = np.zeros(len(segment), np.float32)
    logprobs_T[segment.first_action :] = logprobs_N
    return np.where(segment.action_mask_T, logprobs_T, np.float32(0))
