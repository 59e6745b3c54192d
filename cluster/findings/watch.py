"""Execution of all detectors during a run; each reports at most once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from cluster.config.on_policy import RolloutConfig
from cluster.findings.finding import Diagnosis, Evidence, Finding
from cluster.findings.flow import (
    learner_starves,
    staleness_at_its_bound,
    teachers_idle,
    turns_take_long,
)
from cluster.findings.history import History
from cluster.findings.responses import (
    eos_vanishes,
    members_are_equal,
    responses_are_cut,
    responses_grow,
    responses_repeat,
)
from cluster.findings.rewards import (
    advantages_are_zero,
    format_pays_alone,
    rewards_are_constant,
)
from cluster.findings.training import (
    engine_gap_grows,
    entropy_collapses,
    kl_on_few_tokens,
    kl_rises,
    updates_are_lost,
)
from cluster.store.kept_groups import KeptGroups
from distill.errors import DataError
from distill.objective.sums import repeated_share
from distill.types import StopReason, Trajectory

Detect = Callable[[History, RolloutConfig], Diagnosis | None]
Score = Callable[[Trajectory], float]

# Stop reasons of trajectories that a limit ended.
_CUT = (StopReason.LENGTH, StopReason.TURNS, StopReason.TIME)


def _largest_gap(member: Trajectory) -> float:
    """Largest |log p - log q| of the trajectory's tokens."""
    gaps = [
        np.abs(each.behaviour_logprobs_T - each.teacher_logprobs_T)[each.action_mask_T].max()
        for each in member.segments
        if each.teacher_logprobs_T is not None
    ]
    return float(max(gaps, default=0.0))


def _length(member: Trajectory) -> float:
    return sum(segment.num_actions for segment in member.segments)


def _cut_length(member: Trajectory) -> float:
    return _length(member) * (member.stop_reason in _CUT)


def _repeated(member: Trajectory) -> float:
    return repeated_share([each.tokens_T[each.action_mask_T] for each in member.segments])


def _mean_logprob(member: Trajectory) -> float:
    """Mean log-prob of the trajectory's tokens."""
    logprobs = [each.behaviour_logprobs_T[each.action_mask_T].sum() for each in member.segments]
    return float(sum(logprobs)) / _length(member)


def _format_minus_reward(member: Trajectory) -> float:
    return member.metrics.get("format", 0.0) - member.reward


def _no_preference(_member: Trajectory) -> float:
    return 0.0


# Detectors, each with the score that ranks kept trajectories as evidence of its finding, if it has
# evidence. A finding has the name of its detector.
DETECTORS: Mapping[Detect, Score | None] = {
    kl_rises: _largest_gap,
    kl_on_few_tokens: _largest_gap,
    entropy_collapses: _mean_logprob,
    engine_gap_grows: None,
    updates_are_lost: None,
    responses_are_cut: _cut_length,
    members_are_equal: _no_preference,
    responses_grow: _length,
    responses_repeat: _repeated,
    eos_vanishes: _cut_length,
    advantages_are_zero: _no_preference,
    rewards_are_constant: _no_preference,
    format_pays_alone: _format_minus_reward,
    staleness_at_its_bound: None,
    learner_starves: None,
    teachers_idle: None,
    turns_take_long: None,
}


class Watch:
    """Run all detectors at every step of a run.

    Args:
        groups: folder of the run's kept groups, the source of evidence.
        before: metrics of the steps before this job of the run.
        reported: names of earlier findings, which are not reported again.
    """

    def __init__(
        self,
        config: RolloutConfig,
        groups: Path,
        before: Iterable[Mapping[str, float]] = (),
        reported: Collection[str] = (),
    ) -> None:
        self._config, self._groups = config, groups
        self._history = History(before)
        self._reported = set(reported)

    def observe(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings of this step that were not reported before."""
        self._history.add(metrics)
        found = []
        for detect, score in DETECTORS.items():
            name, diagnosis = detect.__name__, detect(self._history, self._config)
            if diagnosis is not None and name not in self._reported:
                self._reported.add(name)
                found.append(
                    Finding(
                        text=diagnosis.text,
                        remedy=diagnosis.remedy,
                        name=name,
                        step=self._history.step,
                        evidence=self._evidence(score),
                    )
                )
        return found

    def rewound(self, step: int) -> None:
        """Drop the history after `step`, from which the run continues."""
        self._history.rewind(step)

    def _evidence(self, score: Score | None) -> Evidence | None:
        """Worst trajectory of the newest step that has kept trajectories of the policy."""
        if score is None:
            return None
        try:
            return _worst(score, KeptGroups(self._groups))
        except DataError:
            return None  # cluster.report names the damaged file to the user


def _worst(score: Score, kept: KeptGroups) -> Evidence | None:
    for step in reversed(kept.steps):
        members = [
            (score(member), Evidence(step=step, group=each.group.group_id, member=m))
            for each in kept.of_step(step)
            if not each.group.by_teacher
            for m, member in enumerate(each.group.trajectories_G)
        ]
        if members:
            return max(members, key=lambda pair: pair[0])[1]
    return None
