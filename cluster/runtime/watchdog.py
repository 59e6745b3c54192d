"""Stall detection: logs the wait graph, re-leases groups, then restarts actors.

    stall_after_s without progress       logs the wait graph; leases the late groups again
    twice as long                        terminates the actors that hold them; they are restarted
    deadline_s                           fails the run, with the same report

Progress is a group that arrives, a group that enters its next stage, and work of an engine at which
a group waits: an engine may generate for hours. Heartbeats detect actors that are dead or frozen;
this detects actors that answer heartbeats but do nothing else.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cluster.base.outcomes import RunFailed
from cluster.hosts.rollout_actor import GroupProgress, WorkerStatus
from cluster.placement.roles import REWARD
from cluster.queue.ledger_types import QueueStatus

# Default of `stall_after_s`.
STALL_AFTER_S = 300.0
_SHOWN = 8


class Watchdog:
    """Stall detection on the queue, while the learner waits for groups.

    Args:
        re_lease: leases groups again, for a reason.
        terminate: ends an actor by its name, for a reason; it is restarted.
    """

    def __init__(
        self,
        re_lease: Callable[[list[int], str], None],
        terminate: Callable[[str, str], None],
        print_line: Callable[[str], None],
        deadline_s: float,
        *,
        stall_after_s: float = STALL_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._re_lease, self._terminate = re_lease, terminate
        self._print_line, self._clock = print_line, clock
        self._stall_after_s, self._deadline_s = stall_after_s, deadline_s
        self._delivered = -1
        self._since = clock()
        self._checked = self._since
        self._stalls = 0

    def check(
        self,
        status: QueueStatus,
        workers: Mapping[str, WorkerStatus],
        since_progress_s: Mapping[str, float],
    ) -> None:
        """Check for stalls; call it periodically while the learner waits for groups.

        Args:
            since_progress_s: seconds since the last progress of each engine, by name.

        Raises:
            RunFailed: there was no progress within the deadline.
        """
        now = self._clock()
        # Time between two checks is time in which the learner worked.
        if status.delivered != self._delivered or now - self._checked > self._stall_after_s / 4:
            self._delivered, self._since, self._stalls = status.delivered, now, 0
        self._checked = now
        idle_s = now - self._since
        quiet = quiet_s(status, workers, since_progress_s)
        missing = [quiet[i] for i in status.missing if i in quiet]
        # The run fails when no group makes progress; an actor is suspect when one group makes none.
        if min([idle_s, *missing]) > self._deadline_s:
            raise RunFailed(wait_graph(status, workers, idle_s))
        stalled_s = min(idle_s, max(missing, default=idle_s))
        if stalled_s < self._stall_after_s:
            self._stalls = 0
        if stalled_s < self._stall_after_s * (self._stalls + 1):
            return
        self._stalls += 1
        self._print_line(wait_graph(status, workers, idle_s))
        late = [
            i
            for i, (_, _, age_s) in status.leased.items()
            if quiet.get(i, age_s) >= self._stall_after_s
        ]
        if self._stalls > 1:
            for name in sorted(suspects(status, workers, since_progress_s, self._stall_after_s)):
                self._terminate(name, f"it produced no group for {stalled_s:.0f} s")
        if late:
            self._re_lease(late, f"no progress for {stalled_s:.0f} s")


def quiet_s(
    status: QueueStatus, workers: Mapping[str, WorkerStatus], since_progress_s: Mapping[str, float]
) -> dict[int, float]:
    """Seconds without progress of every group that a worker holds, by group id.

    A group inside its environment makes progress by entering stages, or with the reward model that
    its worker waits for. A group at engines makes progress with any engine that its worker waits
    for, because only the engines can attribute requests to groups.
    """
    return {
        group.group_id: min(
            [
                group.seconds,
                *(since_progress_s.get(engine, math.inf) for engine in _engines(worker, group)),
            ]
        )
        for _, worker, group in _leased(status, workers)
    }


def suspects(
    status: QueueStatus,
    workers: Mapping[str, WorkerStatus],
    since_progress_s: Mapping[str, float],
    longer_than_s: float,
) -> set[str]:
    """Actors without progress that have held awaited groups for too long."""
    found: set[str] = set()
    for name, worker, group in _leased(status, workers):
        if group.group_id in status.missing and group.seconds >= longer_than_s:
            engines = _engines(worker, group)
            at = engines if group.stage in ("sampling", "scoring") else engines or {name}
            found |= {each for each in at if since_progress_s.get(each, math.inf) >= longer_than_s}
    return found


def _leased(
    status: QueueStatus, workers: Mapping[str, WorkerStatus]
) -> Iterator[tuple[str, WorkerStatus, GroupProgress]]:
    """Groups that a worker holds with a valid lease, with the worker and its name."""
    for name, worker in workers.items():
        for group in worker.groups:
            if status.leased.get(group.group_id, ("", 0, 0.0))[0] == name:
                yield name, worker, group


def _engines(worker: WorkerStatus, group: GroupProgress) -> set[str]:
    """Engines at which the group may wait."""
    asked = {engine for engine, requests in worker.requests.items() if requests}
    match group.stage:
        case "sampling":
            return {engine for engine in asked if engine.startswith("policy")}
        case "scoring":
            return {engine for engine in asked if not engine.startswith(("policy", REWARD))}
        case "environment":
            return asked & {REWARD}
        case _:
            return set()


def wait_graph(status: QueueStatus, workers: Mapping[str, WorkerStatus], idle_s: float) -> str:
    """Report for users: the groups that the learner waits for, and the state of every actor."""
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
        f"to be leased again; last failure: {status.last_reason or 'none'}"
    )
    return "\n".join(lines)
