"""Settings of a run's ledger of prompt groups (cluster/queue/ledger.py)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.queue.step_rule import StepRule
from distill.records import OnStale


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Settings of a run's ledger.

    Attributes:
        groups_per_step: number of groups of each step.
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
        """Create the step rule of the run."""
        return StepRule(self.max_staleness, self.window, late=self.on_stale == "train_late")
