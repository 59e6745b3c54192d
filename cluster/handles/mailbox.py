"""Many `generate` requests of one caller to one engine, in few calls of its actor.

    post       requests of one turn of the caller's event loop; returns at once
    collect    one call that waits while answers are due. It returns those that have ended, and that
               end within min(10 ms, 5 % of the age of the first)

A call of a Ray actor costs 1.6 ms of CPU on both sides together, whatever it carries, and a step of
short answers is dozens of requests that are made and answered at the same moments. One call that
returns when all of its requests are answered would hold short answers back for long ones.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from cluster.handles import calls, errors
from cluster.handles.local_actor import LocalActor
from cluster.handles.record_list import RecordList
from distill.engine import GenerateRequest, Sample, Score, ScoreRequest
from distill.errors import EngineError, EngineLost

if TYPE_CHECKING:
    from ray.exceptions import RayTaskError

# Answers are collected for this part of the first one's age, and at most so long.
_GATHERED_PART, _GATHERED_S = 0.05, 0.01
# A `collect` without an answer returns after this; a caller that is dead by then asks no more.
_ASKED_AGAIN_S = 20.0
# Deadline for the bytes of a few rows' hidden states.
_FETCH_S = 120.0

# A request's number, and how many samples it has or why it has none.
_Answer = tuple[int, "int | RayTaskError"]


@dataclass(slots=True, eq=False)
class _Box:
    """Answers for one caller that it has not collected yet."""

    answers: list[_Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gathered_s: float = 0.0
    under_way: set[asyncio.Task[None]] = field(default_factory=set)
    collecting: int = 0
    collected_at: float = field(default_factory=time.monotonic)

    def is_left(self, for_s: float) -> bool:
        """True if nothing is under way, and nobody has collected for so long."""
        idle_s = time.monotonic() - self.collected_at
        return not self.under_way and not self.collecting and idle_s >= for_s


class Mailbox:
    """The engine's end: answers requests of all callers side by side.

    Args:
        forget_after_s: answers that nobody has collected for so long are dropped: their caller is
            dead.
    """

    def __init__(self, engine: Any, forget_after_s: float = 60.0) -> None:
        self._engine, self._forget_after_s = engine, forget_after_s
        self._boxes: dict[str, _Box] = {}

    def post(
        self, client: str, numbers: Sequence[int], requests: Sequence[GenerateRequest]
    ) -> None:
        self._boxes = {
            name: box for name, box in self._boxes.items() if not box.is_left(self._forget_after_s)
        }
        box = self._boxes.setdefault(client, _Box())
        for number, request in zip(numbers, requests, strict=True):
            task = asyncio.create_task(self._answer(box, number, request))
            box.under_way.add(task)
            task.add_done_callback(box.under_way.discard)

    async def _answer(self, box: _Box, number: int, request: GenerateRequest) -> None:
        began = time.monotonic()
        samples: list[Sample] = []
        try:
            samples = await self._engine.generate(request)
            answer: int | RayTaskError = len(samples)
        except (Exception, asyncio.CancelledError) as error:
            trace = traceback.format_exc()
            answer = errors.RayTaskError("generate", trace, _as_sent(error))
        if not box.answers:
            age_s = time.monotonic() - began
            box.gathered_s = min(_GATHERED_S, _GATHERED_PART * age_s)
        box.answers.append((number, answer))
        box.samples += samples
        box.ready.set()

    async def collect(self, client: str) -> tuple[list[_Answer], list[Sample]]:
        """Answers that have ended, and their samples; none if none ends within 20 s."""
        box = self._boxes.setdefault(client, _Box())
        box.collecting += 1
        try:
            async with asyncio.timeout(_ASKED_AGAIN_S):
                await box.ready.wait()
            await asyncio.sleep(box.gathered_s)
        except TimeoutError:
            return [], []
        finally:
            box.collecting -= 1
            box.collected_at = time.monotonic()
        answers, box.answers = box.answers, []
        samples, box.samples = box.samples, []
        box.ready.clear()
        return answers, RecordList(samples)


def _as_sent(error: BaseException) -> Exception:
    """The error; what it says, if it could not be read at the caller's end with others' answers."""
    if not isinstance(error, Exception):
        return EngineLost("its engine has cancelled it")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def with_mailbox(hosted: type) -> type:
    """The class of an engine's actor, with a mailbox beside the methods it has.

    Hidden states that it gives stay in the object store of its node, as objects that it owns: its
    scores have references to them, and only a learner's worker fetches what these lead to.

    Args:
        hosted: has an asynchronous `generate`. Sent by value, as `deferred` makes it.
    """

    def make(self: Any, *arguments: Any, **settings: Any) -> None:
        hosted.__init__(self, *arguments, **settings)
        self.mailbox = Mailbox(self)

    async def post(
        self: Any, client: str, numbers: Sequence[int], requests: Sequence[GenerateRequest]
    ) -> None:
        self.mailbox.post(client, numbers, requests)

    async def collect(self: Any, client: str) -> tuple[list[_Answer], list[Sample]]:
        return await self.mailbox.collect(client)

    async def score(self: Any, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores: list[Score] = await hosted.score(self, requests)  # pyright: ignore[reportAttributeAccessIssue]
        if all(each.states is None for each in scores):
            return RecordList(scores)
        return RecordList(await asyncio.to_thread(_stored, scores))

    methods = {"__init__": make, "post": post, "collect": collect}
    if hasattr(hosted, "score"):
        methods["score"] = score
    own = {"__doc__": hosted.__doc__, "__module__": hosted.__module__}
    return type(hosted.__name__, (hosted,), own | methods)


def _stored(scores: Sequence[Score]) -> list[Score]:
    return [
        each if each.states is None else replace(each, states=calls.put(each.states))
        for each in scores
    ]


async def with_states(scores: Sequence[Score]) -> list[Score]:
    """Scores with the hidden states that their references lead to, fetched from the store.

    Raises:
        EngineError: they are lost, or did not come in time.
    """
    return await asyncio.to_thread(_fetched, scores)


def _fetched(scores: Sequence[Score]) -> list[Score]:
    try:
        return [
            replace(each, states=calls.get(each.states, _FETCH_S))
            if calls.in_store(each.states)
            else each
            for each in scores
        ]
    except errors.RayError as error:
        raise EngineError(f"hidden states could not be fetched: {error!r}") from error


class MailboxEnd:
    """The caller's end, for one event loop at a time.

    Answers of a request whose caller was cancelled are dropped. Pickles: as one that nobody has
    used.
    """

    def __init__(self, handle: Any) -> None:
        """
        Args:
            handle: of an actor whose class `with_mailbox` made.
        """
        self._handle = handle
        self._numbers = itertools.count()
        self._outgoing: list[tuple[int, GenerateRequest]] = []
        self._waiting: dict[int, asyncio.Future[list[Sample]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting: asyncio.Task[None] | None = None
        self._client = ""

    def __reduce__(self) -> tuple[type[MailboxEnd], tuple[Any]]:
        return MailboxEnd, (self._handle,)

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        """The engine's answer.

        Raises:
            RayActorError: the engine's process has ended.
            RayTaskError: what the engine raised, as that error too.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._waiting[number] = answer = loop.create_future()
        self._outgoing.append((number, request))
        loop.call_soon(self._post)  # after others of this turn have asked
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _post(self) -> None:
        outgoing = [each for each in self._outgoing if each[0] in self._waiting]
        self._outgoing = []
        if not outgoing:  # they have gone with an earlier one, or were cancelled
            return
        if self._collecting is None or self._collecting.done():
            self._client = secrets.token_hex(8)  # an earlier `collect` may still take its answers
            self._collecting = asyncio.create_task(self._collect(self._client))
        posting = asyncio.create_task(self._send(self._client, outgoing))
        self._tasks.add(posting)
        posting.add_done_callback(self._tasks.discard)

    async def _send(self, client: str, outgoing: Sequence[tuple[int, GenerateRequest]]) -> None:
        numbers = [number for number, _ in outgoing]
        try:
            requests = RecordList(request for _, request in outgoing)
            await self._handle.post.remote(client, numbers, requests)
        except Exception as error:
            self._fail(numbers, error)

    async def _collect(self, client: str) -> None:
        """Hands answers over until nobody waits for one."""
        while self._waiting:
            try:
                answers, samples = await self._handle.collect.remote(client)
            except Exception as error:
                self._fail(list(self._waiting), error)
                return
            remaining = iter(samples)
            for number, answer in answers:
                if isinstance(answer, errors.RayTaskError):
                    self._fail([number], answer.as_instanceof_cause())
                    continue
                of_request = list(islice(remaining, answer))
                if (waiting := self._waiting.pop(number, None)) and not waiting.done():
                    waiting.set_result(of_request)

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        for number in numbers:
            if (waiting := self._waiting.pop(number, None)) and not waiting.done():
                waiting.set_exception(error)


def mailbox_of(handle: Any) -> MailboxEnd | None:
    """The mailbox of an engine; None if its actor has none, as in this process."""
    if isinstance(handle, LocalActor) or not hasattr(handle, "post"):
        return None
    return MailboxEnd(handle)
