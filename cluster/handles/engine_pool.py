"""Pool of engine actors that implements `ScoringModel`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from cluster.handles import errors
from cluster.handles.calls import reason_of
from cluster.handles.mailbox import MailboxEnd, mailbox_of
from cluster.handles.record_list import RecordList
from distill.engine import (
    EngineInfo,
    GenerateRequest,
    Sample,
    Score,
    ScoreRequest,
)
from distill.errors import EngineError, EngineLost
from distill.rewards.model_reward import RewardInput

logger = logging.getLogger(__name__)

# Seconds without requests for an engine that failed, unless a new engine replaces it.
_REST_S = 5.0
_POLL_S = 0.1
# Deadline in seconds for an engine's queue length. If the engine is late, the pool's own count is
# used.
QUEUE_QUERY_S = 0.2
# The system's generator, so that workers do not choose alike, whatever seeds an environment sets.
_RANDOM = random.SystemRandom()
# A session leaves its engine if the load there is more than _SPILL_FACTOR times that of another
# engine plus _SPILL samples. Its prefix is then computed again.
_SPILL, _SPILL_FACTOR = 16, 2
# Maximum number of sessions that a pool remembers; the oldest are forgotten first.
_MOST_SESSIONS = 4096
# Tokens after which no more callers are added to a scoring call.
_MOST_TOKENS = 1 << 16
# Number of attempts after wrong answers. Lost engines are limited by the pool's patience instead.
_TRIES = 3


@dataclass(slots=True, eq=False)
class _ScoreCall:
    """Requests of one caller for a scoring call."""

    requests: list[ScoreRequest]
    answer: asyncio.Future[list[Score]]


@dataclass(slots=True, eq=False)
class _PooledEngine:
    """An engine of a pool, with its load and its state after failures.

    Scoring requests of several callers in one iteration of the event loop are one call.

    Attributes:
        replica: number of the engine's process lifetime, for `Score.scored_by` and
            `Sample.sampled_by`; None: not recorded.
        mailbox: sends `generate` requests; None: each request is a call.
        load: number of samples in progress that this pool has sent.
        sent: number of samples that this pool has sent so far.
        requests: number of requests in progress that this pool has sent.
        excluded_until: time (`time.monotonic`) until which the engine gets no requests.
        asked: requests for the next scoring calls.
        extra_calls: requests that are added to the next scoring call, but do not cause one.
        pending_query: pending call for the length of the engine's queue.
    """

    handle: Any
    replica: int | None = None
    mailbox: MailboxEnd | None = None
    load: int = 0
    sent: int = 0
    requests: int = 0
    excluded_until: float = 0.0
    asked: list[_ScoreCall] = field(default_factory=list)
    extra_calls: list[_ScoreCall] = field(default_factory=list)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    pending_query: asyncio.Task[tuple[int | None, int]] | None = None

    async def queue_state(self) -> tuple[int | None, int]:
        """Length of the engine's queue, and the value of `sent` when it was requested.

        Concurrent callers share one call. The length is None if the engine is late or dead.
        """
        if self.pending_query is None or self.pending_query.done():
            self.pending_query = asyncio.create_task(self._query_queue())
        return await asyncio.shield(self.pending_query)

    async def _query_queue(self) -> tuple[int | None, int]:
        sent = self.sent
        try:
            async with asyncio.timeout(QUEUE_QUERY_S):
                return await self.handle.queue_length.remote(), sent
        except (TimeoutError, errors.RayError):
            return None, sent

    async def ask(self, method: str, *arguments: Any) -> Any:
        match method:
            case "generate":
                return await self._generate(*arguments)
            case "score":
                return await self._score(*arguments)
            case _:
                return await getattr(self.handle, method).remote(*arguments)

    async def _generate(self, request: GenerateRequest) -> list[Sample]:
        if self.mailbox is None:
            samples = await self.handle.generate.remote(request)
        else:
            samples = await self.mailbox.generate(request)
        if self.replica is None:
            return samples
        return [replace(sample, sampled_by=self.replica) for sample in samples]

    async def _score(self, requests: list[ScoreRequest]) -> list[Score]:
        loop = asyncio.get_running_loop()
        asked = _ScoreCall(requests, loop.create_future())
        self.asked.append(asked)
        loop.call_soon(self._call)  # after other callers in this iteration of the event loop
        scores = await asked.answer
        if self.replica is None:
            return scores
        return [replace(score, scored_by=self.replica) for score in scores]

    def _call(self) -> None:
        """Start a scoring call for the waiting requests, up to the limit of tokens."""
        together, tokens = [], 0
        while self.asked and tokens <= _MOST_TOKENS:
            together.append(self.asked.pop(0))
            tokens += sum(len(request.tokens_T) for request in together[-1].requests)
        if together:  # not already sent by an earlier call
            extra_calls, self.extra_calls = self.extra_calls, []
            call = asyncio.get_running_loop().create_task(self._answer(together, extra_calls))
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)

    async def _answer(
        self, together: Sequence[_ScoreCall], extra_calls: Sequence[_ScoreCall]
    ) -> None:
        all_calls = [*together, *extra_calls]
        try:
            requests = RecordList(r for each in all_calls for r in each.requests)
            scores = await self.handle.score.remote(requests)
        except Exception as error:
            _fail(extra_calls, EngineError(f"the batch that it was sent with failed: {error}"))
            if len(together) == 1 or _is_loss(error):
                _fail(together, error)
            else:  # the requests of one caller may have caused the error
                apart = [self._answer([each], []) for each in together if not each.answer.done()]
                await asyncio.gather(*apart)
            return
        end = 0
        for each in all_calls:
            first, end = end, end + len(each.requests)
            if not each.answer.done():  # cancelled
                each.answer.set_result(scores[first:end])

    @contextmanager
    def carrying(self, weight: int) -> Iterator[None]:
        self.load += weight
        self.sent += weight
        self.requests += 1
        try:
            yield
        finally:
            self.load -= weight
            self.requests -= 1


class EnginePool:
    """A `ScoringModel` made of several identical engines.

    Each request goes to the less busy of two random engines, by their own queues, which include
    requests of other copies of this pool. The busiest of n engines is then O(log log n) above the
    mean (Mitzenmacher 2001), and the order of engines has no effect. Later requests of a session
    (the turns of a group's episodes) go to the engine of the first request, where the prefix is
    cached, unless that engine is far busier than another.

    If an engine is lost, its requests are sent to another engine, and wait if there is none. So
    engines may die, restart and join while requests are in progress. Pools can be pickled.
    """

    def __init__(self, name: str, members: Mapping[str, Any], patience_s: float = 0) -> None:
        """
        Args:
            name: name of the pool in messages, such as `policy`.
            patience_s: longest time in seconds that a request waits for an engine that answers; 0:
                try each engine once.
        """
        self._name, self._patience_s = name, patience_s
        self._members: dict[str, _PooledEngine] = {}
        self._removed: list[tuple[str, _PooledEngine]] = []  # removed engines with pending requests
        self.answers = 0  # number of answers so far
        # Session -> its engine, the latest last.
        self._session_engines: dict[str, _PooledEngine] = {}
        self.update(members)

    def update(
        self, members: Mapping[str, Any], replicas: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Replace the engines of the pool. Requests in progress stay at their engines.

        Args:
            replicas: numbers of the engines' process lifetimes, for `Score.scored_by`, by name.
        """
        old = self._members
        self._members = {
            name: old[name]
            if name in old
            and old[name].handle == handle
            and old[name].replica == replicas.get(name)
            else _PooledEngine(handle, replicas.get(name), mailbox_of(handle))
            for name, handle in members.items()
        }
        kept = self._members.values()
        self._removed = [
            m for m in (*self._removed, *old.items()) if m[1].requests and m[1] not in kept
        ]

    def each(self) -> dict[str, EnginePool]:
        """A pool for each engine, for calls that every engine must answer (the handshake)."""
        return {
            name: EnginePool(name, {name: member.handle}) for name, member in self._members.items()
        }

    @property
    def in_progress(self) -> dict[str, int]:
        """Number of requests in progress, by engine; engines that were removed are included.

        Engines without requests are left out: a worker uses only a few of a thousand engines, and
        every worker reports this mapping to the driver.
        """
        counts: dict[str, int] = {}
        for name, member in (*self._members.items(), *self._removed):
            if member.requests:
                counts[name] = counts.get(name, 0) + member.requests
        return counts

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return await self._send("generate", request.num_samples, request, session=request.session)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("score", len(requests), list(requests))

    async def score_with_next_batch(
        self, name: str, requests: Sequence[ScoreRequest], patience_s: float
    ) -> tuple[list[Score], bool]:
        """Score requests by one engine, together with the next batch that this pool sends to it.

        Returns:
            The scores, and True if there was such a batch within `patience_s` seconds; otherwise
            the requests were sent alone.

        Raises:
            EngineLost: the engine is not in the pool.
            EngineError: the engine died, or could not score the batch.
        """
        if (member := self._members.get(name)) is None:
            raise EngineLost(f"{name} is not among the {self._name} engines here")
        extra = _ScoreCall(list(requests), asyncio.get_running_loop().create_future())
        member.extra_calls.append(extra)
        await asyncio.wait([extra.answer], timeout=patience_s)
        if extra not in member.extra_calls:
            return await extra.answer, True
        member.extra_calls.remove(extra)
        return await member.handle.score.remote(extra.requests), False

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("decode_score", len(requests), list(requests))

    async def rewards(self, conversations: Sequence[RewardInput]) -> list[float]:
        """See `distill.rewards.model_reward.RewardScorer`."""
        return await self._send("rewards", len(conversations), list(conversations))

    async def _choose(self, able: Sequence[_PooledEngine], session: str) -> _PooledEngine:
        home = self._session_engines.get(session)
        others = [member for member in able if member is not home]
        if home is None or home not in able:
            pair = _RANDOM.sample(others, 2) if len(others) > 1 else others
            loads = await _loads(pair) if len(pair) > 1 else [0]
            chosen = pair[loads.index(min(loads))]
        elif others:
            other = _RANDOM.choice(others)
            at_home, elsewhere = await _loads([home, other])
            chosen = home if at_home <= _SPILL_FACTOR * elsewhere + _SPILL else other
        else:
            chosen = home
        if session:
            self._session_engines.pop(session, None)
            self._session_engines[session] = chosen  # moves the session to the end
            while len(self._session_engines) > _MOST_SESSIONS:
                del self._session_engines[next(iter(self._session_engines))]
        return chosen

    async def info(self) -> EngineInfo:
        return await self._send("info", 0)

    async def _send(self, method: str, weight: int, *arguments: Any, session: str = "") -> Any:
        deadline = time.monotonic() + self._patience_s
        tried: set[int] = set()
        wrong = 0
        error: Exception | None = None
        while True:
            member = await self._pick(tried, deadline, error, session)
            try:
                with member.carrying(weight):
                    answer = await member.ask(method, *arguments)
                self.answers += 1
                return answer
            except (errors.RayError, EngineError) as raised:
                error = raised
                if not _is_loss(raised):
                    wrong += 1
                    last = wrong == _TRIES or not self._patience_s
                    if last or not isinstance(raised, EngineError):
                        raise
                logger.warning("%s: %s again (%s)", self._name, method, reason_of(raised))
                tried.add(id(member))
                if not self._patience_s and len(tried) == len(self._members):
                    raise
                if _is_loss(raised) or len(self._members) > 1:
                    member.excluded_until = time.monotonic() + _REST_S

    async def _pick(
        self, tried: set[int], deadline: float, error: Exception | None, session: str
    ) -> _PooledEngine:
        """Choose an engine that has not failed recently: the session's, or the less busy of two."""
        while True:
            now = time.monotonic()
            # Without patience every engine is tried once, even if it has failed recently.
            able = [
                member
                for member in self._members.values()
                if (member.excluded_until <= now if self._patience_s else id(member) not in tried)
            ]
            if able:
                return await self._choose(able, session)
            if now >= deadline:
                last = "" if error is None else f"; the last error: {reason_of(error)}"
                raise EngineLost(
                    f"no {self._name} engine answered within {self._patience_s:.0f} s "
                    f"({len(self._members)} in the pool){last}"
                ) from error
            await asyncio.sleep(_POLL_S)


def _fail(all_calls: Sequence[_ScoreCall], error: Exception) -> None:
    for each in all_calls:
        if not each.answer.done():  # cancelled
            each.answer.set_exception(error)


async def _loads(members: Sequence[_PooledEngine]) -> list[int]:
    """Number of samples at each engine, by its own queue; by the pool's counts if one is silent.

    Samples that were sent while the queue length was requested are added: when slots are freed,
    many requests are made at the same time, and none has arrived at the first query.
    """
    states = await asyncio.gather(*(member.queue_state() for member in members))
    if any(length is None for length, _ in states):
        return [member.load for member in members]
    return [
        (length or 0) + member.sent - sent
        for (length, sent), member in zip(states, members, strict=True)
    ]


def _is_loss(error: Exception) -> bool:
    """True if the engine is lost; False if it answered with an error."""
    return isinstance(error, EngineLost) or not isinstance(error, errors.RayTaskError | EngineError)
