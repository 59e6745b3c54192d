"""Settings of a run's ledger of prompt groups (cluster/queue/ledger.py)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.queue.step_rule import StepRule
from distill.records import OnStale


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """Settings of a run's ledger.

    Attributes:
        max_staleness: weight versions between a group's first lease and its training, at most.
        total_groups: live groups of the whole run, those trained before included.
        lease_s: how long a group may be without progress before it is leased to another.
        max_failures: failures of its own after which a group is set aside.
        max_deaths: the same for leases that ran out. More than failures, because what hangs may be
            an engine.
        groups_in_flight: most groups between their lease and published weights that contain them;
            0: (max_staleness + 1) * groups_per_step, the most that the bound allows.
        on_stale: `wait` for groups that would be trained too late otherwise, `train_late`, or
            `restart` them.
        begin_again_after: groups that are under way for so many times the median of those that
            have arrived may begin again.
        most_begun_again: how often a group may; after that it is waited for.
        most_replaced: groups of constant reward that a step passes over at most.
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
    begin_again_after: float = 2.0
    most_begun_again: int = 3

    def __post_init__(self) -> None:
        assert self.groups_per_step > 0 and self.max_staleness >= 0
        assert self.max_failures > 0 and self.max_deaths > 0
        most = self.groups_per_step * (self.max_staleness + 1)
        assert not self.groups_in_flight or self.groups_per_step <= self.groups_in_flight <= most

    @property
    def window(self) -> int:
        """Most groups between their lease and published weights that contain them."""
        return self.groups_in_flight or self.groups_per_step * (self.max_staleness + 1)

    def rule(self) -> StepRule:
        """The rule of the run's steps."""
        return StepRule(self.max_staleness, self.window, late=self.on_stale == "train_late")
