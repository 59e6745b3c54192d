"""Execution of all detectors during a run; each reports at most once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
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
from cluster.run_files.rollouts import KeptTrajectory, read_newest_rollouts
from distill.errors import DataError
from distill.objective.repetition import repeated_share
from distill.types import shared_fields

Detect = Callable[[History, RolloutConfig], Diagnosis | None]


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector, and the score that ranks kept trajectories as evidence of its finding.

    The finding has the name of the function `detect`.
    """

    detect: Detect
    worst: Callable[[KeptTrajectory], float] | None = None


def _largest_gap(member: KeptTrajectory) -> float:
    """Largest |log p - log q| of the trajectory's tokens."""
    gaps = [
        abs(student - teacher)
        for segment in member.segments
        if segment.teacher_logprobs_N is not None
        for student, teacher in zip(
            segment.behaviour_logprobs_N, segment.teacher_logprobs_N, strict=True
        )
    ]
    return max(gaps, default=0.0)


def _length(member: KeptTrajectory) -> float:
    return sum(len(segment.behaviour_logprobs_N) for segment in member.segments)


def _cut_length(member: KeptTrajectory) -> float:
    return _length(member) * (member.stop_reason in ("length", "turns", "time"))


def _repeated(member: KeptTrajectory) -> float:
    return repeated_share([np.array(segment.sampled_N, int) for segment in member.segments])


def _mean_logprob(member: KeptTrajectory) -> float:
    """Mean log-prob of the trajectory's tokens."""
    return sum(sum(s.behaviour_logprobs_N) for s in member.segments) / max(_length(member), 1)


def _format_minus_reward(member: KeptTrajectory) -> float:
    return member.metrics.get("format", 0.0) - member.reward


def _no_preference(_member: KeptTrajectory) -> float:
    return 0.0


DETECTORS = (
    Detector(kl_rises, _largest_gap),
    Detector(kl_on_few_tokens, _largest_gap),
    Detector(entropy_collapses, _mean_logprob),
    Detector(engine_gap_grows),
    Detector(updates_are_lost),
    Detector(responses_are_cut, _cut_length),
    Detector(members_are_equal, _no_preference),
    Detector(responses_grow, _length),
    Detector(responses_repeat, _repeated),
    Detector(eos_vanishes, _cut_length),
    Detector(advantages_are_zero, _no_preference),
    Detector(rewards_are_constant, _no_preference),
    Detector(format_pays_alone, _format_minus_reward),
    Detector(staleness_at_its_bound),
    Detector(learner_starves),
    Detector(teachers_idle),
    Detector(turns_take_long),
)


class Watch:
    """Run all detectors at every step of a run.

    Args:
        rollouts: file of the run's kept rollouts, the source of evidence.
        before: metrics of the steps before this job of the run.
        reported: names of earlier findings, which are not reported again.
    """

    def __init__(
        self,
        config: RolloutConfig,
        rollouts: Path,
        before: Iterable[Mapping[str, float]] = (),
        reported: Collection[str] = (),
    ) -> None:
        self._config, self._rollouts = config, rollouts
        self._history = History(before)
        self._reported = set(reported)

    def observe(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Findings of this step that were not reported before."""
        self._history.add(metrics)
        found = []
        for detector in DETECTORS:
            name, diagnosis = detector.detect.__name__, detector.detect(self._history, self._config)
            if diagnosis is not None and name not in self._reported:
                self._reported.add(name)
                found.append(
                    Finding(
                        **shared_fields(Diagnosis, diagnosis),
                        name=name,
                        step=self._history.step,
                        evidence=self._evidence(detector),
                    )
                )
        return found

    def rewound(self, step: int) -> None:
        """Drop the history after `step`, from which the run continues."""
        self._history.rewind(step)

    def _evidence(self, detector: Detector) -> Evidence | None:
        """Worst trajectory of the newest step that has kept trajectories of the policy."""
        if (worst := detector.worst) is None:
            return None
        try:
            kept = read_newest_rollouts(self._rollouts)
        except DataError:
            return None  # cluster.report names the damaged line to the user
        groups = [group for group in kept if not group.by_teacher]
        members = [
            (worst(member), Evidence(step=group.step, group=group.group_id, member=m))
            for group in groups
            if group.step == groups[-1].step
            for m, member in enumerate(group.trajectories_G)
        ]
        return max(members, key=lambda pair: pair[0])[1] if members else None
