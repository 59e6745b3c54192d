"""Whose fault it is that a group failed, or that a worker died.

A worker that dies takes all its groups with it, and at most a few are guilty. Those that it had
reported to be in an environment's or a reward's code are suspects; so is each that is there at a
second death. A suspect has a worker to itself. If that dies, the group did it: that is a failure of
its own. If the group arrives, it is a suspect no more. So a group that kills every worker is set
aside, after `max_failures + 2` deaths as a rule, and none is for what another did.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distill.delivery import Lease

# Of a group's suspicion: that of one death inside its environment, or of two elsewhere.
_SUSPECT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's death.

    Attributes:
        had_groups: it was at work, even if only on leases that were over.
        inside: of the groups that it held, those in an environment's or a reward's code by its last
            report (all, if it made none), and what problem each was.
        guilty: the group that it ran alone, which is therefore the cause.
    """

    had_groups: bool
    inside: dict[int, str]
    guilty: int | None


class Faults:
    """Failures, deaths and suspicion of each group of a run."""

    def __init__(self, max_failures: int, max_deaths: int) -> None:
        """Args: as of `LedgerSettings`."""
        self._max_failures, self._max_deaths = max_failures, max_deaths
        self._failures: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        self._suspicion: Counter[int] = Counter()
        # Of each worker: what it was given and has not returned, whether or not the lease is over;
        # and what runs an environment's code there by its own report, with what problem that is.
        self._at: defaultdict[str, set[Lease]] = defaultdict(set)
        self._inside: dict[str, Mapping[int, str]] = {}

    @property
    def suspects(self) -> set[int]:
        """Groups that get a worker to themselves."""
        return {i for i, count in self._suspicion.items() if count >= _SUSPECT}

    @property
    def any_suspected(self) -> bool:
        """Some group was there when a worker died, and has not arrived since."""
        return bool(self._suspicion)

    def given(self, worker: str, leases: Collection[Lease]) -> None:
        """The worker has these now."""
        self._at[worker] |= set(leases)

    def returned(self, worker: str, lease: Lease) -> None:
        """It has this one no more."""
        self._at[worker].discard(lease)

    def inside(self, worker: str, problems: Mapping[int, str]) -> None:
        """Which of the worker's groups, at most, run code of their own until its next report."""
        self._inside[worker] = problems

    def arrived(self, group_id: int) -> None:
        """It is a suspect no more."""
        self._suspicion.pop(group_id, None)

    def failed(self, group_id: int, reason: str) -> str | None:
        """Counts a failure of its own. Returns why it is to be set aside; None: it is not."""
        self._failures[group_id] += 1
        failures = self._failures[group_id]
        return f"failed {failures} times: {reason}" if failures >= self._max_failures else None

    def lost(self, group_id: int, reason: str) -> str | None:
        """Counts a lease that ran out, or a loss of what it had made. Returns as `failed`."""
        self._deaths[group_id] += 1
        deaths = self._deaths[group_id]
        if deaths < self._max_deaths:
            return None
        return f"{deaths} workers died or hung with it: {reason}"

    def died(self, worker: str, held: Collection[int]) -> Death:
        """Suspects the groups that a dead worker held leases of."""
        reported = self._inside.pop(worker, dict.fromkeys(held, ""))
        inside = {i: problem for i, problem in reported.items() if i in held}
        at = {lease.group_id for lease in self._at.pop(worker, ())}
        guilty = next(iter(held)) if len(held) == 1 and at == set(held) else None
        for group_id in held:
            self._suspicion[group_id] += _SUSPECT if group_id in inside else 1
        if guilty is not None:
            self._suspicion[guilty] = _SUSPECT
        return Death(had_groups=bool(held or at), inside=inside, guilty=guilty)

    def forget_below(self, watermark: int) -> None:
        """Nothing below it will be done again."""
        for counts in (self._failures, self._deaths, self._suspicion):
            for group_id in [i for i in counts if i < watermark]:
                del counts[group_id]


def killed(problem: str, reason: str) -> str:
    """Message on a group that killed a worker which ran nothing else, with a remedy."""
    where = f", in the code of {problem}" if problem else ""
    return (
        f"its worker died while it ran this group alone{where} ({reason}); make its environment "
        "and reward raise instead of ending or holding up their process, or take the problem out"
    )
