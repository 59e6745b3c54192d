"""Outlines of sampled groups: everything that a step needs of them except their tokens.

The sampler of a group makes its outline (`distill.objective.tallies`), which has at most a
hundredth of the group's size. The outline determines which rows run together and on which of the
learner's workers, the advantages of rewards within the group, and the metrics of the samples. The
tokens go only to the workers that train them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from distill.types import Segment, StopReason, Trajectory, TrajectoryGroup


class TrajectoryId(NamedTuple):
    """Identifies a trajectory: its group id and its index within the group."""

    group_id: int
    member: int


class RowPlace(NamedTuple):
    """Identifies a training row, which is a segment: its trajectory, and its index within it."""

    group_id: int
    member: int
    segment: int

    @property
    def trajectory(self) -> TrajectoryId:
        return TrajectoryId(self.group_id, self.member)


class Fetched(NamedTuple):
    """Requested trajectories, and the reason for each group that is no longer available."""

    found: Mapping[TrajectoryId, Trajectory]
    lost: Mapping[int, str]


class TrajectorySource(Protocol):
    """Source from which a learner's worker fetches the trajectories of taken groups."""

    def trajectories(self, places: Sequence[TrajectoryId], ahead: bool = False) -> Fetched:
        """Fetch trajectories. Raises on a deadline.

        Args:
            ahead: the groups may be taken later. Up to and including the next call for groups
                that were taken, the same trajectory is the same object.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOutline:
    """Sizes of a segment, and digests that identify equal contexts.

    Attributes:
        tokens: number of all tokens.
        num_actions: number of sampled tokens.
        first_action: index of the first sampled token.
        context: digest of the tokens before `first_action`.
        prefix: digest of the same tokens without the last, which predicts the first action.
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
    """Sum of log p_T - log q_T over the tokens of turns, and the number of those tokens."""

    gap: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTally:
    """Sums over the action tokens of a group, for the metrics of a step (in nats, float64).

    Attributes:
        tokens: number of action tokens.
        versions, oldest: sum and minimum of the weight versions that sampled them.
        teacher_versions: sum over the tokens of the teacher's weight version; None for a teacher
            whose weights never change.
        repeated: sum over trajectories of `repeated_share`.
        equal: True if all members are the same tokens, which is very improbable by their log-probs.
        turns: number of turns in all trajectories.
        turn_gaps: gaps of the first turns of all trajectories, by turn number.
        gap, gap_q1: sums of log p_T - log q_T and log p_T - log q_1; None if one was not scored.
        gap_size, largest_gaps: sum of |log p_T - log q_T|, and of its largest hundredth.
        reference_gap: sum of log p_T - log ref_T; None without a reference.
        bonus: sum of the rewards of single tokens; None if there are none.
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
    def places(self) -> list[TrajectoryId]:
        """IDs of the group's trajectories."""
        return [TrajectoryId(self.group_id, member) for member in range(len(self.trajectories_G))]

    def filled_from(self, found: Mapping[TrajectoryId, Trajectory]) -> TrajectoryGroup:
        """The whole group, from its fetched trajectories."""
        return self.filled(s for place in self.places for s in found[place].segments)

    def filled(self, segments: Iterable[Segment]) -> TrajectoryGroup:
        """The whole group, from the segments of its trajectories in order."""
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
