"""Mailbox that sends many `generate` requests of one caller to one engine in few actor calls.

    post       sends the requests of one iteration of the caller's event loop; returns immediately
    collect    waits for an answer, and returns all answers that are ready, including those that
               follow within min(10 ms, 5 % of the first answer's duration)

A call of a Ray actor costs 1.6 ms of CPU on both sides together, regardless of its content, and a
step of short answers has dozens of requests that are made and answered at the same time. A single
call that returns when all of its requests are answered would delay short answers until the longest.
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

# Further answers are gathered for this share of the first answer's duration, and at most for this
# time in seconds.
_GATHERED_PART, _GATHERED_S = 0.05, 0.01
# Seconds after which a `collect` without an answer returns. A dead caller does not call it again.
_ASKED_AGAIN_S = 20.0
# Deadline for the bytes of a few rows' hidden states.
_FETCH_S = 120.0

# Number of a request, and the number of its samples or the error.
_Answer = tuple[int, "int | RayTaskError"]


@dataclass(slots=True, eq=False)
class _Box:
    """Requests in progress and uncollected answers of one caller."""

    answers: list[_Answer] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gathered_s: float = 0.0
    in_progress: set[asyncio.Task[None]] = field(default_factory=set)
    collecting: int = 0
    collected_at: float = field(default_factory=time.monotonic)

    def is_abandoned(self, for_s: float) -> bool:
        """True if no request is in progress, and nothing was collected for `for_s` seconds."""
        idle_s = time.monotonic() - self.collected_at
        return not self.in_progress and not self.collecting and idle_s >= for_s


class Mailbox:
    """Engine's side: answers the requests of all callers concurrently.

    Args:
        forget_after_s: seconds after which uncollected answers are dropped, because their caller
            must be dead.
    """

    def __init__(self, engine: Any, forget_after_s: float = 60.0) -> None:
        self._engine, self._forget_after_s = engine, forget_after_s
        self._boxes: dict[str, _Box] = {}

    def post(
        self, client: str, numbers: Sequence[int], requests: Sequence[GenerateRequest]
    ) -> None:
        self._boxes = {
            name: box
            for name, box in self._boxes.items()
            if not box.is_abandoned(self._forget_after_s)
        }
        box = self._boxes.setdefault(client, _Box())
        for number, request in zip(numbers, requests, strict=True):
            task = asyncio.create_task(self._answer(box, number, request))
            box.in_progress.add(task)
            task.add_done_callback(box.in_progress.discard)

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
        """Wait for answers and return them with their samples; empty if there is none in 20 s."""
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
    """Return the error, or its text as a RuntimeError if it cannot be pickled and unpickled.

    An error that cannot be unpickled would make all answers of the call unreadable.
    """
    if not isinstance(error, Exception):
        return EngineLost("its engine has cancelled it")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def with_mailbox(hosted: type) -> type:
    """Create a subclass of an engine's actor class with a mailbox.

    Hidden states of scores stay in the object store of the engine's node, as objects that the
    engine owns. The scores contain references, and only a learner's worker fetches the objects.

    Args:
        hosted: class with an asynchronous `generate`, created by `deferred` and sent by value.
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
    """Replace references to hidden states in scores by the hidden states from the store.

    Raises:
        EngineError: the hidden states are lost, or did not arrive in time.
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
    """Caller's side, for one event loop at a time.

    The answer to a cancelled request is dropped. A pickled copy starts without requests.
    """

    def __init__(self, handle: Any) -> None:
        """`handle` is an actor whose class was created by `with_mailbox`."""
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
        """Send a request to the engine and return its samples; raises as a call of the engine."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        self._waiting[number] = answer = loop.create_future()
        self._outgoing.append((number, request))
        loop.call_soon(self._post)  # after other requests in this iteration of the event loop
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _post(self) -> None:
        outgoing = [each for each in self._outgoing if each[0] in self._waiting]
        self._outgoing = []
        if not outgoing:  # sent by an earlier call, or cancelled
            return
        if self._collecting is None or self._collecting.done():
            # A new name: an earlier `collect` that still runs would take the answers.
            self._client = secrets.token_hex(8)
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
    """Mailbox end for an engine; None if its actor has no mailbox, as for local actors."""
    if isinstance(handle, LocalActor) or not hasattr(handle, "post"):
        return None
    return MailboxEnd(handle)
