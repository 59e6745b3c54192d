"""Records of prompt groups that pass between rollout workers, queue and learner.

    Lease              permission to work on a group          queue -> worker
    GroupOutline       a sampled group without its tokens     worker -> queue -> learner's leader
    StepGroups         groups of a training step              queue -> learner's leader
    TrainedGroups      groups that some weights account for   learner, checkpoints, queue

A group id is the prompt's position in the run's seeded stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from distill.errors import CheckpointError
from distill.types import Segment, StopReason, Trajectory, TrajectoryGroup

# Rule for the groups that a step takes (cluster/queue/step_rules.py), and for those that cannot be
# trained in time.
StepRuleName = Literal["in_order", "due_first"]
OnStale = Literal["wait", "train_late", "restart"]
# Reason for setting aside a group without a fault, which a step has passed over.
CONSTANT_REWARD = "all members have the same reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to work on one group.

    Attributes:
        group_id: the prompt's position in the run's stream.
        attempt: number of the attempt at this group in this epoch, from 1.
        epoch: counts the starts of the run and the learner's returns to a checkpoint; results of an
            older epoch are dropped.
    """

    group_id: int
    attempt: int
    epoch: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Groups of a training step: chosen by the ledger, completed by the queue.

    Attributes:
        group_ids: ids of the groups to train, in order.
        groups_P: their outlines, in the same order; empty in the ledger, which has none.
        set_aside: reason for each id that the step's weights account for without training on it,
            ids of earlier weights excluded.
        overdue: number of groups that are older than `max_staleness`.
        begun_again: number of restarts of its groups because they were overdue, in total.
        replaced: reward of each group of constant reward that the step skips, by id.
        start_max: weight versions since the first lease of the group that was leased first; None:
            unknown.
        epoch: epoch of the queue in which the step was taken (see `Lease`).
    """

    group_ids: list[int]
    groups_P: Sequence[GroupOutline] = field(default=(), compare=False)
    set_aside: Mapping[int, str] = field(default_factory=dict)
    overdue: int = 0
    begun_again: int = 0
    replaced: Mapping[int, float] = field(default_factory=dict)
    start_max: int | None = None
    epoch: int = 0

    def after(self, trained: TrainedGroups) -> TrainedGroups:
        """State of weights that account for `trained`, once they are trained on this step."""
        return trained.after(self.group_ids, self.set_aside)

    def metrics(self, trained: TrainedGroups) -> dict[str, float]:
        """Metrics of the step's choice of groups, and of the groups that `trained` accounts for."""
        aside = trained.set_aside.values()
        metrics: dict[str, float] = {
            "groups/first": self.group_ids[0],
            "groups/last": self.group_ids[-1],
            "groups/watermark": trained.watermark,
            "groups/overdue": self.overdue,
            "groups/begun_again": self.begun_again,
            "groups/set_aside": sum(reason != CONSTANT_REWARD for reason in aside),
            "groups/replaced": len(self.replaced),
        }
        if self.start_max is not None:
            metrics["staleness/start_max"] = self.start_max
        if self.replaced:
            rewards_P = [fmean(t.reward for t in group.trajectories_G) for group in self.groups_P]
            metrics["reward/mean_of_all"] = fmean([*rewards_P, *self.replaced.values()])
        return metrics


class TrainedGroups:
    """The prompt groups that a set of weights accounts for: the state for exactly-once training.

    Immutable. Steps take groups approximately in order of id, and set aside those that could not be
    made: a watermark, the set-aside ids below it and the few trained ids above it describe the set.

    Every id below `watermark` was trained, except those set aside, and so were those in `above`.
    `group_id in trained` is True for the trained ids, and `len(trained)` counts them.
    """

    def __init__(
        self,
        watermark: int = 0,
        set_aside: Mapping[int, str] | None = None,
        above: Collection[int] = (),
    ) -> None:
        """
        Args:
            set_aside: the reason of each id below `watermark` that was not trained.
            above: trained ids above `watermark`; `watermark` itself is not accounted for.
        """
        self._watermark = watermark
        self._set_aside = dict(sorted((set_aside or {}).items()))
        self._above = frozenset(above)
        assert all(0 <= group_id < watermark for group_id in self._set_aside), (
            f"set aside {list(self._set_aside)}, which are not all below {watermark}"
        )
        assert all(group_id > watermark for group_id in self._above), (
            f"trained {sorted(self._above)}, which are not all above {watermark}"
        )

    @property
    def watermark(self) -> int:
        """The lowest id that is not accounted for."""
        return self._watermark

    @property
    def set_aside(self) -> Mapping[int, str]:
        return MappingProxyType(self._set_aside)

    @property
    def above(self) -> frozenset[int]:
        """Trained ids above the watermark."""
        return self._above

    def __contains__(self, group_id: int) -> bool:
        below = 0 <= group_id < self._watermark and group_id not in self._set_aside
        return below or group_id in self._above

    def __len__(self) -> int:
        return self._watermark - len(self._set_aside) + len(self._above)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedGroups) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]  # unhashable, like a set

    def __repr__(self) -> str:
        above = f", above={sorted(self._above)}" if self._above else ""
        return f"TrainedGroups(watermark={self._watermark}, set_aside={self._set_aside}{above})"

    def after(self, group_ids: Collection[int], set_aside: Mapping[int, str]) -> TrainedGroups:
        """State after training on `group_ids` as well.

        Args:
            set_aside: reasons of groups that will not be trained. Those that the watermark passes
                are accounted for. The watermark stops after a trained group, and does not pass the
                set-aside groups behind it.

        Raises:
            AssertionError: a group is already accounted for, or is set aside as well.
        """
        for group_id in group_ids:
            known = group_id in self or group_id < self._watermark or group_id in set_aside
            assert not known, f"group {group_id} would be trained twice, or was set aside"
        assert len(set(group_ids)) == len(group_ids), f"groups {group_ids} name one twice"
        trained = self._above.union(group_ids)
        end = at = self._watermark
        while at in trained or at in set_aside:
            at += 1
            if at - 1 in trained:
                end = at
        passed = {i: set_aside[i] for i in range(self._watermark, end) if i not in trained}
        return TrainedGroups(end, self._set_aside | passed, [i for i in trained if i >= end])

    def since(self, earlier: TrainedGroups) -> list[int]:
        """Ids that are trained here but not in `earlier`, in order."""
        newer = range(earlier.watermark, self._watermark)
        ids = {i for i in newer if i not in self._set_aside} | self._above
        return sorted(i for i in ids if i not in earlier)

    def to_json(self) -> dict[str, Any]:
        set_aside = {str(group_id): reason for group_id, reason in self._set_aside.items()}
        above = {"above": sorted(self._above)} if self._above else {}
        return {"watermark": self._watermark, "set_aside": set_aside, **above}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainedGroups:
        """Inverse of `to_json`.

        Raises:
            CheckpointError: `value` was not written by `to_json`.
        """
        try:
            watermark = int(value["watermark"])
            set_aside = {int(group_id): reason for group_id, reason in value["set_aside"].items()}
            above = [int(group_id) for group_id in value.get("above", [])]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"unreadable delivery state {value!r}") from error
        in_place = all(0 <= i < watermark for i in set_aside) and all(i > watermark for i in above)
        if watermark < 0 or not in_place or not all(isinstance(r, str) for r in set_aside.values()):
            raise CheckpointError(f"inconsistent delivery state {value!r}")
        return cls(watermark, set_aside, above)
