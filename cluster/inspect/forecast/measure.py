"""Measurements of a pair of models: both answer some prompts, and both score all answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np
import torch

from actors.rollout.episode import rollout_group
from actors.rollout.teacher import score_group
from distill.engine import Engine
from distill.envs.base import TEACHER, EnvDataset
from distill.objective.noise_scale import NoiseScale, noise_scale
from distill.objective.rows import policy_rows, rows_by_group
from distill.sampling import TrainSampling
from distill.types import FloatArray, StopReason, TopLogprobs, TrajectoryGroup
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss

if TYPE_CHECKING:
    from distill.objective.batching import TrainingRow

_SEED = 30_000
# Number of each model's likeliest tokens that are compared, and the share of their probability that
# common tokens must have.
TOP, _HOLDS = 16, 0.9
# Share of a response that counts as its beginning, and as its end.
_QUARTER = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Statistics of one model's answers.

    Attributes:
        tokens: mean number of tokens of an answer.
        eos_share, cut_share: shares of answers that end by themselves, and at max_new_tokens.
        reward: mean reward; None if no problem can be judged.
    """

    tokens: float
    eos_share: float
    cut_share: float
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurements:
    """Measurements of a pair at T.

    Attributes:
        reward_gain, reward_gain_error: mean over prompts of the teacher's reward minus the
            student's, and its standard error. None if no problem can be judged.
        reverse_kl, forward_kl: nats per token, on the student's and on the teacher's samples.
        kl_early, kl_late: reverse KL in the first and in the last quarter of the responses.
        teacher_holds: share of the student's positions at which at least 90 % of the probability of
            the student's `TOP` likeliest tokens is on tokens that are also the teacher's likeliest.
        student_holds: share of these positions at which the same holds with the models exchanged.
        prompt_tokens: mean length of a prompt.
        noise: noise scale of the distillation's gradient; a sample is a response.
        noise_of: estimator of that gradient: the run's if it is `full`, else `sampled`, whose noise
            is an upper bound of that of `top_k`.
        score_s, sample_s: seconds for scoring the student's samples by the teacher, and for
            sampling them.
    """

    student: AnswerStats
    teacher: AnswerStats
    reward_gain: float | None
    reward_gain_error: float | None
    reverse_kl: float
    forward_kl: float
    kl_early: float
    kl_late: float
    teacher_holds: float
    student_holds: float
    prompt_tokens: float
    noise: NoiseScale
    noise_of: str
    score_s: float
    sample_s: float


async def measure(
    student: Engine,
    teacher: Engine,
    learner: Learner,
    problems: EnvDataset,
    *,
    chosen_P: Sequence[int],
    samples: int,
    sampling: TrainSampling,
    top: int,
    loss: PolicyObjectiveLoss,
) -> PairMeasurements:
    """Answer the chosen problems with both models, score the answers, and measure the pair.

    The engines run one after the other where possible, because their times are measured.

    Args:
        loss: loss whose gradient noise is measured, with estimator=full or sampled.
    """

    async def answered(engine: Engine) -> list[TrajectoryGroup]:
        return await asyncio.gather(
            *(
                rollout_group(
                    engine,
                    problems.builder(p, samples),
                    sampling,
                    group_id=p,
                    seed=_SEED,
                    models={TEACHER: teacher},
                )
                for p in chosen_P
            )
        )

    async def scored(engine: Engine, groups_P: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return await asyncio.gather(*(score_group(engine, each, top_k=top) for each in groups_P))

    started = time.perf_counter()
    by_student = await answered(student)
    sampled = time.perf_counter()
    by_student = await scored(teacher, by_student)
    ended = time.perf_counter()
    by_teacher = await scored(student, await answered(teacher))
    own = await scored(student, [_without_hints(group) for group in by_student])
    judged = [problems.builder(p, samples).judged for p in chosen_P]
    gains = [
        _reward(there) - _reward(here)
        for here, there, counts in zip(by_student, by_teacher, judged, strict=True)
        if counts
    ]
    gaps = [_gaps(group) for group in by_student]
    teacher_holds, student_holds = _held(own, by_student)
    return PairMeasurements(
        student=_answers(by_student, judged),
        teacher=_answers(by_teacher, judged),
        reward_gain=fmean(gains) if gains else None,
        reward_gain_error=stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None,
        reverse_kl=float(np.concatenate([each for group in gaps for each in group]).mean()),
        forward_kl=float(
            np.concatenate([each for group in by_teacher for each in _gaps(group)]).mean()
        ),
        kl_early=_mean_of([each[: _quarter(each)] for group in gaps for each in group]),
        kl_late=_mean_of([each[-_quarter(each) :] for group in gaps for each in group]),
        teacher_holds=teacher_holds,
        student_holds=student_holds,
        prompt_tokens=fmean(s.first_action for group in by_student for s in group.segments()),
        noise=gradient_noise(learner, by_student, loss),
        noise_of=loss.objective.estimator,
        score_s=ended - sampled,
        sample_s=sampled - started,
    )  # fmt: skip


def _without_hints(group: TrajectoryGroup) -> TrajectoryGroup:
    """Copy of a group without teacher contexts, so that it is scored as the student saw it."""
    return replace(
        group,
        trajectories_G=tuple(
            replace(
                member,
                segments=tuple(
                    replace(segment, teacher_context_T=None, teacher_replaces=0)
                    for segment in member.segments
                ),
            )
            for member in group.trajectories_G
        ),
    )


def _reward(group: TrajectoryGroup) -> float:
    return fmean(member.reward for member in group.trajectories_G)


def _answers(groups_P: Sequence[TrajectoryGroup], judged_P: Sequence[bool]) -> AnswerStats:
    members = [member for group in groups_P for member in group.trajectories_G]
    rewards = [_reward(group) for group, judged in zip(groups_P, judged_P, strict=True) if judged]
    return AnswerStats(
        tokens=fmean(sum(s.num_actions for s in member.segments) for member in members),
        eos_share=fmean(member.stop_reason is StopReason.EOS for member in members),
        cut_share=fmean(member.stop_reason is StopReason.LENGTH for member in members),
        reward=fmean(rewards) if rewards else None,
    )


def _gaps(group: TrajectoryGroup) -> list[FloatArray]:
    """Sampler's minus scorer's log-prob of the sampled tokens, one array per trajectory."""
    return [
        np.concatenate(
            [
                (segment.behaviour_logprobs_T - segment.teacher_logprobs_T)[segment.action_mask_T]
                for segment in member.segments
                if segment.teacher_logprobs_T is not None
            ]
        )
        for member in group.trajectories_G
    ]


def _quarter(gaps_N: FloatArray) -> int:
    return max(1, round(_QUARTER * len(gaps_N)))


def _mean_of(parts: Sequence[FloatArray]) -> float:
    return float(np.concatenate(list(parts)).mean())


def _held(
    own_P: Sequence[TrajectoryGroup], others_P: Sequence[TrajectoryGroup]
) -> tuple[float, float]:
    """Return (`teacher_holds`, `student_holds`) of groups scored by the student and the teacher."""
    shares = []
    for own, other in zip(own_P, others_P, strict=True):
        for mine, theirs in zip(own.segments(), other.segments(), strict=True):
            assert mine.teacher_top is not None and theirs.teacher_top is not None
            shares.append(mass_in_common(mine.teacher_top, theirs.teacher_top))
    common_N2 = np.concatenate(shares)
    of_student, of_teacher = (common_N2 >= _HOLDS).mean(0)
    return float(of_student), float(of_teacher)


def mass_in_common(first: TopLogprobs, second: TopLogprobs) -> np.ndarray:
    """Share of each model's probability of its likeliest tokens that common tokens have: (N, 2)."""
    same_NKK = first.ids_NK[:, :, None] == second.ids_NK[:, None, :]
    shares = []
    for top, common_NK in ((first, same_NKK.any(2)), (second, same_NKK.any(1))):
        mass_NK = np.exp(top.logprobs_NK.astype(np.float64))
        shares.append((mass_NK * common_NK).sum(1) / mass_NK.sum(1))
    return np.stack(shares, 1)


def gradient_noise(
    learner: Learner, groups_P: Sequence[TrajectoryGroup], loss: PolicyObjectiveLoss
) -> NoiseScale:
    """Estimate the noise scale of a loss's gradient by one backward pass per response.

    A response's gradient is weighted by its number of tokens, as in a step. No weights change.
    """
    rows_D = policy_rows(groups_P, loss.objective, None, loss.stop_event)
    parts_PG = _rows_of_responses(groups_P, rows_D)
    mean = fmean(sum(r.num_trained for r in rows) for parts in parts_PG for rows in parts)
    total: list[torch.Tensor] = []
    squared_PG, squared_means_P = [], []
    for parts in parts_PG:
        of_prompt: list[torch.Tensor] = []
        squared_PG.append([])
        for rows_D in parts:
            coef = sum(row.num_trained for row in rows_D) / mean
            learner.forward_backward(Part(rows_D=rows_D, loss=loss, coef=coef))
            gradient = [
                parameter.grad.detach().float().clone()
                for parameter in learner.model.parameters()
                if parameter.grad is not None
            ]
            learner.zero_grad()
            squared_PG[-1].append(_squared(gradient))
            of_prompt = _added(of_prompt, gradient)
        squared_means_P.append(_squared(of_prompt) / len(parts) ** 2)
        total = _added(total, of_prompt)
    count = sum(map(len, parts_PG))
    return noise_scale(
        squared_PG=squared_PG,
        squared_means_P=squared_means_P,
        squared_mean=_squared(total) / count**2,
    )


def _rows_of_responses(
    groups_P: Sequence[TrajectoryGroup], rows_D: Sequence[TrainingRow]
) -> list[list[list[TrainingRow]]]:
    """Split rows by group and by response."""
    found = []
    for group, rows in rows_by_group(groups_P, rows_D):
        rest = iter(rows)
        found.append([[next(rest) for _ in member.segments] for member in group.trajectories_G])
    return found


def _squared(gradient: Sequence[torch.Tensor]) -> float:
    return float(sum(part.double().square().sum() for part in gradient))


def _added(sums: list[torch.Tensor], more: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not sums:
        return [part.clone() for part in more]
    for into, part in zip(sums, more, strict=True):
        into.add_(part)
    return sums
