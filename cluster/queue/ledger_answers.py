"""What the ledger of prompt groups answers (cluster/queue/ledger.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Groups of a step.

    Attributes:
        group_ids: in order.
        set_aside: ids that its weights account for without having been trained on them, beside
            those of the weights before, and why.
        overdue: groups that are older than `max_staleness`.
        begun_again: how often its groups were begun again in all.
        start_max: weight versions since the first lease of the group that was leased first.
        replaced: groups of constant reward that it passes over, and that reward.
    """

    group_ids: list[int]
    set_aside: dict[int, str]
    overdue: int = 0
    begun_again: int = 0
    start_max: int = 0
    replaced: dict[int, float] = field(default_factory=dict)


class Foreseen(NamedTuple):
    """Finished groups that a later step would take as things are; and whether they are all of it
    and it may go on with them."""

    group_ids: list[int]
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """What a scorer's canary means for the groups that it has scored.

    Attributes:
        again: groups that are leased again, to be scored by another.
        first_bad: the first version that contains, or that the learner is about to make of, groups
            which it may have scored wrongly; None: no weights do.
        proven: up to this version weights contain only groups that are proven.
    """

    again: tuple[int, ...] = ()
    first_bad: int | None = None
    proven: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """Status of the queue between the rollout workers and the learner.

    Attributes:
        depth: groups delivered and not yet in published weights.
        leased: worker, attempt and age in seconds of every group under way, by id.
        pending: ids waiting to be leased again.
        missing: ids that the next step waits for, lowest first. (While too few are finished it
            waits for any, in `due_first`.)
        credit: groups that may start now, beside the pending ones.
        set_aside: groups set aside since the start of the run, because they failed.
        newest_set_aside: the reasons of the newest of these, by group id.
        re_leases: leases of groups that had been leased before.
        delivered: groups that arrived and were wanted.
        duplicates: groups that arrived and were not: again, or too late.
        consecutive_set_aside: groups set aside since the last delivery.
        last_reason: of the newest failure, death or expiry; "" before the first.
        published: the watermark of the weights on the engines.
        exhausted: nothing is left to be started, again or for the first time.
        epoch: see `Lease`.
        starved_s: for so long, of the `age_s` seconds since the queue was made, nothing might
            start and fewer groups were under way than finished. (Some credit is always with groups
            that are being trained: workers that lack it for a moment are not too many.)
        begun_again: of each group that was begun again and is not trained, the last attempt that
            is over by that.
    """

    depth: int
    leased: Mapping[int, tuple[str, int, float]]
    pending: list[int]
    missing: list[int]
    credit: int
    set_aside: int
    re_leases: int
    delivered: int
    duplicates: int
    consecutive_set_aside: int
    last_reason: str
    published: int
    exhausted: bool
    epoch: int
    starved_s: float
    age_s: float
    begun_again: Mapping[int, int] = field(default_factory=dict)
    newest_set_aside: Mapping[int, str] = field(default_factory=dict)
