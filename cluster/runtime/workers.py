"""Rollout workers from the driver's view: announced engines, statuses and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cluster.base.outcomes import RunFailed
from cluster.handles import calls, errors
from cluster.hosts.rollout_actor import Roster, RosterChange, WorkerStatus
from cluster.placement.roles import ROLLOUT
from cluster.runtime.driver import Driver
from cluster.supervision.supervise import Member, State, Supervisor

_EVERY_S = 1.0  # between two statuses of a worker


class Workers:
    """Announces engines to the rollout workers, and follows each worker until it is gone.

    A worker receives the complete list of engines once, and then changes: with N workers and N
    engines, the return of one engine costs N short messages, not N times N handles. A worker that
    missed a message receives the complete list again.

    Args:
        drained: called with a worker that has ended its work after it was drained.

    Attributes:
        statuses: last status of each worker that answers, by name.
        announced: `Supervisor.changes` at the last announcement.
    """

    def __init__(
        self, supervisor: Supervisor, driver: Driver, drained: Callable[[Member], None]
    ) -> None:
        self._supervisor, self._driver, self._drained = supervisor, driver, drained
        self.statuses: dict[str, WorkerStatus] = {}
        self.announced = -1
        self._status_version: dict[str, int] = {}  # `announced` when the last status was asked for
        self._roster: Roster = {}
        self._members: set[Member] = set()
        self._outdated: set[Member] = set()

    @property
    def all_current(self) -> bool:
        """True if every worker's status is newer than the last change of the serving engines."""
        return self.announced == self._supervisor.changes and all(
            self._status_version.get(member.name) == self.announced for member in self._members
        )

    def announce(
        self, roster: Roster, max_groups: int, epoch: int, replicas: Mapping[str, int]
    ) -> None:
        """Send `RolloutActor.update` to every worker, without waiting; new workers begin to work.

        If a worker's call or work fails, the driver raises RunFailed.

        Args:
            replicas: numbers of scorers (cluster/runtime/canaries.py).
        """
        members = self._supervisor.members(ROLLOUT, State.SERVING, State.DRAINING)
        known = self._members - self._outdated
        change = RosterChange.between(self._roster, roster, replicas)
        everything = RosterChange.between({}, roster, replicas)
        for message, up_to_date in ((change, True), (everything, False)):
            receivers = [member for member in members if (member in known) is up_to_date]
            shared = calls.shared(message, [member.handle for member in receivers])
            for member in receivers:
                update = member.handle.update.remote(shared, max_groups, epoch)
                self._driver.background.start(self._send_update(member, update))
        new = [member for member in members if member not in self._members]
        self._roster = {role: dict(engines) for role, engines in roster.items()}
        self._members, self._outdated = set(members), set()
        self.announced = self._supervisor.changes
        names = {member.name for member in members}
        self.statuses = {name: s for name, s in self.statuses.items() if name in names}
        for member in new:
            self._driver.background.start(self._work(member, member.handle.run.remote()))
            self._driver.background.start(self._follow(member))

    async def _send_update(self, member: Member, update: Any) -> None:
        if not await _answers(member, update):
            self._outdated.add(member)  # if it is alive, it gets the complete list again

    async def _work(self, member: Member, run: Any) -> None:
        ended = await _answers(member, run)  # otherwise it died; its heartbeat will detect that
        if ended and member in self._supervisor.members(ROLLOUT, State.DRAINING):
            self._drained(member)

    async def _follow(self, member: Member) -> None:
        """Request a worker's status in a loop. A worker that hangs does not delay others."""
        while member in self._members:
            announced = self.announced
            try:
                self.statuses[member.name] = await member.handle.status.remote()
                self._status_version[member.name] = announced
            except errors.RayError:
                self.statuses.pop(member.name, None)
            await asyncio.sleep(_EVERY_S)


async def _answers(member: Member, call: Any) -> bool:
    """Wait for a worker's call; False if it died. Raises RunFailed if its code raised."""
    try:
        await call
    except errors.RayTaskError as error:
        raise RunFailed(f"{member.name} failed: {calls.reason_of(error)}") from error
    except errors.RayError:
        return False
    return True
