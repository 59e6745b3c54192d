"""Columns of delivered groups, from their rollout worker to the learner workers that train on them.

    worker    `offered`       keeps the parts of a large group until `deliver` has returned
    queue     `claim_all`     calls the worker for the parts, owns them, and never opens them
    learner   `open_parts`    fetches the parts with the trajectories that it trains
    queue     `whole_columns` fetches all parts, in a thread, to keep the group on disk; `restored`
                              creates a delivery from a group that was read from disk

A Ray object is lost with the process that owns it, which is the caller of the task that returned
it. The queue therefore calls the worker, so that the worker may die or be drained after its groups
were delivered. The parts stay in the object store of the worker's node, and are lost with that node
or with the queue. Ray would copy objects below 100 kB to the owner, so a small group is sent in the
call, as bytes. Within one process, parts are plain objects.

If a group was scored by hidden states, its parts contain references to the hidden states, one for
each segment. The teacher's actor owns these objects, and they stay in the object store of its node
until the parts are dropped. Each worker of the learner fetches the hidden states of its own rows.
If the actor or its node is lost before, the learner reports the group as lost, and the group is
scored again.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from cluster.handles.node import is_connected
from distill.columns import GroupColumns, joined, pack
from distill.errors import first_line
from distill.objective.sums import meta_of
from distill.records import Lease, TrajectoryGroupMeta, TrajectoryId
from distill.types import Segment, Trajectory, TrajectoryGroup

# Minimum bytes of a part's arrays, above Ray's limit of 100 kB for copies. A smaller group is one
# part.
PART_BYTES = 110_000
# Maximum bytes of one argument of a call: Ray puts arguments above 100 kB into the object store.
_ARGUMENT_BYTES = 90_000
# Estimated bytes of the metadata of one trajectory.
_META_BYTES = 1_000

# Trajectories of opened parts by group id and index of the part, each with the queue's value for
# the part, which identifies it.
Opened: TypeAlias = Mapping[tuple[int, int], tuple[Any, Sequence[Trajectory]]]


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Columns of a group as the queue stores them.

    Attributes:
        firsts: index of the first trajectory of each part, within the group.
        parts: for each part, its reference, its pickle, or its columns; None if the part was not
            requested.
        nbytes: size of the arrays of all parts.
    """

    firsts: tuple[int, ...]
    parts: tuple[Any, ...]
    nbytes: int

    def part_of(self, member: int) -> int:
        """Index of the part that contains a trajectory."""
        return bisect_right(self.firsts, member) - 1

    def only(self, members: Sequence[int]) -> Payload:
        """The payload without the parts that contain none of these trajectories."""
        if len(self.parts) == 1:
            return self
        asked = set(map(self.part_of, members))
        return replace(
            self, parts=tuple(p if n in asked else None for n, p in enumerate(self.parts))
        )


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A group that a worker delivers and the queue stores.

    Attributes:
        payload: columns of the group; without parts while `holder` keeps them.
        holder: handle of the worker's actor, which the queue calls for the parts; None: no call is
            needed.
        name: identifier of the parts in the holder's process.
    """

    lease: Lease
    meta: TrajectoryGroupMeta
    payload: Payload
    holder: Any = None
    name: str = ""

    @property
    def argument_bytes(self) -> int:
        """Approximate size in a call."""
        pickles = sum(len(part) for part in self.payload.parts if isinstance(part, bytes))
        return pickles + _META_BYTES * len(self.meta.rewards_G)


# Parts of offered groups in this process, by `Delivery.name`, until `withdraw`.
_OFFERED: dict[str, Sequence[GroupColumns]] = {}


def offered(
    queue: Any, lease: Lease, meta: TrajectoryGroupMeta, parts: Sequence[GroupColumns]
) -> Delivery:
    """Create a delivery of a group to a queue's actor. Call `withdraw` when it has arrived."""
    nbytes = sum(part.nbytes for part in parts)

    def delivery(stored: Sequence[Any], **claim: Any) -> Delivery:
        payload = Payload(firsts=_firsts(parts), parts=tuple(stored), nbytes=nbytes)
        return Delivery(lease=lease, meta=meta, payload=payload, **claim)

    if isinstance(queue, LocalActor):
        return delivery(parts)
    members = len(meta.rewards_G)
    # Ray counts references inside its own objects, but not inside bytes.
    refers = any(map(calls.in_store, _states_of(parts)))
    if not refers and nbytes + _META_BYTES * members <= _ARGUMENT_BYTES:
        return delivery([pickle.dumps(part, protocol=5) for part in parts])
    holder = calls.this_actor()
    if holder is None:  # no actor that the queue could call: the parts end with this process
        return delivery([calls.put(part) for part in parts])
    name = secrets.token_hex(8)
    _OFFERED[name] = parts
    return delivery([None] * len(parts), holder=holder, name=name)


def _states_of(parts: Sequence[GroupColumns]) -> Iterator[Any]:
    return (states for part in parts for states in part.values["teacher_states"])


def restored(lease: Lease, group: TrajectoryGroup) -> Delivery:
    """Create a delivery of a group that was read from disk; this process owns its parts."""
    columns = pack(group.trajectories_G)
    parts = columns.parts(PART_BYTES)
    stored = [calls.put(part) for part in parts] if is_connected() else parts
    payload = Payload(firsts=_firsts(parts), parts=tuple(stored), nbytes=columns.nbytes)
    return Delivery(lease=lease, meta=meta_of(group, columns), payload=payload)


def _firsts(parts: Sequence[GroupColumns]) -> tuple[int, ...]:
    return tuple(accumulate((len(part.segments_G) for part in parts[:-1]), initial=0))


def withdraw(delivery: Delivery) -> None:
    """Release the worker's copy of a group."""
    _OFFERED.pop(delivery.name, None)


def in_arguments(deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """Split deliveries into arguments of a call, each small enough to be sent in the call."""
    batches: list[list[Delivery]] = []
    size = 0
    for delivery in deliveries:
        size += delivery.argument_bytes
        if not batches or size > _ARGUMENT_BYTES:
            batches.append([])
            size = delivery.argument_bytes
        batches[-1].append(delivery)
    return batches


async def claim_all(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return the deliveries with parts that this process owns. Called by the queue."""
    return await asyncio.gather(*map(_claim, deliveries))


async def _claim(delivery: Delivery) -> Delivery:
    if delivery.holder is None:
        return delivery
    returns = 1 + len(delivery.payload.parts)
    call = delivery.holder.__ray_call__.options(num_returns=returns)
    done, *parts = call.remote(_transfer, delivery.name)
    await done  # a small object; once it is here, the parts are stored
    payload = replace(delivery.payload, parts=tuple(parts))
    return replace(delivery, payload=payload, holder=None, name="")


def _transfer(_: Any, name: str) -> tuple[Any, ...]:
    """Acknowledgement and the parts, each as one object. Runs in the worker's process."""
    return None, *_OFFERED[name]


def select_payloads(
    deliveries: Mapping[int, Delivery], places: Sequence[TrajectoryId]
) -> dict[int, Payload]:
    """Payloads with the trajectories at `places`, by group id; without groups not delivered."""
    members: dict[int, list[int]] = {}
    for group_id, member in places:
        if group_id in deliveries:
            members.setdefault(group_id, []).append(member)
    return {i: deliveries[i].payload.only(of_group) for i, of_group in members.items()}


def open_parts(
    payloads: Mapping[int, Payload], before: Opened, timeout_s: float
) -> tuple[Opened, dict[int, str]]:
    """Open parts in this process; also return a reason for each group with a lost part.

    Args:
        before: parts that were opened earlier; unchanged parts are reused.

    Raises:
        GetTimeoutError: a node did not answer in time.
    """
    opened: dict[tuple[int, int], tuple[Any, Sequence[Trajectory]]] = {}
    others: dict[tuple[int, int], Any] = {}
    for group_id, payload in payloads.items():
        for number, part in enumerate(payload.parts):
            at = group_id, number
            if at in before and _is_same(before[at][0], part):
                opened[at] = before[at]
            elif part is not None:
                others[at] = part
    references = [part for part in others.values() if calls.in_store(part)]
    if references:
        calls.wait(references, num_returns=len(references), timeout=timeout_s)  # concurrently
    lost: dict[int, str] = {}
    columns: dict[tuple[int, int], GroupColumns] = {}
    for at, part in others.items():
        try:
            columns[at] = _fetched(part, timeout_s)
        except (errors.ObjectLostError, errors.RayActorError) as error:
            lost[at[0]] = first_line(error)
    states = list(filter(calls.in_store, _states_of(list(columns.values()))))
    calls.wait(states, num_returns=len(states), timeout=timeout_s)
    for at, of_part in columns.items():
        try:
            opened[at] = others[at], _with_states(of_part, timeout_s)
        except (errors.ObjectLostError, errors.RayActorError) as error:
            lost[at[0]] = first_line(error)
    return opened, lost


def _with_states(columns: GroupColumns, timeout_s: float) -> Sequence[Trajectory]:
    """The trajectories, with hidden states in place of references to them."""

    def fetched(segment: Segment) -> Segment:
        if not calls.in_store(segment.teacher_states):
            return segment
        return replace(segment, teacher_states=calls.get(segment.teacher_states, timeout_s))

    trajectories = columns.trajectories()
    if not any(map(calls.in_store, _states_of([columns]))):
        return trajectories
    return [replace(each, segments=tuple(map(fetched, each.segments))) for each in trajectories]


def _is_same(held: Any, part: Any) -> bool:
    """True if the part is unchanged. A group that was sampled or scored again has new parts."""
    known = isinstance(part, bytes) or calls.in_store(part)
    return held is part or (known and bool(held == part))


def found_in(
    opened: Opened, payloads: Mapping[int, Payload], places: Sequence[TrajectoryId]
) -> dict[TrajectoryId, Trajectory]:
    """The trajectories at `places` whose parts are open."""
    found = {}
    for place in places:
        if (payload := payloads.get(place.group_id)) is None:
            continue
        number = payload.part_of(place.member)
        if (part := opened.get((place.group_id, number))) is not None:
            found[place] = part[1][place.member - payload.firsts[number]]
    return found


def whole_columns(delivery: Delivery, timeout_s: float) -> GroupColumns | None:
    """Fetch all parts of a group; None if one is lost or its node does not answer."""
    try:
        return joined([_fetched(part, timeout_s) for part in delivery.payload.parts])
    except (errors.ObjectLostError, errors.RayActorError, errors.GetTimeoutError):
        return None


def opened_whole(delivery: Delivery, timeout_s: float) -> TrajectoryGroup | None:
    """Fetch and unpack a whole group; None if a part is lost or its node does not answer."""
    columns = whole_columns(delivery, timeout_s)
    return None if columns is None else delivery.meta.group(columns.trajectories())


def _fetched(part: Any, timeout_s: float) -> GroupColumns:
    if calls.in_store(part):
        return calls.get(part, timeout_s)
    return pickle.loads(part) if isinstance(part, bytes) else part
