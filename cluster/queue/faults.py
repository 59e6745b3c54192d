"""Attribution of failed groups and of worker deaths.

The death of a worker ends all its groups, of which at most a few caused it. Groups that the worker
had reported to run environment or reward code become suspects; so does any group that is present at
a second death. A suspect is leased to a worker that runs nothing else. If that worker dies, the
group is the cause, and the death counts as the group's own failure. If the group is delivered, the
suspicion ends. So a group that kills every worker is set aside, usually after `max_failures + 2`
deaths, and no group is set aside for the fault of another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from distill.records import Lease

# Suspicion score of a suspect: one death inside its environment or reward, or two elsewhere.
_SUSPECT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's death.

    Attributes:
        had_groups: True if the worker ran groups, even if all their leases had ended.
        in_user_code: leased groups that ran environment or reward code by the worker's last report
            (all of them, if there was no report), with a description of each problem.
        cause: the only group that the worker ran; None if there were more.
    """

    had_groups: bool
    in_user_code: dict[int, str]
    cause: int | None


class Faults:
    """Counts failures, deaths and suspicion of each group of a run."""

    def __init__(self, max_failures: int, max_deaths: int) -> None:
        """Args: see `LedgerSettings`."""
        self._max_failures, self._max_deaths = max_failures, max_deaths
        self._failures: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        self._suspicion: Counter[int] = Counter()
        # By worker: leases that the worker has not returned, ended ones included; and groups that
        # run environment or reward code by its last report, with a description of each problem.
        self._at: defaultdict[str, set[Lease]] = defaultdict(set)
        self._in_user_code: dict[str, Mapping[int, str]] = {}

    @property
    def suspects(self) -> set[int]:
        """Groups that are leased only to a worker that runs nothing else."""
        return {i for i, count in self._suspicion.items() if count >= _SUSPECT}

    @property
    def any_suspected(self) -> bool:
        """True if some group was present at a worker's death and has not been delivered since."""
        return bool(self._suspicion)

    def given(self, worker: str, leases: Collection[Lease]) -> None:
        self._at[worker] |= set(leases)

    def returned(self, worker: str, lease: Lease) -> None:
        self._at[worker].discard(lease)

    def report_user_code(self, worker: str, problems: Mapping[int, str]) -> None:
        """Record which of the worker's groups may run environment or reward code.

        Args:
            problems: a description of each problem, by group id; valid until the next report.
        """
        self._in_user_code[worker] = problems

    def arrived(self, group_id: int) -> None:
        self._suspicion.pop(group_id, None)

    def failed(self, group_id: int, reason: str) -> str | None:
        """Count a failure of the group itself.

        Returns:
            The reason to set the group aside, or None to lease it again.
        """
        self._failures[group_id] += 1
        failures = self._failures[group_id]
        return f"failed {failures} times: {reason}" if failures >= self._max_failures else None

    def lost(self, group_id: int, reason: str) -> str | None:
        """Count an expired lease, or the loss of a delivered group. Returns as `failed`."""
        self._deaths[group_id] += 1
        deaths = self._deaths[group_id]
        if deaths < self._max_deaths:
            return None
        return f"{deaths} workers died or hung with it: {reason}"

    def died(self, worker: str, held: Collection[int]) -> Death:
        """Record a worker's death and raise the suspicion of the groups `held`, which it leased."""
        reported = self._in_user_code.pop(worker, dict.fromkeys(held, ""))
        in_user_code = {i: problem for i, problem in reported.items() if i in held}
        at = {lease.group_id for lease in self._at.pop(worker, ())}
        cause = next(iter(held)) if len(held) == 1 and at == set(held) else None
        for group_id in held:
            self._suspicion[group_id] += _SUSPECT if group_id in in_user_code else 1
        if cause is not None:
            self._suspicion[cause] = _SUSPECT
        return Death(had_groups=bool(held or at), in_user_code=in_user_code, cause=cause)

    def forget_below(self, watermark: int) -> None:
        """Drop the counters of groups below the watermark, which are never leased again."""
        for counts in (self._failures, self._deaths, self._suspicion):
            for group_id in [i for i in counts if i < watermark]:
                del counts[group_id]


def killed(problem: str, reason: str) -> str:
    """Message on a group that killed a worker running nothing else, with a remedy."""
    where = f", in the code of {problem}" if problem else ""
    return (
        f"its worker died while it ran this group alone{where} ({reason}); make its environment "
        "and reward raise an exception instead of ending or blocking their process, or remove "
        "the problem"
    )
