"""Return types of the ledger of prompt groups (cluster/queue/ledger.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class NextStep(NamedTuple):
    """Finished groups that a later step would take in the current state.

    Attributes:
        group_ids: ids of the groups.
        whole: True if they are the complete step, which could start now.
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
        re_leases: number of leases of groups that had been leased before.
        delivered: number of groups that arrived and were accepted.
        duplicates: number of groups that arrived and were dropped, as duplicates or too late.
        consecutive_set_aside: number of groups set aside since the last delivery.
        last_reason: reason of the newest failure, death or expiry; "" before the first.
        published: watermark of the weights on the engines.
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
    restarted: Mapping[int, int] = field(default_factory=dict)
    newest_set_aside: Mapping[int, str] = field(default_factory=dict)
    unkept: str = ""
