"""What crosses the queue in place of a group: references to its parts, which others hold.

    worker    offers packed groups       holds each until `deliver` has returned
    queue     takes them over            owns them, and never looks into them
    learner   opens them                 the columns at once; the teacher's likeliest tokens where a
                                         row is trained that needs them, on whichever worker

On Ray an object is lost with the process that owns it, and that is the one which called for it. So
it is the queue that calls: a worker may die, or be drained, once its groups were delivered. They
stay in the object store of the worker's node, and are lost with that, or with the queue. (What is
below 100 kB Ray would hand to the owner itself: a group that is travels in the call, as bytes.) In
one process parts are what they are.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.queue.codec import Packed, Tops, unpack
from distill.types import LikeliestTokens, TrajectoryGroup

# Of a group's arrays: with what describes them it stays below Ray's 100 kB, above which an argument
# of a call takes the way by the object store.
_IN_CALL_BYTES = 90_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A group as the queue holds it. A part is a reference to it, its pickle, or the part itself.

    Attributes:
        columns: its `Columns`.
        tops: the `Tops` of each trajectory; none where the teacher named none.
    """

    columns: Any
    tops: tuple[Any, ...]


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
        return _InHand(Parcel(columns=group.columns, tops=group.tops))
    if group.nbytes <= _IN_CALL_BYTES:
        return _InHand(_each_part(group, partial(pickle.dumps, protocol=5)))
    try:
        holder = ray.get_runtime_context().current_actor
    except RuntimeError:  # no actor, which nobody could call: its groups end with it
        return _InHand(_each_part(group, ray.put))
    name = secrets.token_hex(8)
    _OFFERED[name] = group
    return _Held(holder, name, len(group.tops))


def _each_part(group: Packed, make: Callable[[Any], Any]) -> Parcel:
    return Parcel(columns=make(group.columns), tops=tuple(map(make, group.tops)))


@dataclass(frozen=True, slots=True)
class _InHand:
    parcel: Parcel

    async def take_over(self) -> Parcel:
        return self.parcel

    def withdraw(self) -> None:
        """There is nothing to let go."""


# Of this process, until the queue has them.
_OFFERED: dict[str, Packed] = {}


@dataclass(frozen=True, slots=True)
class _Held:
    """In the process of the actor `holder`, by `name`; with so many `tops`."""

    holder: Any
    name: str
    tops: int

    async def take_over(self) -> Parcel:
        call = self.holder.__ray_call__.options(num_returns=2 + self.tops)
        done, columns, *tops = call.remote(_hand_over, self.name)
        await done  # a small one: the others are stored by now
        return Parcel(columns=columns, tops=tuple(tops))

    def withdraw(self) -> None:
        del _OFFERED[self.name]


def _hand_over(_: Any, name: str) -> tuple[Any, ...]:
    """Runs in the worker's process: an acknowledgement, and the parts, each an object."""
    group = _OFFERED[name]
    return None, group.columns, *group.tops


def opened(
    parcels: Mapping[int, Parcel], timeout_s: float
) -> tuple[list[TrajectoryGroup], dict[int, str]]:
    """The groups that are there, in order, and of those that are not why, by id.

    Raises:
        GetTimeoutError: some node does not answer.
    """
    columns = (parcel.columns for parcel in parcels.values())
    if references := [part for part in columns if isinstance(part, ray.ObjectRef)]:
        ray.wait(references, num_returns=len(references), timeout=timeout_s)  # all at a time
    groups, lost = [], {}
    for group_id, parcel in parcels.items():
        try:
            columns = _fetched(parcel.columns, timeout_s)
        except (ObjectLostError, RayActorError) as error:
            lost[group_id] = str(error).split("\n", 1)[0]
            continue
        tops = [
            TopElsewhere(Place(group_id, member), segment, shape, timeout_s, parcel.tops[member])
            for member, segment, shape in columns.tops
        ]
        groups.append(unpack(columns, tops))
    return groups, lost


def opened_whole(group_id: int, parcel: Parcel, timeout_s: float) -> TrajectoryGroup | None:
    """A group with its likeliest tokens; None if its node is gone."""
    try:
        groups, _ = opened({group_id: parcel}, timeout_s)
        for group in groups:
            for segment in group.segments():
                if segment.teacher_top is not None:
                    _ = segment.teacher_top.ids_NK  # fetched here, once
    except (GetTimeoutError, ObjectLostError, RayActorError):
        return None
    return groups[0] if groups else None


def _fetched(part: Any, timeout_s: float) -> Any:
    if isinstance(part, ray.ObjectRef):
        return calls.get(part, timeout_s)
    return pickle.loads(part) if isinstance(part, bytes) else part


class Place(NamedTuple):
    """Of a trajectory in the queue."""

    group_id: int
    member: int


class TopSource(Protocol):
    """Where a process that was sent rows finds the likeliest tokens that they need."""

    def tops(self, place: Place) -> Any:
        """Reference to a trajectory's `Tops`."""
        ...


class TopElsewhere:
    """A segment's likeliest tokens, fetched when they are first asked for.

    Stands where a `TopLogprobs` would. Pickled it is its place in the queue: the process that gets
    it asks there (`fetch_from`).
    """

    def __init__(
        self,
        place: Place,
        segment: int,
        shape: tuple[int, int],
        timeout_s: float,
        source: Any = None,
    ) -> None:
        """
        Args:
            segment: its number within the trajectory.
            shape: (positions, K).
            timeout_s: longest that the node which has them may take.
            source: the trajectory's `Tops`, or a reference to them; None: ask the queue.
        """
        self._place, self._segment, self._shape = place, segment, shape
        self._timeout_s, self._source = timeout_s, source
        self._found: LikeliestTokens | None = None

    def __reduce__(self) -> Any:
        return TopElsewhere, (self._place, self._segment, self._shape, self._timeout_s)

    def __len__(self) -> int:
        return self._shape[0]

    @property
    def k(self) -> int:
        return self._shape[1]

    @property
    def ids_NK(self) -> npt.NDArray[np.int32]:
        return self._fetched().ids_NK

    @property
    def logprobs_NK(self) -> npt.NDArray[np.float32]:
        return self._fetched().logprobs_NK

    def _fetched(self) -> LikeliestTokens:
        if self._found is None:
            source = self._source
            if source is None:
                assert _SOURCES, "nobody has said where this process finds what is in the queue"
                source = _SOURCES[-1].tops(self._place)
            tops: Tops = _fetched(source, self._timeout_s)
            found = tops[self._segment]
            assert found is not None and found.ids_NK.shape == self._shape
            self._found = found
        return self._found


_SOURCES: list[TopSource] = []


def fetch_from(source: TopSource) -> None:
    """Says where this process finds the likeliest tokens of rows that it is sent."""
    _SOURCES[:] = [source]
