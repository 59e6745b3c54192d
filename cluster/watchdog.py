"""When no group arrives: who waits for whom, and what is done about it.

    stall_after_s without a group        says who waits for whom; leases the late groups again
    twice as long                        ends the actors that hold them; they are made again
    deadline_s                           fails the run, with the same report

Heartbeats find what is dead or frozen. This finds what answers them, and does nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from cluster.ledger import QueueStatus
from cluster.rollout_actor import WorkerStatus
from cluster.supervise import RunFailed

_SHOWN = 8


class Patients(Protocol):
    """Whom the watchdog acts upon."""

    def re_lease(self, ids: list[int], reason: str) -> None: ...

    def bury(self, name: str, why: str) -> None: ...


class Watchdog:
    """Looks at the queue while the learner waits for groups."""

    def __init__(
        self,
        patients: Patients,
        say: Callable[[str], None],
        stall_after_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patients, self._say, self._clock = patients, say, clock
        self._stall_after_s, self._deadline_s = stall_after_s, deadline_s
        self._delivered = -1
        self._since = clock()
        self._looked = self._since
        self._stalls = 0

    def look(self, status: QueueStatus, workers: Mapping[str, WorkerStatus]) -> None:
        """Call again and again while groups are waited for.

        Raises:
            RunFailed: none arrived within the deadline.
        """
        now = self._clock()
        # Time in which nobody looked is time in which the learner worked.
        if status.delivered != self._delivered or now - self._looked > self._stall_after_s / 4:
            self._delivered, self._since, self._stalls = status.delivered, now, 0
        self._looked = now
        idle_s = now - self._since
        if idle_s > self._deadline_s:
            raise RunFailed(who_waits(status, workers, idle_s))
        if idle_s < self._stall_after_s * (self._stalls + 1):
            return
        self._stalls += 1
        self._say(who_waits(status, workers, idle_s))
        late = [i for i, (_, _, age_s) in status.leased.items() if age_s >= self._stall_after_s]
        if self._stalls > 1:
            for name in sorted(suspects(status, workers, self._stall_after_s)):
                self._patients.bury(name, f"nothing came of its work for {idle_s:.0f} s")
        if late:
            self._patients.re_lease(late, f"no group arrived for {idle_s:.0f} s")


def suspects(
    status: QueueStatus, workers: Mapping[str, WorkerStatus], longer_than_s: float
) -> set[str]:
    """Actors at which the groups that are waited for have been for too long."""
    found: set[str] = set()
    for group_id in status.missing:
        name, _, _ = status.leased.get(group_id, ("", 0, 0.0))
        worker = workers.get(name)
        if worker is None:
            continue
        for group in worker.groups:
            if group.group_id != group_id or group.seconds < longer_than_s:
                continue
            if group.stage == "sampling":
                found |= {e for e, n in worker.requests.items() if n and e.startswith("policy")}
            elif group.stage == "scoring":
                found |= {e for e, n in worker.requests.items() if n and not e.startswith("policy")}
            else:
                found.add(name)
    return found


def who_waits(status: QueueStatus, workers: Mapping[str, WorkerStatus], idle_s: float) -> str:
    """A report for people: what the learner waits for, where it is, and what everyone does."""
    missing = status.missing[:_SHOWN]
    lines = [f"no prompt group arrived for {idle_s:.0f} s; the learner waits for {missing}"]
    for group_id in missing:
        if group_id not in status.leased:
            lines.append(f"  group {group_id}: waits for a worker with room")
            continue
        name, attempt, age_s = status.leased[group_id]
        worker = workers.get(name)
        groups = [] if worker is None else [g for g in worker.groups if g.group_id == group_id]
        stage = f"{groups[0].stage} for {groups[0].seconds:.0f} s" if groups else "not heard of"
        lines.append(f"  group {group_id}: {name}, attempt {attempt}, {age_s:.0f} s: {stage}")
    for name, worker in workers.items():
        stages = Counter(group.stage for group in worker.groups)
        doing = ", ".join(f"{count} {stage}" for stage, count in stages.items()) or "nothing"
        asked = ", ".join(f"{engine} ({n})" for engine, n in worker.requests.items() if n)
        lines.append(f"  {name}: {doing}; waits for {asked or 'no engine'}")
    lines.append(
        f"  queue: {status.depth} groups, credit for {status.credit} more, {len(status.pending)} "
        f"to be leased again; last trouble: {status.last_reason or 'none'}"
    )
    return "\n".join(lines)
