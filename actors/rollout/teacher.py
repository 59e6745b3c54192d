"""Scoring of a sampled group by other models: its teacher, and a reference policy.

    teacher      log q_T of each token, q_1's for the bias meter, and of others at each action: the
                 policy's likeliest where they are known, its own if wanted;
                 with the segment's `teacher_context_T` in place of the prompt, where it has one
    reference    log-probs of each token; after what the policy itself saw

Each segment is scored at the segment's own temperature; there is no other place to take it from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distill.engine import Engine, Score, ScoreRequest
from distill.errors import ConfigError, EngineError
from distill.lookup import known_names
from distill.privileged import in_context
from distill.sampling import UNSCALED
from distill.types import FloatArray, Segment, TokenArray, TopLogprobs, TrajectoryGroup

# What a model adds to one segment: fields of `Segment` by name.
_Fields = Mapping[str, Any]


def teacher_of(teachers: Mapping[str, Engine], name: str) -> Engine:
    """The teacher of a group that names `name`; an only teacher has every group, whatever it names.

    Raises:
        ConfigError: there are several, and none of that name; or there are none.
    """
    if not teachers:
        raise ConfigError("there is no teacher to score with; give one")
    if len(teachers) == 1:
        [teacher] = teachers.values()
        return teacher
    if name not in teachers:
        raise ConfigError(
            f"a prompt names the teacher {name!r}, and there is none of that name; "
            f"{known_names(name, teachers)}"
        )
    return teachers[name]


async def score_group(
    teacher: Engine, group: TrajectoryGroup, *, top_k: int = 0
) -> TrajectoryGroup:
    """The same group with `teacher_logprobs_T` (and q_1's, for the bias meter) on every segment.

    With `policy_top_ids_NK`, or `top_k` above 0, also `teacher_top`: at those ids, and at so many
    of the teacher's likeliest others. The ids are then dropped: they are part of it.

    Raises:
        EngineError: the teacher answered with the wrong number of log-probs.
    """
    return _filled(group, await _by_teacher(teacher, group, top_k))


async def score_rollout(
    group: TrajectoryGroup,
    *,
    teachers: Mapping[str, Engine],
    reference: Engine | None,
    top_k: int,
) -> TrajectoryGroup:
    """`score_group` by the group's own teacher, and `reference_logprobs_T`, both at the same time.

    Without teachers the first is left out, without a reference the second.

    Raises:
        ConfigError: see `teacher_of`.
        EngineError: of whichever failed first; the other is cancelled.
    """
    wanted: list[Coroutine[Any, Any, list[_Fields]]] = []
    if teachers:
        wanted.append(_by_teacher(teacher_of(teachers, group.teacher), group, top_k))
    if reference is not None:
        wanted.append(_by_reference(reference, group))
    try:
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(one) for one in wanted]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the other was cancelled by the first
    for task in found:
        group = _filled(group, task.result())
    return group


async def _by_teacher(teacher: Engine, group: TrajectoryGroup, top_k: int) -> list[_Fields]:
    """The teacher's fields of each of the group's segments, in order."""
    segments = list(group.segments())
    requests = [_for_teacher(segment, top_k) for segment in segments]
    fields: list[_Fields] = []
    for segment, request, score in zip(
        segments, requests, await teacher.score(requests), strict=True
    ):
        at_T, at_q1 = score.logprobs_by_temperature
        fields.append(
            {
                "teacher_logprobs_T": _full_length(segment, at_T, "teacher"),
                "teacher_logprobs_q1_T": _full_length(segment, at_q1, "teacher"),
                "teacher_top": _top_of_actions(segment, score, request.listed),
                "policy_top_ids_NK": None,
            }
        )
    return fields


def _for_teacher(segment: Segment, top_k: int) -> ScoreRequest:
    """The scored tokens are the segment's; the prompt before them may be the teacher's own."""
    tokens_T, start = segment.tokens_T, segment.first_action
    if (context_T := segment.teacher_context_T) is not None:
        tokens_T = in_context(tokens_T, context_T, segment.teacher_replaces)
        start += len(context_T) - segment.teacher_replaces
    return ScoreRequest(
        tokens_T=tokens_T,
        start=start,
        temperatures=(segment.temperature, UNSCALED),
        given_NK=_at_every_position(segment),
        top_k=top_k,
    )


def _at_every_position(segment: Segment) -> TokenArray | None:
    """The policy's likeliest ids at all positions that are scored; where nothing was sampled, those
    of the first action, which are dropped with the position."""
    ids_NK = segment.policy_top_ids_NK
    if ids_NK is None:
        return None
    given_NK = np.repeat(ids_NK[:1], len(segment) - segment.first_action, axis=0)
    given_NK[segment.action_mask_T[segment.first_action :]] = ids_NK
    return given_NK


async def _by_reference(reference: Engine, group: TrajectoryGroup) -> list[_Fields]:
    """The reference policy's fields of each of the group's segments, in order."""
    segments = list(group.segments())
    requests = [
        ScoreRequest(
            tokens_T=segment.tokens_T,
            start=segment.first_action,
            temperatures=(segment.temperature,),
        )
        for segment in segments
    ]
    fields: list[_Fields] = []
    for segment, score in zip(segments, await reference.score(requests), strict=True):
        [at_T] = score.logprobs_by_temperature
        fields.append({"reference_logprobs_T": _full_length(segment, at_T, "reference")})
    return fields


def _filled(group: TrajectoryGroup, fields: Sequence[_Fields]) -> TrajectoryGroup:
    of_segment = iter(fields)
    trajectories_G = tuple(
        replace(
            trajectory,
            segments=tuple(replace(segment, **next(of_segment)) for segment in trajectory.segments),
        )
        for trajectory in group.trajectories_G
    )
    return replace(group, trajectories_G=trajectories_G)


def _full_length(segment: Segment, logprobs_N: FloatArray, who: str) -> FloatArray:
    expected = len(segment) - segment.first_action
    if len(logprobs_N) != expected:
        raise EngineError(f"the {who} returned {len(logprobs_N)} log-probs for {expected} tokens")
    logprobs_T = np.zeros(len(segment), np.float32)
    logprobs_T[segment.first_action :] = logprobs_N
    return np.where(segment.action_mask_T, logprobs_T, np.float32(0))


def _top_of_actions(segment: Segment, score: Score, listed: int) -> TopLogprobs | None:
    if not listed:
        return None
    expected = len(segment) - segment.first_action
    shape = None if score.top is None else score.top.ids_NK.shape
    if score.top is None or shape != (expected, listed):
        raise EngineError(
            f"the teacher returned log-probs of tokens of shape {shape}, asked for were {listed} "
            f"at each of {expected} positions"
        )
    return score.top.at(segment.action_mask_T[segment.first_action :])
