r"""Supervisor of a run's actors: heartbeats, deaths and restarts.

    STARTING --heartbeat--> READY --admit--> SERVING --drain--> DRAINING --idle--> gone
        \____________________\_______________\_________________\
              death: terminated; restarted after a back-off within a budget, unless it was draining

The driver owns every actor. Each actor has a coroutine that sends its heartbeats, and advances
while the driver waits. `Background.check` raises errors that end the run or concern the learner. A
heartbeat is a call that a healthy actor answers during any other work. An actor that has not
answered for `hang_after_s` is terminated like a dead one, since nothing else detects a frozen
process.

An engine serves only after it is admitted: by then it holds the current weights and has passed its
handshake (cluster/runtime/run_handshake.py). Learner workers are not restarted individually. The
loss of one is the loss of all, and raises `LearnerLost`: the driver returns to a checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from cluster.base.background import Background
from cluster.base.outcomes import LearnerLost, RunFailed
from cluster.handles import calls, errors
from cluster.handles.node import node_address
from distill.errors import IsothermError

# Concurrency groups, whose calls overtake long ones.
HEALTH_GROUP = "health"  # heartbeats
JOIN_GROUP = "join"  # engines that join while the learner computes; waits for its writer
_BEAT_S = 2.0
_LOOK_S = 0.5  # seconds between two looks at a slow answer
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_WINDOW_S = 3600.0
# Seconds; deaths closer to one another delay the next restart more.
_QUIET_S = 120.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Answer to a heartbeat: a progress count, and names of engines that the actor waits for."""

    count: int
    waits_for: frozenset[str] = frozenset()


class State(Enum):
    STARTING = auto()
    READY = auto()
    SERVING = auto()
    DRAINING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """Start, health check and restart of the actors of one role.

    Attributes:
        name: the role: `policy`, `teacher maths`, `rollout`, ...
        title: returns the name in messages of the actor with an index.
        create: creates the actor with an index; the second argument is the number of its earlier
            starts. None for actors that are created elsewhere and adopted.
        follow: creates an actor's followers, required actors on other nodes: each handle with the
            call that lasts as long as the follower. They start and end with the actor.
        heartbeat: calls an actor's health check.
        gated: the actor serves only once it is admitted; other actors at their first heartbeat.
        critical: its death ends the call that the driver waits for; it is not restarted here.
        restarted_by_ray: Ray restarts the actor, and its handle stays valid; only a hang is handled
            here. Its heartbeat reports its process.
        death_details: returns what an actor that is being terminated was doing, for the message.
        lacking: what the actor with an index waits for if the cluster has no place for it, and
            until when; "" if it has one.
        start_deadline_s: longest time from its creation to its first heartbeat.
        start_is: description of its start, and its log, for messages; "" for none.
    """

    name: str
    title: Callable[[int], str]
    create: Callable[[int, int], Any] | None
    heartbeat: Callable[[Any], Any]
    follow: Callable[[int, int, Any], Mapping[Any, Any]] = lambda _index, _attempt, _handle: {}
    lacking: Callable[[int], str] = lambda _index: ""
    death_details: Callable[[], str] = lambda: ""
    gated: bool = False
    critical: bool = False
    restarted_by_ray: bool = False
    start_deadline_s: float
    start_is: Callable[[int], str] = lambda _index: ""


@dataclass(slots=True, eq=False)
class Member:
    """One actor of a role.

    `last_answer` is that to the last heartbeat. `moved`, `ready` and `died` are times: of the last
    change of the answer, of the first answer, and of the last death of the actor or its
    predecessor. `death_details` are those of its spec when it was terminated. `followers` are
    handles, by the call of each that lasts as long as the follower.
    """

    spec: ActorSpec
    index: int
    handle: Any
    attempt: int
    followers: Mapping[Any, Any] = field(default_factory=dict)
    state: State = State.STARTING
    last_answer: Any = None
    moved: float = field(default_factory=time.monotonic)
    died: float | None = None
    ready: float = 0.0
    death_details: str = ""

    @property
    def name(self) -> str:
        return self.spec.title(self.index)

    def kill(self) -> None:
        """Terminate the actor and its followers, dead or alive."""
        for handle in (self.handle, *self.followers.values()):
            calls.kill(handle)


@dataclass(slots=True)
class Budget:
    """Restart budget of one actor: the delay of the next restart, and the limit of restarts."""

    max_restarts: int
    _deaths: list[float] = field(default_factory=list)

    def delay(self, now: float) -> float | None:
        """Seconds until the restart after a death now; None if the hour's budget is spent."""
        self._deaths = [*(death for death in self._deaths if death >= now - _WINDOW_S), now]
        if len(self._deaths) > self.max_restarts:
            return None
        recent = sum(death > now - _QUIET_S for death in self._deaths)
        return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (recent - 1))


class WorkFailed(Exception):
    """A critical member is alive, and its heartbeat raised the cause of this error."""


class Supervisor:
    """Supervisor of the actors of a run.

    Args:
        record: writes an event: its kind and fields.
        on_death: called at every death, after the actor is removed from its role.
        hang_after_s: an actor that answers no heartbeat for this time is terminated.
        max_restarts: limit for one actor within an hour; the next death ends the run.

    Attributes:
        background: the coroutines that watch the actors. Every wait of the driver advances and
            checks them.
    """

    def __init__(
        self,
        *,
        print_line: Callable[[str], None],
        record: Callable[..., None],
        on_death: Callable[[Member, str], None],
        hang_after_s: float = 60.0,
        max_restarts: int = 10,
    ) -> None:
        self.print_line, self._record, self._on_death = print_line, record, on_death
        self.hang_after_s, self._max_restarts = hang_after_s, max_restarts
        self._members: dict[Member, None] = {}  # in order of their start
        self.background = Background()
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._restarts: list[Member] = []  # dead; successors are created after a back-off
        self._budgets: dict[tuple[str, int], Budget] = {}
        self.changes = 0  # number of changes of the serving members
        # Until all actors have started once, a failed start is an error of the run.
        self.run_started = False

    def add(self, spec: ActorSpec, index: int, attempt: int = 0) -> Member:
        """Create an actor and its followers."""
        assert spec.create is not None
        member = self.adopt(spec, index, spec.create(index, attempt), attempt)
        member.followers = spec.follow(index, attempt, member.handle)
        for call in member.followers:
            self.background.start(self._follow(member, call))
        return member

    def adopt(self, spec: ActorSpec, index: int, handle: Any, attempt: int = 0) -> Member:
        """Supervise an existing actor."""
        member = Member(spec=spec, index=index, handle=handle, attempt=attempt)
        self._members[member] = None
        self._watches[spec.name, index] = self.background.start(self._watch(member))
        if attempt:
            self.background.start(self._report_lost_place(member))
        return member

    def members(self, role: str, *states: State) -> list[Member]:
        """Members of a role in order of index; only those in `states`, if any are given."""
        found = [m for m in self._members if m.spec.name == role]
        return sorted((m for m in found if not states or m.state in states), key=lambda m: m.index)

    def serving(self, role: str) -> dict[str, Any]:
        """Handles of the members that serve, by member name."""
        return {m.name: m.handle for m in self.members(role, State.SERVING)}

    def since_progress_s(self) -> dict[str, float]:
        """Seconds since each member's heartbeat last reported progress, by name."""
        now = time.monotonic()
        return {member.name: now - member.moved for member in self._members}

    def last_progress(self, role: str) -> float:
        """Time of the last progress of an actor of the role, or of an engine that one waits for."""
        names = {member.name for member in self.members(role)}
        for member in self.members(role):
            if isinstance(member.last_answer, WorkDone):
                names |= member.last_answer.waits_for
        return max((m.moved for m in self._members if m.name in names), default=-math.inf)

    def waiting(self) -> list[Member]:
        """Members that are ready and not admitted yet."""
        return [m for m in self._members if m.state is State.READY]

    def is_restarting(self, role: str) -> bool:
        """True while members that died are restarted and have not answered."""
        starting = self.members(role, State.STARTING)
        return any(m.died is not None for m in (*self._restarting(role), *starting))

    def expected(self, role: str) -> int:
        """Number of members that are up or being restarted, without draining ones."""
        up = self.members(role, State.STARTING, State.READY, State.SERVING)
        return len(up) + len(self._restarting(role))

    def _restarting(self, role: str) -> list[Member]:
        """Dead members of a role whose successors are not created yet."""
        return [member for member in self._restarts if member.spec.name == role]

    def critical(self) -> dict[str, Any]:
        """Handles of the members that the learner requires, by name."""
        return {member.name: member.handle for member in self._members if member.spec.critical}

    def admit(self, member: Member) -> None:
        """Mark the member as serving."""
        assert member.state in (State.STARTING, State.READY)
        member.state = State.SERVING
        self.changes += 1
        if member.died is not None:
            seconds = time.monotonic() - member.died
            self.print_line(f"{member.name} serves again, {seconds:.1f} s after its death")
            self._record("restart", who=member.name, seconds=seconds)
            member.died = None

    def drain(self, member: Member) -> None:
        """Mark the member as draining: it gets no new work. `remove` it once it is idle."""
        member.state = State.DRAINING
        self.changes += 1

    def remove(self, member: Member) -> None:
        """Terminate an actor that is no longer needed."""
        del self._members[member]
        self._budgets.pop((member.spec.name, member.index), None)
        self.changes += 1
        member.kill()

    def cancel_restart(self, role: str) -> int | None:
        """Cancel a pending restart of the role; returns its index, or None if there is none."""
        if not (coming := self._restarting(role)):
            return None
        self._restarts.remove(coming[-1])
        return coming[-1].index

    def remove_all(self, role: str) -> None:
        """Terminate all members of a critical role. Deaths found meanwhile are not raised again."""
        for member in self.members(role):
            del self._members[member]
            member.kill()
        self.changes += 1
        for (name, _), watch in self._watches.items():
            if name == role:
                self.background.forget(watch)

    async def _watch(self, member: Member) -> None:
        """Send a member's heartbeats, one after the other, until it is gone.

        Raises:
            LearnerLost: the member is critical and died.
            WorkFailed: the member is critical and alive, but reports failed work.
            RunFailed: the member died at the run's start, or too often.
        """
        spec = member.spec
        while member in self._members and spec.lacking(member.index):
            await asyncio.sleep(_BEAT_S)
        while member in self._members:
            asked = time.monotonic()
            beat = spec.heartbeat(member.handle)
            comes_back = spec.restarted_by_ray and member.died is not None
            slow = member.state is State.STARTING or comes_back
            limit = spec.start_deadline_s if slow else self.hang_after_s
            answered = await self._answered(member, beat, limit)
            if member not in self._members:
                return
            if not answered:
                what = "did not start" if slow else "gave no sign of life"
                self.terminate(member, f"it {what} within {limit:.0f} s")
                continue
            try:
                answer = calls.get(beat)
            except errors.RayError as error:
                lives = isinstance(error, errors.RayTaskError)
                if spec.critical and lives and member.state is not State.STARTING:
                    raise WorkFailed(member.name) from error
                self.terminate(member, calls.reason_of(error), error)
            else:
                self._on_heartbeat(member, answer, asked)
            await asyncio.sleep(asked + _BEAT_S - time.monotonic())

    async def _report_lost_place(self, member: Member) -> None:
        """Report an actor that cannot restart: its node is gone, and no other has room."""
        while member in self._members and member.state is State.STARTING:
            if lacking := member.spec.lacking(member.index):
                self.print_line(f"{member.name} has lost its node, and waits for {lacking}")
                return
            await asyncio.sleep(_BEAT_S)

    async def _answered(self, member: Member, beat: Any, limit_s: float) -> bool:
        """Wait for a heartbeat; False if the actor hangs. No hang while Ray restarts the actor."""
        since, ended = time.monotonic(), asyncio.ensure_future(calls.end_of(beat))
        try:
            while not (await asyncio.wait([ended], timeout=_LOOK_S))[0]:
                if calls.ended([beat]):  # the driver was busy with other work
                    return True
                if member.spec.restarted_by_ray and not calls.is_alive(member.handle):
                    since = time.monotonic()
                elif time.monotonic() - since > limit_s or member not in self._members:
                    return False
            return True
        finally:
            ended.cancel()

    def _on_heartbeat(self, member: Member, answer: Any, asked: float) -> None:
        if member.spec.restarted_by_ray and answer != member.last_answer is not None:
            self._on_ray_restart(member, asked)
        if answer != member.last_answer:
            member.moved = time.monotonic()
        member.last_answer = answer
        if member.state is State.STARTING:
            member.state, member.ready = State.READY, time.monotonic()
            self.background.start(self._introduce(member))
            if not member.spec.gated:
                self.admit(member)

    async def _introduce(self, member: Member) -> None:
        """Record the process and node of an actor that has answered."""
        try:
            health_group = member.spec.heartbeat in (ready_call, progress_call)
            pid, node = await location_call(member.handle, health_group=health_group)
        except errors.RayError:
            return  # it died meanwhile; its heartbeat will detect that
        self._record("start", who=member.name, pid=pid, node=node)

    async def _follow(self, member: Member, follower: Any) -> None:
        """Terminate a member when one of its followers has ended: its server needs all of them."""
        await calls.end_of(follower)
        if member not in self._members:
            return
        try:
            calls.get(follower)
        except errors.RayError as error:
            self.terminate(member, f"on another of its nodes: {calls.reason_of(error)}", error)
        else:
            self.terminate(member, "its processes on another of its nodes have ended")

    async def _restart(self, dead: Member, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if dead in self._restarts:
            self._restarts.remove(dead)
            member = self.add(dead.spec, dead.index, dead.attempt + 1)
            member.died = dead.died

    def terminate(self, member: Member, why: str, error: errors.RayError | None = None) -> None:
        """Terminate an actor that is dead or hangs, and schedule its restart; raises as `_watch`.

        Args:
            error: error of its heartbeat or of another call, if that revealed the death.
        """
        now = time.monotonic()
        member.death_details = member.spec.death_details()
        why += member.death_details
        self._record("death", who=member.name, why=why)
        if member.spec.restarted_by_ray:
            self._await_ray_restart(member, why, hangs=error is None)
            return
        del self._members[member]
        self.changes += 1
        member.kill()
        self._on_death(member, why)
        if member.state is State.DRAINING:
            self._budgets.pop((member.spec.name, member.index), None)
            self.print_line(f"{member.name} died ({why}) while its work was drained")
            return
        if not self.run_started and member.state is State.STARTING:
            if isinstance(error, errors.RayTaskError) and isinstance(error.cause, IsothermError):
                raise error.cause
            raise RunFailed(f"{member.name} died at its start ({why})")
        if member.spec.critical:
            raise LearnerLost(f"{member.name} died ({why})")
        delay = self.allow(member.spec.name, member.index, f"{member.name} died ({why})")
        self.print_line(f"{member.name} died ({why}); it is restarted in {delay:.1f} s")
        member.died = now if member.died is None else member.died
        self._restarts.append(member)
        self.background.start(self._restart(member, delay))

    def allow(self, role: str, index: int, what: str) -> float:
        """Count a death; returns seconds until the restart. Raises RunFailed after too many."""
        budget = self._budgets.setdefault((role, index), Budget(self._max_restarts))
        delay = budget.delay(time.monotonic())
        if delay is None:
            limit = f"more than {self._max_restarts} times in an hour"
            raise RunFailed(f"{what}, {limit}")
        return delay

    def _on_ray_restart(self, member: Member, asked: float) -> None:
        """Handle a restart by Ray, detected by a changed process id between two heartbeats."""
        now = time.monotonic()
        if member.died is None:
            self._record("death", who=member.name, why="Ray restarted it")
            self.allow(member.spec.name, member.index, f"{member.name} died")
        seconds = now - (asked if member.died is None else member.died)
        self.print_line(f"{member.name} is back after {seconds:.1f} s")
        self._record("restart", who=member.name, seconds=seconds)
        self.background.start(self._introduce(member))
        member.died = None

    def _await_ray_restart(self, member: Member, why: str, *, hangs: bool) -> None:
        self.allow(member.spec.name, member.index, f"{member.name} died ({why})")
        self.print_line(f"{member.name} died ({why}); Ray restarts it")
        if hangs:
            calls.kill(member.handle, no_restart=False)
        member.died = time.monotonic() if member.died is None else member.died

    def end_all(self) -> None:
        """Terminate every actor, callers before the actors that they call; nothing restarts."""
        self._restarts.clear()
        for member in reversed(self._members):
            member.kill()
        self._members.clear()


def ready_call(actor: Any) -> Any:
    """Heartbeat of an actor that was created with the concurrency group `HEALTH_GROUP`."""
    return actor.__ray_ready__.options(concurrency_group=HEALTH_GROUP).remote()


def progress_call(actor: Any) -> Any:
    """Heartbeat of such an actor that returns its progress: a `WorkDone`."""
    return actor.progress.options(concurrency_group=HEALTH_GROUP).remote()


def location_call(actor: Any, *, health_group: bool = False) -> Any:
    """(process id, node address). `health_group`: for an actor with the group `HEALTH_GROUP`."""
    call = actor.__ray_call__
    return (call.options(concurrency_group=HEALTH_GROUP) if health_group else call).remote(
        _location
    )


def _location(_actor: object) -> tuple[int, str]:
    return os.getpid(), node_address()


def health_call(engine: Any) -> Any:
    """Heartbeat of an engine: whether it can answer requests, and its progress."""
    return engine.health.remote()
