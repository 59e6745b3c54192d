"""Records of prompt groups that pass between rollout workers, queue and learner.

    Lease                permission to work on a group          queue -> worker
    TrajectoryGroupMeta  a sampled group without its tokens     worker -> queue -> learner's leader
    StepGroups           groups of a training step              queue -> learner's leader
    TrainedGroups        groups that some weights account for   learner, checkpoints, queue

A group id is the prompt's position in the run's seeded stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from distill.errors import CheckpointError
from distill.types import (
    GroupFacts,
    Segment,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    shared_fields,
)

# Treatment of groups that cannot be trained in time (cluster/queue/step_rule.py).
OnStale = Literal["wait", "train_late", "restart"]
# Reason for setting aside a group without a fault that a step has skipped.
CONSTANT_REWARD = "all members have the same reward"


@dataclass(frozen=True, kw_only=True)
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
    """Identifies a training row, which is a segment: its trajectory, and its index there."""

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
        """Fetch trajectories. Raises an error if a deadline passes.

        Args:
            ahead: if True, the groups have not been taken yet, and may be taken later. Up to and
                including the next call without `ahead`, a trajectory is always the same object.
        """
        ...


# Sum over a group, and its weight: see `distill.objective.sums.SUMS`.
Sum: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroupMeta(GroupFacts):
    """A `TrajectoryGroup` without its tokens: all that the queue and the learner's leader read.

    Its size is at most a hundredth of the group's. It determines which rows run together and on
    which learner worker, the advantages within the group, and the metrics of the samples.

    Attributes:
        rewards_G, reward_counts_G, stop_reasons_G, metrics_G: fields of the trajectories.
        segments_G: number of segments of each trajectory.
        tokens_S, actions_S: numbers of all tokens, and of sampled tokens, of each segment.
        first_actions_S: index of the first sampled token in each segment.
        contexts_S: digests of the tokens before the first sampled token.
        prefixes_S: digests of the same tokens without the last, which predicts the first action.
        constant_reward, scored_by: as in the group.
        oldest_version: oldest weight version that sampled a token.
        sums: sums for the metrics, by name; sums that the group lacks are omitted.
    """

    rewards_G: tuple[float, ...]
    reward_counts_G: tuple[bool, ...]
    stop_reasons_G: tuple[StopReason, ...]
    metrics_G: tuple[Mapping[str, float], ...]
    segments_G: tuple[int, ...]
    tokens_S: tuple[int, ...]
    actions_S: tuple[int, ...]
    first_actions_S: tuple[int, ...]
    contexts_S: tuple[bytes, ...]
    prefixes_S: tuple[bytes, ...]
    constant_reward: float | None
    scored_by: tuple[int, ...]
    oldest_version: int
    sums: Mapping[str, Sum]

    @property
    def places(self) -> list[TrajectoryId]:
        """IDs of the group's trajectories."""
        return [TrajectoryId(self.group_id, member) for member in range(len(self.segments_G))]

    @property
    def lengths_G(self) -> list[int]:
        """Number of sampled tokens of each trajectory."""
        actions = iter(self.actions_S)
        return [sum(islice(actions, count)) for count in self.segments_G]

    def group(self, trajectories_G: Sequence[Trajectory]) -> TrajectoryGroup:
        """The whole group, from its trajectories."""
        return TrajectoryGroup(
            trajectories_G=tuple(trajectories_G), **shared_fields(GroupFacts, self)
        )

    def group_of_segments(self, segments: Iterable[Segment]) -> TrajectoryGroup:
        """The whole group, from the segments of its trajectories in order."""
        remaining = iter(segments)
        return self.group(
            [
                Trajectory(
                    segments=tuple(islice(remaining, count)),
                    reward=reward,
                    stop_reason=stop_reason,
                    metrics=metrics,
                    reward_counts=counts,
                )
                for count, reward, stop_reason, metrics, counts in zip(
                    self.segments_G,
                    self.rewards_G,
                    self.stop_reasons_G,
                    self.metrics_G,
                    self.reward_counts_G,
                    strict=True,
                )
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Groups of a training step: chosen by the ledger, completed by the queue.

    Attributes:
        group_ids: ids of the groups to train, in order.
        groups_P: their metadata, in the same order; empty in the ledger, which has none.
        set_aside: reason for each id that the step's weights account for without training on it,
            ids of earlier weights excluded.
        overdue: number of groups that are older than `max_staleness`.
        restarts: total number of restarts of the step's groups because they were overdue.
        replaced: reward of each group of constant reward that the step skips, by id.
        start_max: weight versions since the first lease of the group that was leased first; None:
            unknown.
        queued: number of other groups that had arrived when the step was taken; None: no queue.
        epoch: epoch of the queue in which the step was taken (see `Lease`).
    """

    group_ids: list[int]
    groups_P: Sequence[TrajectoryGroupMeta] = field(default=(), compare=False)
    set_aside: Mapping[int, str] = field(default_factory=dict)
    overdue: int = 0
    restarts: int = 0
    replaced: Mapping[int, float] = field(default_factory=dict)
    start_max: int | None = None
    queued: int | None = field(default=None, compare=False)
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
            "groups/begun_again": self.restarts,
            "groups/set_aside": sum(reason != CONSTANT_REWARD for reason in aside),
            "groups/replaced": len(self.replaced),
        }
        if self.start_max is not None:
            metrics["staleness/start_max"] = self.start_max
        if self.queued is not None:
            metrics["groups/queued"] = self.queued
        if self.replaced:
            rewards_P = [fmean(group.rewards_G) for group in self.groups_P]
            metrics["reward/mean_of_all"] = fmean([*rewards_P, *self.replaced.values()])
        return metrics


class TrainedGroups:
    """The prompt groups that a set of weights accounts for: the state for exactly-once training.

    Immutable. Steps take groups approximately in order of id, and set aside groups that could not
    be produced: a watermark, the set-aside ids below it and the few trained ids above it describe
    the set.

    Every id below `watermark` was trained, except the set-aside ids; so was every id in `above`.
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
            f"set-aside groups {list(self._set_aside)} are not all below watermark {watermark}"
        )
        assert all(group_id > watermark for group_id in self._above), (
            f"trained groups {sorted(self._above)} are not all above watermark {watermark}"
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
        assert len(set(group_ids)) == len(group_ids), f"groups {group_ids} contain a duplicate"
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
