"""Outlines of sampled groups: what a step needs to know of them besides their tokens.

Whoever samples a group makes its outline (`distill.objective.tallies`), a hundredth of its size and
less. Which rows run together, on which of the learner's workers, what rewards are worth within
their group, and the metrics of what was sampled all follow from it; the tokens themselves go to
those workers only that train them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from distill.types import Segment, StopReason, Trajectory, TrajectoryGroup


class Place(NamedTuple):
    """A trajectory's: its group, and its number there."""

    group_id: int
    member: int


class RowPlace(NamedTuple):
    """A training row's, which is a segment's: its trajectory, and its number there."""

    group_id: int
    member: int
    segment: int

    @property
    def trajectory(self) -> Place:
        return Place(self.group_id, self.member)


class Fetched(NamedTuple):
    """Trajectories that were asked for, and of groups that are not there any more why."""

    found: Mapping[Place, Trajectory]
    lost: Mapping[int, str]


class TrajectorySource(Protocol):
    """Where a learner's worker finds the trajectories of groups that were taken."""

    def trajectories(self, places: Sequence[Place], ahead: bool = False) -> Fetched:
        """Raises on a deadline.

        Args:
            ahead: their groups may be taken later. Until the next call for some that were taken,
                that included, what is the same trajectory is the same object.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutline:
    """Sizes of a segment, and digests by which equal contexts are known.

    Attributes:
        tokens: all of them.
        num_actions: those that were sampled.
        first_action: index of the first of those.
        context: of the tokens before that.
        prefix: of the same but for the last, which predicts the first action.
    """

    tokens: int
    num_actions: int
    first_action: int
    context: bytes
    prefix: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryOutline:
    """A `Trajectory` without its tokens."""

    segments: tuple[SegmentOutline, ...]
    reward: float
    stop_reason: StopReason
    metrics: Mapping[str, float]
    reward_counts: bool

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)


class TurnGap(NamedTuple):
    """Sum of log p_T - log q_T over the tokens of a turn, and how many those are."""

    gap: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTally:
    """Sums over the action tokens of a group, for the metrics of a step (in nats, float64).

    Attributes:
        tokens: the action tokens.
        versions, oldest: sum and minimum of the weight versions that sampled them.
        teacher_versions: sum of the weight versions of the teacher at each; None of a teacher whose
            weights never change.
        repeated: sum over trajectories of `repeated_share`.
        equal: all members are the same tokens, which chance hardly ever makes of their log-probs.
        turns: number of them in all trajectories.
        turn_gaps: of the first turns of every trajectory, by their number.
        gap, gap_q1: sums of log p_T - log q_T and log p_T - log q_1; None where one was not scored.
        gap_size, largest_gaps: sum of |log p_T - log q_T|, and of its largest hundredth.
        reference_gap: sum of log p_T - log ref_T; None without.
        bonus: sum of the rewards of single tokens; None where there are none.
    """

    tokens: int
    versions: int
    oldest: int
    repeated: float
    turns: int
    turn_gaps: tuple[TurnGap, ...]
    gap: float | None
    gap_q1: float | None
    gap_size: float
    largest_gaps: float
    reference_gap: float | None
    bonus: float | None
    teacher_versions: int | None = None
    equal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutline:
    """A `TrajectoryGroup` without its tokens."""

    group_id: int
    trajectories_G: tuple[TrajectoryOutline, ...]
    tally: GroupTally
    constant_reward: float | None
    metrics: Mapping[str, float]
    teacher: str
    tag: str | None
    source: str
    answer: str | None
    by_teacher: bool = False
    as_text: bool = False

    @property
    def places(self) -> list[Place]:
        """Of its trajectories."""
        return [Place(self.group_id, member) for member in range(len(self.trajectories_G))]

    def filled_from(self, found: Mapping[Place, Trajectory]) -> TrajectoryGroup:
        """The group itself, of its trajectories as they were fetched."""
        return self.filled(s for place in self.places for s in found[place].segments)

    def filled(self, segments: Iterable[Segment]) -> TrajectoryGroup:
        """The group itself, of the segments of its trajectories in order."""
        remaining = iter(segments)
        return TrajectoryGroup(
            group_id=self.group_id,
            trajectories_G=tuple(
                Trajectory(
                    segments=tuple(islice(remaining, len(trajectory.segments))),
                    reward=trajectory.reward,
                    stop_reason=trajectory.stop_reason,
                    metrics=trajectory.metrics,
                    reward_counts=trajectory.reward_counts,
                )
                for trajectory in self.trajectories_G
            ),
            metrics=self.metrics,
            teacher=self.teacher,
            tag=self.tag,
            source=self.source,
            answer=self.answer,
            by_teacher=self.by_teacher,
            as_text=self.as_text,
        )
