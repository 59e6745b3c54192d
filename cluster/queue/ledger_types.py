"""Types of the ledger (cluster/queue/ledger.py): its settings, kept groups, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.queue.step_rule import StepRule
from distill.records import Lease, OnStale, TrainedGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Settings of a run's ledger.

    Attributes:
        max_staleness: maximum number of weight versions between a group's first lease and its
            training.
        total_groups: live groups of the whole run, those trained earlier included.
        lease_s: seconds without progress after which a group is leased to another worker.
        max_failures: number of its own failures after which a group is set aside.
        max_deaths: number of expired leases after which a group is set aside. Larger than
            `max_failures`, because an engine may be the cause of a hang.
        groups_in_flight: maximum number of groups between their lease and published weights that
            contain them; 0: (max_staleness + 1) * groups_per_step, the maximum that `max_staleness`
            allows.
        on_stale: `wait` for groups that would otherwise be trained too late, `train_late`, or
            `restart` them.
        restart_after: a group may be restarted when it has taken this multiple of the median
            duration of delivered groups.
        max_restarts: maximum number of restarts of a group; then steps wait for it.
        most_replaced: maximum number of groups of constant reward that a step skips.
    """

    groups_per_step: int
    max_staleness: int
    total_groups: int
    lease_s: float
    max_failures: int = 3
    max_deaths: int = 10
    groups_in_flight: int = 0
    on_stale: OnStale = "wait"
    most_replaced: int = 0
    restart_after: float = 2.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        assert self.groups_per_step > 0 and self.max_staleness >= 0
        assert self.max_failures > 0 and self.max_deaths > 0
        most = self.groups_per_step * (self.max_staleness + 1)
        assert not self.groups_in_flight or self.groups_per_step <= self.groups_in_flight <= most

    @property
    def window(self) -> int:
        """Maximum number of groups between their lease and published weights that contain them."""
        return self.groups_in_flight or self.groups_per_step * (self.max_staleness + 1)

    def rule(self) -> StepRule:
        return StepRule(self.max_staleness, self.window, late=self.on_stale == "train_late")


class Kept(NamedTuple):
    """A group whose delivery is on disk.

    Attributes:
        epoch, attempt: epoch and attempt of the lease that delivered the group.
        started: weight version of the group's first lease, or of its first lease after it began
            again.
    """

    epoch: int
    attempt: int
    started: int

    def lease(self, group_id: int) -> Lease:
        return Lease(group_id=group_id, attempt=self.attempt, epoch=self.epoch)


def adopted(
    kept: Mapping[int, Kept], trained: TrainedGroups, settings: LedgerSettings
) -> dict[int, Kept]:
    """Choose the kept groups that a job which starts from `trained` takes back, by id.

    The groups fit into the window, are not in the weights, and can all be trained in time if the
    oldest are trained first, as by every step rule.
    """
    version = len(trained) // settings.groups_per_step
    most = min(settings.window, settings.total_groups - len(trained))
    late = settings.on_stale == "train_late"
    found: dict[int, Kept] = {}
    for group_id, each in sorted(kept.items(), key=lambda item: (item[1].started, item[0])):
        over = group_id < trained.watermark or group_id in trained
        age = version + len(found) // settings.groups_per_step - each.started
        in_time = late or age <= settings.max_staleness
        if len(found) < most and not over and each.started <= version and in_time:
            found[group_id] = each
    return found


class NextStep(NamedTuple):
    """Finished groups that a later step would take in the current state.

    `whole` is True if they are the complete step, which could start now.
    """

    group_ids: list[int]
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """Consequences of a scorer's canary for the groups that it has scored.

    Attributes:
        to_rescore: ids of groups that are leased again, for another scorer.
        first_bad: first version with groups that the scorer may have scored wrongly, the version
            that the learner is computing included; None if there is none.
        proven: newest version up to which weights contain only groups with proven scores.
    """

    to_rescore: tuple[int, ...] = ()
    first_bad: int | None = None
    proven: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Status of the queue between the rollout workers and the learner.

    Attributes:
        depth: number of groups that were delivered and are not yet in published weights.
        leased: worker, attempt, and seconds since the last progress of every leased group, by id.
        pending: ids that wait to be leased again.
        missing: ids that the next step waits for, lowest first. (With too few
            finished groups, any group that finishes counts.)
        credit: number of new groups that may start now, in addition to the pending ones.
        set_aside: number of groups set aside since the start of the run, because they failed.
        newest_set_aside: reasons of the newest of these, by group id.
        delivered: number of groups that arrived and were accepted.
        consecutive_set_aside: number of groups set aside since the last delivery.
        last_reason: reason of the newest failure, death or expiry; "" before the first.
        exhausted: True if no group is left to lease, again or for the first time.
        epoch: see `Lease`.
        starved_s: seconds, of the `age_s` since the queue was created, in which no group could
            start and fewer groups were leased than finished. (Groups in training always hold some
            credit, so a short lack of it does not mean that there are too many workers.)
        restarted: last attempt that a restart ended, for each restarted group that is not
            trained, by id.
        unkept: reason why groups are not kept on disk; "" if all are.
    """

    depth: int
    leased: Mapping[int, tuple[str, int, float]]
    pending: list[int]
    missing: list[int]
    credit: int
    set_aside: int
    delivered: int
    consecutive_set_aside: int
    last_reason: str
    exhausted: bool
    epoch: int
    starved_s: float
    age_s: float
    restarted: Mapping[int, int] = field(default_factory=dict)
    newest_set_aside: Mapping[int, str] = field(default_factory=dict)
    unkept: str = ""
