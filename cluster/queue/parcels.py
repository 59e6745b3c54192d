"""Representation of a group in the queue: its metadata, and references to its parts.

    worker    offers packed groups       keeps each until `deliver` has returned
    queue     takes them over            owns the parts, and never opens them
    leader    reads metadata             distributes the rows that they describe
    each learner worker                  requests from the queue the parts with the trajectories
                                         that it trains, and fetches them

A Ray object is lost with the process that owns it, which is the caller of the task that returned
it. So the queue makes the call: a worker may die or be drained after its groups were delivered. The
parts stay in the object store of the worker's node, and are lost with that node or with the queue.
(Ray would copy objects below 100 kB to the owner, so a group that small travels in the call, as
bytes.) Within one process, parts are plain objects.
"""

from __future__ import annotations

import pickle
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from distill.columns import GroupColumns
from distill.records import Fetched, TrajectoryGroupMeta, TrajectoryId
from distill.types import Trajectory, TrajectoryGroup

# Largest size of a group's arrays that travel in a call: together with their metadata they stay
# below the 100 kB above which Ray puts an argument into the object store.
_IN_CALL_BYTES = 90_000


class PartPlace(NamedTuple):
    """Identifies a part: its group id and its index within the group."""

    group_id: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A group as the queue stores it.

    Attributes:
        meta: all that the queue reads.
        firsts: index of the first trajectory of each part, within the group.
        parts: for each part, a reference to it, its pickle, or the part itself.
    """

    meta: TrajectoryGroupMeta
    firsts: tuple[int, ...]
    parts: tuple[Any, ...]

    def part_of(self, place: TrajectoryId) -> PartPlace:
        """The part that contains a trajectory."""
        return PartPlace(place.group_id, bisect_right(self.firsts, place.member) - 1)


class Offer(Protocol):
    """A group on its way to the queue."""

    async def take_over(self) -> Parcel:
        """Transfer the ownership of the parts. Called by the queue."""
        ...

    def withdraw(self) -> None:
        """Release the worker's copy of the group. Called by the worker."""
        ...


def offer(queue: Any, meta: TrajectoryGroupMeta, parts: Sequence[GroupColumns]) -> Offer:
    """Offer a group to the queue.

    Args:
        queue: handle of the queue's actor.
        parts: consecutive trajectories of the group.
    """

    def parcel(stored: Sequence[Any]) -> Parcel:
        firsts = accumulate((len(part.segments_G) for part in parts[:-1]), initial=0)
        return Parcel(meta=meta, firsts=tuple(firsts), parts=tuple(stored))

    if isinstance(queue, LocalActor):
        return _InHand(parcel(parts))
    if sum(part.nbytes for part in parts) <= _IN_CALL_BYTES:
        return _InHand(parcel([pickle.dumps(part, protocol=5) for part in parts]))
    holder = calls.this_actor()
    if holder is None:  # no actor that the queue could call: the parts end with this process
        return _InHand(parcel([calls.put(part) for part in parts]))
    name = secrets.token_hex(8)
    _OFFERED[name] = tuple(parts)
    return _Held(holder, name, parcel(()), len(parts))


@dataclass(frozen=True, slots=True)
class _InHand:
    parcel: Parcel

    async def take_over(self) -> Parcel:
        return self.parcel

    def withdraw(self) -> None:
        """No-op: the worker's process keeps no copy."""


# Parts of offered groups in this process, by the name of the offer, until `withdraw`.
_OFFERED: dict[str, tuple[GroupColumns, ...]] = {}


@dataclass(frozen=True, slots=True)
class _Held:
    """Offer whose parts, `parts` in number, are stored under `name` in the process of `holder`."""

    holder: Any
    name: str
    parcel: Parcel
    parts: int

    async def take_over(self) -> Parcel:
        call = self.holder.__ray_call__.options(num_returns=1 + self.parts)
        done, *parts = call.remote(_hand_over, self.name)
        await done  # a small object; once it is here, the parts are stored
        return replace(self.parcel, parts=tuple(parts))

    def withdraw(self) -> None:
        del _OFFERED[self.name]


def _hand_over(_: Any, name: str) -> tuple[Any, ...]:
    """Acknowledgement and the parts, each as one object. Runs in the worker's process."""
    return None, *_OFFERED[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsAnswer:
    """The queue's answer to a request for trajectories.

    Attributes:
        parts: references, pickles or parts, by place. Nested in dicts, so that Ray does not fetch
            them.
        members: requested trajectories of each part, by their index within the part.
        gone: ids of groups that the queue no longer holds.
    """

    parts: Mapping[PartPlace, Any]
    members: Mapping[PartPlace, Mapping[int, TrajectoryId]]
    gone: Sequence[int]


def parts_of(parcels: Mapping[int, Parcel], places: Sequence[TrajectoryId]) -> PartsAnswer:
    """Parts that contain the trajectories at `places`."""
    members: dict[PartPlace, dict[int, TrajectoryId]] = {}
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
    """A part that was opened in this process.

    Attributes:
        held: the queue's value for the part, which identifies it.
        trajectories: its trajectories.
    """

    held: Any
    trajectories: Sequence[Trajectory]


class OpenParts(NamedTuple):
    """Opened parts by place, and the reason for each group with a lost part, by group id."""

    parts: Mapping[PartPlace, OpenPart]
    lost: Mapping[int, str]


def open_parts(
    parts: Mapping[PartPlace, Any], before: Mapping[PartPlace, OpenPart], timeout_s: float
) -> OpenParts:
    """Open parts in this process.

    Args:
        before: parts that were opened earlier; those that are still the same are reused.
        timeout_s: longest wait for one fetch, seconds.

    Raises:
        GetTimeoutError: a node did not answer in time.
    """
    opened = {
        place: before[place]
        for place, part in parts.items()
        if place in before and _is_same(before[place].held, part)
    }
    others = {place: part for place, part in parts.items() if place not in opened}
    references = [part for part in others.values() if calls.in_store(part)]
    if references:
        calls.wait(references, num_returns=len(references), timeout=timeout_s)  # concurrently
    lost = {}
    for place, part in others.items():
        try:
            opened[place] = OpenPart(part, _fetched(part, timeout_s).trajectories())
        except (errors.ObjectLostError, errors.RayActorError) as error:
            lost[place.group_id] = str(error).split("\n", 1)[0]
    return OpenParts(opened, lost)


def _is_same(held: Any, part: Any) -> bool:
    """True if both are the same object; a group that was sampled or scored again has new ones."""
    known = isinstance(part, bytes) or calls.in_store(part)
    return held is part or (known and bool(held == part))


def fetched(answer: PartsAnswer, opened: OpenParts) -> Fetched:
    """The requested trajectories, and the reason for each group that is lost."""
    found = {
        asked: opened.parts[place].trajectories[n]
        for place, members in answer.members.items()
        if place in opened.parts
        for n, asked in members.items()
    }
    gone = dict.fromkeys(answer.gone, "the queue holds it no longer")
    return Fetched(found, {**gone, **opened.lost})


def opened_whole(parcel: Parcel, timeout_s: float) -> TrajectoryGroup | None:
    """Fetch and unpack a whole group; None if a part is lost or its node does not answer."""
    meta = parcel.meta
    answer = parts_of({meta.group_id: parcel}, meta.places)
    try:
        found, lost = fetched(answer, open_parts(answer.parts, {}, timeout_s))
    except errors.GetTimeoutError:
        return None
    return None if lost else meta.group([found[place] for place in meta.places])


def _fetched(part: Any, timeout_s: float) -> GroupColumns:
    if calls.in_store(part):
        return calls.get(part, timeout_s)
    return pickle.loads(part) if isinstance(part, bytes) else part
