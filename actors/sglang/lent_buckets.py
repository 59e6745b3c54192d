"""The buckets of one push as they come to a server's owner: given by calls, taken by the load.

    learner    load_bucket(push, i, handles) ----> give: waits until the bucket is loaded
    load       next(i) <-------------------------- the handles; loaded() is the learner's answer
    learner    end_push(push, why)  -------------> close: who waits is told why

A load that waits is closed by whatever comes after it, so that a learner that is gone holds up
nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from distill.errors import EngineError
from distill.weights.lending import LentBucket


class _Given(NamedTuple):
    number: int
    handles: Sequence[LentBucket]
    loaded: asyncio.Future[None]


class LentBuckets:
    """One push's; made by whichever of load and first bucket comes first."""

    def __init__(self, push: str) -> None:
        self.push = push
        self._queue: asyncio.Queue[_Given] = asyncio.Queue()
        self._under_way: _Given | None = None
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def give(self, number: int, handles: Sequence[LentBucket]) -> None:
        """Returns when the bucket has been loaded, and nobody reads it any more.

        Raises:
            EngineError: it was not, and will not be.
        """
        given = _Given(number, handles, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(given)
        await asyncio.wait([given.loaded, self._closed], return_when=asyncio.FIRST_COMPLETED)
        if not given.loaded.done():
            raise EngineError(self._closed.result())

    async def next(self, number: int, timeout_s: float, ranks: int) -> Sequence[LentBucket]:
        """Handles of the bucket of this number, one for each of the server's ranks.

        Raises:
            EngineError: it does not come, or for another number of ranks.
        """
        coming = asyncio.ensure_future(self._queue.get())
        await asyncio.wait(
            [coming, self._closed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self._closed.done() or not coming.done():
            coming.cancel()
            why = self._closed.result() if self._closed.done() else f"none in {timeout_s:.0f} s"
            raise EngineError(f"bucket {number} did not come: {why}")
        self._under_way = coming.result()
        if self._under_way.number != number:
            raise EngineError(f"bucket {self._under_way.number} came in place of {number}")
        if len(handles := self._under_way.handles) != ranks:
            raise EngineError(f"{len(handles)} handles came for {ranks} ranks")
        return handles

    def loaded(self) -> None:
        """Called when the bucket that came last has been loaded."""
        assert self._under_way is not None
        self._under_way.loaded.set_result(None)

    def close(self, why: str) -> None:
        """Ends the push for both sides, unless it has ended."""
        if not self._closed.done():
            self._closed.set_result(why)


class Lendings:
    """The push that is under way, or was last; no other can come back."""

    def __init__(self) -> None:
        self._buckets: LentBuckets | None = None
        self._over: deque[str] = deque(maxlen=16)  # calls that are late name no older ones

    def of(self, push: str) -> LentBuckets:
        """That push, which may be about to begin, or be closed.

        Raises:
            EngineError: another has begun since.
        """
        if push in self._over:
            raise EngineError("this push is over: another has begun")
        if self._buckets is None or self._buckets.push != push:
            if self._buckets is not None:
                self._buckets.close("another push has begun")
                self._over.append(self._buckets.push)
            self._buckets = LentBuckets(push)
        return self._buckets

    def end(self, why: str, push: str | None = None) -> None:
        """Closes the push that is under way, if it is this one (None: whichever)."""
        if self._buckets is not None and push in (None, self._buckets.push):
            self._buckets.close(why)
