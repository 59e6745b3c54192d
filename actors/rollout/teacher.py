"""Scoring of trajectories by a teacher and a reference policy, and sampling by a teacher.

    teacher      log q_T of each token, log q_1 for the bias meter, and at each action log-probs of
                 other tokens: the policy's likeliest if they are known, and optionally the
                 teacher's own likeliest; and the teacher's hidden states if the learner holds the
                 teacher's head (`States`). If the segment has a `teacher_context_T`, it replaces
                 the prompt
    reference    log-probs of each token, given the context that the policy saw

Each segment is scored at its own temperature (`Segment.temperature`). `Scorer` scores a trajectory
when it ends, while other trajectories of the group continue. `TeacherSampler` makes a teacher
sample instead of the policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from actors.together import together
from distill.engine import (
    GenerateRequest,
    Sample,
    Score,
    ScoreRequest,
    ScoringModel,
    check_token_ids,
)
from distill.errors import ConfigError, EngineError
from distill.lookup import known_names
from distill.privileged import in_context
from distill.sampling import UNSCALED
from distill.types import FloatArray, Segment, TokenArray, TopLogprobs, TrajectoryGroup

# Trajectories that end within this time, in seconds, are scored together: the model then computes
# their common prompt once.
_TOGETHER_S = 0.02

# Hidden states of a teacher: none; in addition to log-probs; or only hidden states, for a server
# that scores given tokens at T = 1, so that its log-probs cannot be used.
States: TypeAlias = Literal["none", "also", "only"]

# Fields of `Segment` that a model adds to one segment, by name.
_Fields = Mapping[str, Any]


def teacher_of(teachers: Mapping[str, ScoringModel], name: str) -> ScoringModel:
    """The teacher called `name`. A single teacher is returned for any name.

    Raises:
        ConfigError: there are no teachers, or several and none of that name.
    """
    if not teachers:
        raise ConfigError("no teacher is given to score with; give teacher=", field="teacher.model")
    if len(teachers) == 1:
        [teacher] = teachers.values()
        return teacher
    if name not in teachers:
        raise ConfigError(
            f"a prompt names the unknown teacher {name!r}; {known_names(name, teachers)}",
            field="teachers",
        )
    return teachers[name]


async def score_group(
    teacher: ScoringModel, group: TrajectoryGroup, *, top_k: int = 0
) -> TrajectoryGroup:
    """Score a group, and return it with `teacher_logprobs_T` (and those of q_1) on every segment.

    With `policy_top_ids_NK`, or `top_k` above 0, segments also get `teacher_top`: log-probs at
    those ids, and at the teacher's `top_k` likeliest other tokens. `policy_top_ids_NK` is then
    dropped, because `teacher_top` contains the ids.

    Raises:
        EngineError: the teacher returned the wrong number of log-probs.
    """
    scorers = Scorers(teacher=teacher, top_k=top_k)
    return _filled(group, await scorers.score(list(group.segments())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """Engines that score a group, and the values requested from the teacher.

    Attributes:
        teacher, reference: the engines; None: segments do not get its fields.
        top_k: number of the teacher's likeliest (other) tokens, as for `score_group`.
        states: hidden states requested from the teacher.
    """

    teacher: ScoringModel | None
    reference: ScoringModel | None = None
    top_k: int = 0
    states: States = "none"

    def __bool__(self) -> bool:
        return self.teacher is not None or self.reference is not None

    async def score(self, segments: Sequence[Segment]) -> list[_Fields]:
        """Fields of each segment from the teacher and the reference, which score concurrently."""
        wanted: list[Coroutine[Any, Any, list[_Fields]]] = []
        if self.teacher is not None:
            wanted.append(_by_teacher(self.teacher, segments, self.top_k, self.states))
        if self.reference is not None:
            wanted.append(_by_reference(self.reference, segments))
        made: list[dict[str, Any]] = [{"scored_by": ()} for _ in segments]
        for found in await together(*wanted):
            for fields, more in zip(made, found, strict=True):
                fields |= {**more, "scored_by": fields["scored_by"] + more["scored_by"]}
        return list(made)

    async def score_again(self, group: TrajectoryGroup, policy_top_k: int) -> TrajectoryGroup:
        """Score a group again, and return it with the new log-probs.

        Args:
            policy_top_k: number of leading ids in `teacher_top` that are the policy's likeliest.
                They are scored again; the teacher's own likeliest tokens are requested anew.
        """
        segments = [_unscored(segment, policy_top_k) for segment in group.segments()]
        return _filled(group, await self.score(segments))


def _unscored(segment: Segment, policy_top_k: int) -> Segment:
    if segment.teacher_top is None or not policy_top_k:
        return segment
    return replace(segment, policy_top_ids_NK=segment.teacher_top.ids_NK[:, :policy_top_k])


class Scorer:
    """Scores a group's trajectories as they end; those that end together share one request.

    Fills in the fields of `score_group` and `reference_logprobs_T`. The scoring tasks run in
    `tasks`, the task group of the rollout: an error in scoring cancels the rollout, and the
    reverse.
    """

    def __init__(self, tasks: asyncio.TaskGroup, scorers: Scorers) -> None:
        self._tasks, self._scorers = tasks, scorers
        self._waiting: list[Segment] = []
        self._all_ended = asyncio.Event()
        self._fields: dict[int, _Fields] = {}

    def ended(self, segments: Sequence[Segment]) -> None:
        """Queue the segments of a trajectory that has ended for scoring."""
        if not self._scorers:
            return
        if not self._waiting:
            self._tasks.create_task(self._score_waiting())
        self._waiting += segments

    async def _score_waiting(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TOGETHER_S):
                await self._all_ended.wait()
        segments, self._waiting = self._waiting, []
        scored = await self._scorers.score(segments)
        self._fields |= {id(s): fields for s, fields in zip(segments, scored, strict=True)}

    def finish(self) -> None:
        """Score the queued segments immediately: all trajectories have ended."""
        self._all_ended.set()

    def filled(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group with scores on its segments. Call it after the scoring tasks have ended."""
        if not self._scorers:
            return group
        return _filled(group, [self._fields[id(segment)] for segment in group.segments()])


class TeacherSampler:
    """A teacher that samples one group's episodes, given its privileged context if there is one.

    Args:
        context_T: tokens that replace an episode's first observation; None: no replacement.
        vocab_size: vocabulary size of the student. A teacher with a larger vocabulary can, though
            rarely, sample one of its padding ids.
    """

    def __init__(
        self, teacher: ScoringModel, context_T: TokenArray | None, vocab_size: int
    ) -> None:
        self._teacher, self._context_T, self._vocab_size = teacher, context_T, vocab_size
        self._firsts: list[TokenArray] = []
        self._engines: set[int] = set()

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """Sample from the teacher.

        Raises:
            DataError: a sampled token is outside the student's vocabulary.
        """
        shown = replace(request, prompt_tokens_T=self._shown(request.prompt_tokens_T), known=0)
        samples = await self._teacher.generate(shown)
        for sample in samples:
            check_token_ids(sample.tokens_T, self._vocab_size, "a sample of the teacher")
            if sample.sampled_by is not None:
                self._engines.add(sample.sampled_by)
        return samples

    def _shown(self, prompt_T: TokenArray) -> TokenArray:
        """Prompt for the teacher: the student's prompt with the context in place of the first
        observation.

        The first observation is an earlier prompt that these tokens begin with. If there is none,
        the prompt is itself a first observation.
        """
        if self._context_T is None:
            return prompt_T
        for first_T in self._firsts:
            if np.array_equal(prompt_T[: len(first_T)], first_T):
                return in_context(prompt_T, self._context_T, len(first_T))
        self._firsts.append(prompt_T)
        return self._context_T

    def mark_sampled(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """The group, marked as sampled by the teacher.

        The engines that sampled it are recorded as its scorers: their log-probs are the teacher's,
        and the same canaries check them.
        """
        engines = tuple(sorted(self._engines))
        fields = [{"scored_by": engines} for _ in group.segments()]
        return replace(_filled(group, fields), by_teacher=True)


async def _by_teacher(
    teacher: ScoringModel, segments: Sequence[Segment], top_k: int, states: States
) -> list[_Fields]:
    """The teacher's fields of each segment, in order."""
    requests = [_for_teacher(segment, top_k, states) for segment in segments]
    fields: list[_Fields] = []
    for segment, request, score in zip(
        segments, requests, await teacher.score(requests), strict=True
    ):
        of_teacher: dict[str, Any] = {
            "policy_top_ids_NK": None,
            "teacher_states": score.states,
            "teacher_version": score.version,
            "scored_by": _number(score),
        }
        if states != "only":
            at_T, at_q1 = score.logprobs_by_temperature
            of_teacher |= {
                "teacher_logprobs_T": _full_length(segment, at_T, "teacher"),
                "teacher_logprobs_q1_T": _full_length(segment, at_q1, "teacher"),
                "teacher_top": _top_of_actions(segment, score, request.listed),
            }
        fields.append(of_teacher)
    return fields


def _for_teacher(segment: Segment, top_k: int, states: States) -> ScoreRequest:
    """Scoring request for a segment, with the teacher's own context if the segment has one."""
    tokens_T, start = segment.tokens_T, segment.first_action
    if (context_T := segment.teacher_context_T) is not None:
        tokens_T = in_context(tokens_T, context_T, segment.teacher_replaces)
        start += len(context_T) - segment.teacher_replaces
    actions_N = segment.action_mask_T[segment.first_action :]
    return ScoreRequest(
        tokens_T=tokens_T,
        start=start,
        temperatures=(UNSCALED,) if states == "only" else (segment.temperature, UNSCALED),
        given_NK=_at_every_position(segment),
        top_k=top_k,
        states_N=None if states == "none" else actions_N,
    )


def _at_every_position(segment: Segment) -> TokenArray | None:
    """The policy's likeliest ids at every scored position, shape (N, K).

    Positions without a sampled token get the ids of the first action; they are dropped later,
    together with the position.
    """
    ids_NK = segment.policy_top_ids_NK
    if ids_NK is None:
        return None
    given_NK = np.repeat(ids_NK[:1], len(segment) - segment.first_action, axis=0)
    given_NK[segment.action_mask_T[segment.first_action :]] = ids_NK
    return given_NK


async def _by_reference(reference: ScoringModel, segments: Sequence[Segment]) -> list[_Fields]:
    """The reference policy's fields of each segment, in order."""
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
        logprobs_T = _full_length(segment, at_T, "reference")
        fields.append({"reference_logprobs_T": logprobs_T, "scored_by": _number(score)})
    return fields


def _number(score: Score) -> tuple[int, ...]:
    return () if score.scored_by is None else (score.scored_by,)


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
            f"the teacher returned log-probs of tokens in shape {shape}; requested were {listed} "
            f"at each of {expected} positions"
        )
    return score.top.at(segment.action_mask_T[segment.first_action :])
