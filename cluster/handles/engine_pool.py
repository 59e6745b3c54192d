"""Engines behind Ray, as the `ScoringModel` that actors expect."""

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
from cluster.handles.failures import reason_of
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

# An engine that failed is left alone for so long, unless there is a new one in its place, seconds.
_REST_S = 5.0
_POLL_S = 0.1
# An engine that does not tell its queue within this is judged by what was sent there from here.
TELL_S = 0.2
# Of the system's: workers must not choose alike, whatever seeds an environment sets.
_RANDOM = random.SystemRandom()
# A session leaves its engine once that is so much busier than another: its samples, and how many
# times as many. Its prefix is computed again elsewhere.
_SPILL, _SPILL_FACTOR = 16, 2
# Sessions that a pool remembers; the oldest are forgotten.
_MOST_SESSIONS = 4096
# Callers go in one call up to so many tokens to score.
_MOST_TOKENS = 1 << 16
# Answers that are wrong (not those that never come) are asked for so many times.
_TRIES = 3


@dataclass(slots=True, eq=False)
class _ScoreCall:
    """Requests that go with the next scoring of their engine, and whoever waits for them."""

    requests: list[ScoreRequest]
    answer: asyncio.Future[list[Score]]


@dataclass(slots=True, eq=False)
class _PooledEngine:
    """An engine of a pool: what is under way there, and until when it is left alone.

    Scoring that several callers ask for in one turn of the event loop is one call of the engine.

    Attributes:
        life: its number, for `Score.scored_by` and `Sample.sampled_by`; None: nobody counts.
        load: samples under way, as far as they were sent from here; `sent`: since the beginning.
        requests: the same in requests.
        mailbox: carries its `generate` requests; None: each is a call.
        asked: what the next calls are made for; `riders` go with the first of them.
        telling: a call for the length of its queue.
    """

    handle: Any
    life: int | None = None
    mailbox: MailboxEnd | None = None
    load: int = 0
    sent: int = 0
    requests: int = 0
    rests_until: float = 0.0
    asked: list[_ScoreCall] = field(default_factory=list)
    riders: list[_ScoreCall] = field(default_factory=list)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    telling: asyncio.Task[tuple[int | None, int]] | None = None

    async def tell(self) -> tuple[int | None, int]:
        """Length of its queue, and `sent` when it was asked; those who ask meanwhile share a call.

        The length is None if the engine is late or dead, which a request itself will find out.
        """
        if self.telling is None or self.telling.done():
            self.telling = asyncio.create_task(self._tell())
        return await asyncio.shield(self.telling)

    async def _tell(self) -> tuple[int | None, int]:
        sent = self.sent
        try:
            async with asyncio.timeout(TELL_S):
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
        if self.life is None:
            return samples
        return [replace(sample, sampled_by=self.life) for sample in samples]

    async def _score(self, requests: list[ScoreRequest]) -> list[Score]:
        loop = asyncio.get_running_loop()
        asked = _ScoreCall(requests, loop.create_future())
        self.asked.append(asked)
        loop.call_soon(self._call)  # after others of this turn have asked
        scores = await asked.answer
        if self.life is None:
            return scores
        return [replace(score, scored_by=self.life) for score in scores]

    def _call(self) -> None:
        """Begins a call for those that have asked, or for the first of them if they are many."""
        together, tokens = [], 0
        while self.asked and tokens <= _MOST_TOKENS:
            together.append(self.asked.pop(0))
            tokens += sum(len(request.tokens_T) for request in together[-1].requests)
        if together:  # they have not gone with an earlier one
            riders, self.riders = self.riders, []
            call = asyncio.get_running_loop().create_task(self._answer(together, riders))
            self.calls.add(call)
            call.add_done_callback(self.calls.discard)

    async def _answer(self, together: Sequence[_ScoreCall], riders: Sequence[_ScoreCall]) -> None:
        """Gives all of them their scores, or the error."""
        everyone = [*together, *riders]
        try:
            requests = RecordList(r for each in everyone for r in each.requests)
            scores = await self.handle.score.remote(requests)
        except Exception as error:
            _fail(riders, EngineError(f"what it went along with failed: {error}"))
            if len(together) == 1 or _is_loss(error):
                _fail(together, error)
            else:  # one of them may be at fault
                apart = [self._answer([each], []) for each in together if not each.answer.done()]
                await asyncio.gather(*apart)
            return
        end = 0
        for each in everyone:
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
    """One `ScoringModel` made of several identical ones.

    Each request goes to the better of two random ones by their own queues, which hold what other
    copies of this pool sent, too: the busiest of n is then O(log log n) above the mean
    (Mitzenmacher 2001), and no order of engines favours the first. Later requests of a session (the
    turns of a group's episodes) go where its first one went, for there its prefix is cached, unless
    that engine is far busier than another.

    A request whose engine is lost goes to another, and waits for one where there is none; so
    engines may die, come back and join while requests are under way. Pickles.
    """

    def __init__(self, name: str, members: Mapping[str, Any], patience_s: float = 0) -> None:
        """
        Args:
            name: of the pool in messages, `policy` say.
            members: Ray actor handles of plain engine classes, by the name to call each.
            patience_s: longest a request waits for an engine that answers; 0 tries each once.
        """
        self._name, self._patience_s = name, patience_s
        self._members: dict[str, _PooledEngine] = {}
        self._left: list[tuple[str, _PooledEngine]] = []  # with requests that were under way
        self.answers = 0  # so many there have been
        self._homes: dict[str, _PooledEngine] = {}  # of sessions, the latest last
        self.update(members)

    def update(
        self, members: Mapping[str, Any], lives: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Replaces the engines of the pool; requests under way stay where they are.

        Args:
            lives: numbers of their lives, for `Score.scored_by`, of those that have one.
        """
        old = self._members
        self._members = {
            name: old[name]
            if name in old and old[name].handle == handle and old[name].life == lives.get(name)
            else _PooledEngine(handle, lives.get(name), mailbox_of(handle))
            for name, handle in members.items()
        }
        kept = self._members.values()
        self._left = [m for m in (*self._left, *old.items()) if m[1].requests and m[1] not in kept]

    def each(self) -> dict[str, EnginePool]:
        """Every engine by itself, for what must not be left to one of them (the handshake)."""
        return {
            name: EnginePool(name, {name: member.handle}) for name, member in self._members.items()
        }

    @property
    def under_way(self) -> dict[str, int]:
        """Requests under way, by engine that has any; those at engines that have left, too.

        Of a thousand engines a worker asks a few, and every worker tells the driver of them.
        """
        counts: dict[str, int] = {}
        for name, member in (*self._members.items(), *self._left):
            if member.requests:
                counts[name] = counts.get(name, 0) + member.requests
        return counts

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        return await self._send("generate", request.num_samples, request, session=request.session)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("score", len(requests), list(requests))

    async def ride(
        self, name: str, requests: Sequence[ScoreRequest], patience_s: float
    ) -> tuple[list[Score], bool]:
        """Scores requests by one engine, in the next batch that this pool sends it to score.

        Returns their scores, and whether there was such a batch within `patience_s`; else they went
        alone.

        Raises:
            EngineLost: the engine is not in the pool.
            EngineError: it died, or could not score what the requests went along with.
        """
        if (member := self._members.get(name)) is None:
            raise EngineLost(f"{name} is not among the {self._name} engines here")
        rider = _ScoreCall(list(requests), asyncio.get_running_loop().create_future())
        member.riders.append(rider)
        await asyncio.wait([rider.answer], timeout=patience_s)
        if rider not in member.riders:
            return await rider.answer, True
        member.riders.remove(rider)
        return await member.handle.score.remote(rider.requests), False

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self._send("decode_score", len(requests), list(requests))

    async def rewards(self, conversations: Sequence[RewardInput]) -> list[float]:
        """The scores by a pool of reward models (`distill.rewards.model_reward.RewardScorer`)."""
        return await self._send("rewards", len(conversations), list(conversations))

    async def _choose(self, able: Sequence[_PooledEngine], session: str) -> _PooledEngine:
        home = self._homes.get(session)
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
            self._homes.pop(session, None)
            self._homes[session] = chosen  # the latest last
            while len(self._homes) > _MOST_SESSIONS:
                del self._homes[next(iter(self._homes))]
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
                    member.rests_until = time.monotonic() + _REST_S

    async def _pick(
        self, tried: set[int], deadline: float, error: Exception | None, session: str
    ) -> _PooledEngine:
        """An engine that did not fail lately: the session's, or the less busy one of two.

        Raises:
            EngineLost: there is none until the deadline.
        """
        while True:
            now = time.monotonic()
            # Without patience every engine is asked once, whatever became of it lately.
            able = [
                member
                for member in self._members.values()
                if (member.rests_until <= now if self._patience_s else id(member) not in tried)
            ]
            if able:
                return await self._choose(able, session)
            if now >= deadline:
                last = "" if error is None else f"; the last said: {reason_of(error)}"
                raise EngineLost(
                    f"no {self._name} engine answered within {self._patience_s:.0f} s "
                    f"({len(self._members)} in the pool){last}"
                ) from error
            await asyncio.sleep(_POLL_S)


def _fail(everyone: Sequence[_ScoreCall], error: Exception) -> None:
    for each in everyone:
        if not each.answer.done():  # cancelled
            each.answer.set_exception(error)


async def _loads(members: Sequence[_PooledEngine]) -> list[int]:
    """Samples at each engine, by its own queue; by our count if one of them does not answer.

    What was sent there while it was asked counts, too: many requests are made at the same time,
    when slots are freed, and none of them has arrived when the first asks.
    """
    told = await asyncio.gather(*(member.tell() for member in members))
    if any(length is None for length, _ in told):
        return [member.load for member in members]
    return [
        (length or 0) + member.sent - sent
        for (length, sent), member in zip(told, members, strict=True)
    ]


def _is_loss(error: Exception) -> bool:
    """True if the engine is gone, as opposed to having answered badly."""
    return isinstance(error, EngineLost) or not isinstance(error, errors.RayTaskError | EngineError)
