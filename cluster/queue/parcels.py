"""What crosses the queue in place of a group: its outline, and references to its parts.

    worker    offers packed groups       holds each until `deliver` has returned
    queue     takes them over            owns the parts, and never looks into them
    leader    reads outlines             deals out the rows that they stand for
    learner's workers, each              ask the queue for the parts of the trajectories that they
                                         train, and fetch those

On Ray an object is lost with the process that owns it, and that is the one which called for it. So
it is the queue that calls: a worker may die, or be drained, once its groups were delivered. They
stay in the object store of the worker's node, and are lost with that, or with the queue. (What is
below 100 kB Ray would hand to the owner itself: a group that is travels in the call, as bytes.) In
one process parts are what they are.
"""

from __future__ import annotations

import pickle
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from cluster.queue.codec import Packed, Part, unpack
from distill.outlines import Fetched, GroupOutline, Place
from distill.types import Trajectory, TrajectoryGroup

# Of a group's arrays: with what describes them it stays below Ray's 100 kB, above which an argument
# of a call takes the way by the object store.
_IN_CALL_BYTES = 90_000


class PartPlace(NamedTuple):
    """Of a part: its group, and its number there."""

    group_id: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A group as the queue holds it.

    Attributes:
        outline: its pickled `GroupOutline`.
        firsts: number of the first trajectory of each part.
        parts: of each a reference to it, its pickle, or the part itself.
    """

    outline: bytes
    firsts: tuple[int, ...]
    parts: tuple[Any, ...]

    def part_of(self, place: Place) -> PartPlace:
        """The part that has a trajectory."""
        return PartPlace(place.group_id, bisect_right(self.firsts, place.member) - 1)


class Offer(Protocol):
    """A group on its way to the queue."""

    async def take_over(self) -> Parcel:
        """Called by the queue, which owns it from now on."""
        ...

    def withdraw(self) -> None:
        """Called by the worker: it holds it no longer."""
        ...


def offer(queue: Any, group: Packed) -> Offer:
    """A group for the queue whose actor's handle this is."""
    if isinstance(queue, LocalActor):
        return _InHand(_parcel(group, group.parts))
    if group.nbytes <= _IN_CALL_BYTES:
        return _InHand(_each_part(group, partial(pickle.dumps, protocol=5)))
    holder = calls.this_actor()
    if holder is None:  # nobody could call it: its groups end with it
        return _InHand(_each_part(group, calls.put))
    name = secrets.token_hex(8)
    _OFFERED[name] = group.parts
    return _Held(holder, name, _parcel(group, ()), len(group.parts))


def _parcel(group: Packed, parts: Sequence[Any]) -> Parcel:
    return Parcel(outline=group.outline, firsts=group.firsts, parts=tuple(parts))


def _each_part(group: Packed, make: Callable[[Part], Any]) -> Parcel:
    return _parcel(group, [make(part) for part in group.parts])


@dataclass(frozen=True, slots=True)
class _InHand:
    parcel: Parcel

    async def take_over(self) -> Parcel:
        return self.parcel

    def withdraw(self) -> None:
        """There is nothing to let go."""


# Of this process, until the queue has them.
_OFFERED: dict[str, tuple[Part, ...]] = {}


@dataclass(frozen=True, slots=True)
class _Held:
    """In the process of the actor `holder`, by `name`: so many `parts` of the parcel."""

    holder: Any
    name: str
    parcel: Parcel
    parts: int

    async def take_over(self) -> Parcel:
        call = self.holder.__ray_call__.options(num_returns=1 + self.parts)
        done, *parts = call.remote(_hand_over, self.name)
        await done  # a small one: the others are stored by now
        outline, firsts = self.parcel.outline, self.parcel.firsts
        return Parcel(outline=outline, firsts=firsts, parts=tuple(parts))

    def withdraw(self) -> None:
        del _OFFERED[self.name]


def _hand_over(_: Any, name: str) -> tuple[Any, ...]:
    """Runs in the worker's process: an acknowledgement, and the parts, each an object."""
    return None, *_OFFERED[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsAnswer:
    """The queue's answer to who asks for trajectories.

    Attributes:
        parts: references, pickles or parts, by place. In dicts, or Ray would fetch them.
        members: of each part: the trajectories asked for, by their number within it.
        gone: groups that the queue holds no longer.
    """

    parts: Mapping[PartPlace, Any]
    members: Mapping[PartPlace, Mapping[int, Place]]
    gone: Sequence[int]


def parts_of(parcels: Mapping[int, Parcel], places: Sequence[Place]) -> PartsAnswer:
    """Where these trajectories are."""
    members: dict[PartPlace, dict[int, Place]] = {}
    gone = []
    for place in places:
        if (parcel := parcels.get(place.group_id)) is None:
            gone.append(place.group_id)
            continue
        part = parcel.part_of(place)
        within = place.member - parcel.firsts[part.number]
        members.setdefault(part, {})[within] = place
    parts = {part: parcels[part.group_id].parts[part.number] for part in members}
    return PartsAnswer(parts=parts, members=members, gone=sorted(set(gone)))


class OpenPart(NamedTuple):
    """A part in this process: what the queue has of it, by which it is known again, and its
    trajectories."""

    held: Any
    trajectories: Sequence[Trajectory]


class OpenParts(NamedTuple):
    """Parts that are there, and of the groups of others why not."""

    parts: Mapping[PartPlace, OpenPart]
    lost: Mapping[int, str]


def open_parts(
    parts: Mapping[PartPlace, Any], before: Mapping[PartPlace, OpenPart], timeout_s: float
) -> OpenParts:
    """Parts in this process: those opened `before` as they are, and the others from wherever they
    are.

    Raises:
        GetTimeoutError: some node does not answer.
    """
    opened = {
        place: before[place]
        for place, part in parts.items()
        if place in before and _is_same(before[place].held, part)
    }
    others = {place: part for place, part in parts.items() if place not in opened}
    references = [part for part in others.values() if calls.in_store(part)]
    if references:
        calls.wait(references, num_returns=len(references), timeout=timeout_s)  # all at a time
    lost = {}
    for place, part in others.items():
        try:
            opened[place] = OpenPart(part, unpack(_fetched(part, timeout_s)))
        except (errors.ObjectLostError, errors.RayActorError) as error:
            lost[place.group_id] = str(error).split("\n", 1)[0]
    return OpenParts(opened, lost)


def _is_same(held: Any, part: Any) -> bool:
    """True of one object: a group that was made or scored again has others."""
    known = isinstance(part, bytes) or calls.in_store(part)
    return held is part or (known and bool(held == part))


def fetched(answer: PartsAnswer, opened: OpenParts) -> Fetched:
    """The trajectories that were asked for."""
    found = {
        asked: opened.parts[place].trajectories[n]
        for place, members in answer.members.items()
        if place in opened.parts
        for n, asked in members.items()
    }
    gone = dict.fromkeys(answer.gone, "the queue holds it no longer")
    return Fetched(found, {**gone, **opened.lost})


def opened_whole(parcel: Parcel, timeout_s: float) -> TrajectoryGroup | None:
    """A group in this process; None if its node is gone."""
    outline: GroupOutline = pickle.loads(parcel.outline)
    answer = parts_of({outline.group_id: parcel}, outline.places)
    try:
        found, lost = fetched(answer, open_parts(answer.parts, {}, timeout_s))
    except errors.GetTimeoutError:
        return None
    return None if lost else outline.filled_from(found)


def _fetched(part: Any, timeout_s: float) -> Part:
    if calls.in_store(part):
        return calls.get(part, timeout_s)
    return pickle.loads(part) if isinstance(part, bytes) else part
