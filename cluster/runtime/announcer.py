"""Announcements to rollout workers: which engines serve, how much to do, the queue's epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cluster.base.outcomes import RunFailed
from cluster.handles import calls, errors
from cluster.handles.failures import reason_of
from cluster.hosts.rollout_actor import Roster, RosterChange
from cluster.supervision.supervise import Member


class Announcer:
    """Tells each worker of all engines once, and then of those that come and go.

    Of N workers and as many engines, one that is back costs N short messages, not N times N
    handles. A worker that missed a message is told of all again.
    """

    def __init__(self) -> None:
        self._roster: dict[str, dict[str, Any]] = {}
        self._told: set[Member] = set()
        self._under_way: dict[Any, Member] = {}

    def announce(
        self,
        workers: Sequence[Member],
        roster: Roster,
        max_groups: int,
        epoch: int,
        lives: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Sends `RolloutActor.update` to every worker, and waits for none.

        Args:
            lives: numbers by which scorers are known (cluster/runtime/canaries.py).

        Raises:
            RunFailed: a worker could make nothing of an earlier one.
        """
        self._collect()
        change = RosterChange.between(self._roster, roster, lives)
        everything = RosterChange.between({}, roster, lives)
        self._send([m for m in workers if m in self._told], change, max_groups, epoch)
        self._send([m for m in workers if m not in self._told], everything, max_groups, epoch)
        self._roster = {role: dict(members) for role, members in roster.items()}
        self._told = set(workers)

    def _send(
        self, workers: Sequence[Member], change: RosterChange, max_groups: int, epoch: int
    ) -> None:
        shared = calls.shared(change, [member.handle for member in workers])
        for member in workers:
            told = member.handle.update.remote(shared, max_groups, epoch)
            self._under_way[told] = member

    def _collect(self) -> None:
        for reference in calls.ended(self._under_way):
            member = self._under_way.pop(reference)
            try:
                calls.get(reference)
            except errors.RayTaskError as error:
                raise RunFailed(f"{member.name} failed: {reason_of(error)}") from error
            except errors.RayError:
                self._told.discard(member)  # if it lives, it hears of all engines again
