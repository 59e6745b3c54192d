"""The mailbox: concurrent requests reach a Ray actor in one call, with separate answers."""

import asyncio
import gc
import os
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray

from cluster.handles import errors
from cluster.handles.engine_pool import EnginePool
from cluster.handles.mailbox import Mailbox, MailboxEnd, mailbox_of, with_mailbox
from distill.engine import GenerateRequest
from distill.errors import DataError, EngineError, EngineLost
from distill.sampling import TrainSampling

pytestmark = pytest.mark.usefixtures("ray_cluster")
# Only against hangs.
PATIENCE_S = 60.0


class OddError(Exception):
    """An error that cannot be unpickled: its constructor takes other arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@dataclass(frozen=True)
class Echo:
    """An engine's name, and a request's first token."""

    engine: str
    token: int


class Engine:
    """An engine that answers a request's first token; certain tokens fail, wait, or kill it."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._gate = asyncio.Event()
        self.posts, self.collects = 0, 0

    async def generate(self, request: GenerateRequest) -> Any:
        match request.prompt_tokens_T[0]:
            case 90:
                await self._gate.wait()
            case 91:
                raise EngineError("seven log-probs for eight tokens")
            case 92:
                raise DataError("a token outside of the vocabulary")
            case 93:
                raise OddError("a", "b")
            case 94:
                raise asyncio.CancelledError
            case 95:
                os._exit(1)
        return [Echo(self._name, int(request.prompt_tokens_T[0]))]

    async def open(self) -> None:
        self._gate.set()

    async def queue_length(self) -> int:
        return 0

    async def counts(self) -> tuple[int, int]:
        return self.posts, self.collects


class Counting(with_mailbox(Engine)):
    """An engine that counts the calls of its mailbox."""

    async def post(self, *given: Any) -> None:
        self.posts += 1
        await super().post(*given)

    async def collect(self, client: str) -> Any:
        self.collects += 1
        return await super().collect(client)


def request(token: int) -> GenerateRequest:
    sampling = TrainSampling(temperature=0.7, max_new_tokens=4)
    return GenerateRequest(
        prompt_tokens_T=np.array([token], np.int32), sampling=sampling, num_samples=1, seed=0
    )


def made(name: str = "") -> Any:
    remote: Any = ray.remote
    return remote(Counting).options(num_cpus=0).remote(name)


@pytest.fixture
def engine() -> Any:
    handle = made()
    yield handle
    ray.kill(handle)


async def asked(end: MailboxEnd, *tokens: int) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        everyone = (end.generate(request(token)) for token in tokens)
        return await asyncio.gather(*everyone, return_exceptions=True)


def test_concurrent_requests_are_few_calls_with_separate_answers(engine: Any) -> None:
    end = MailboxEnd(engine)
    assert asyncio.run(asked(end, *range(64))) == [[Echo("", token)] for token in range(64)]
    posts, collects = ray.get(engine.counts.remote())
    assert posts == 1 and collects < 10


def test_each_error_has_the_class_of_a_separate_call(engine: Any) -> None:
    found = asyncio.run(asked(MailboxEnd(engine), 1, 91, 92, 93, 94, 2))
    assert found[0] == [Echo("", 1)] and found[5] == [Echo("", 2)]
    for error, kind in zip(
        found[1:5], (EngineError, DataError, RuntimeError, EngineLost), strict=True
    ):
        assert isinstance(error, kind) and isinstance(error, errors.RayTaskError)
    assert "OddError: ab" in str(found[3])


async def test_a_short_answer_does_not_wait_for_a_long_one(engine: Any) -> None:
    end = MailboxEnd(engine)
    long = asyncio.ensure_future(end.generate(request(90)))
    assert await asked(end, 1) == [[Echo("", 1)]]
    assert await asked(end, 2) == [[Echo("", 2)]] and not long.done()
    await engine.open.remote()
    assert await long == [Echo("", 90)]


def test_a_cancelled_request_takes_no_answer_of_others(engine: Any) -> None:
    end = MailboxEnd(engine)

    async def ask() -> None:
        gone = asyncio.ensure_future(end.generate(request(90)))
        assert await asked(end, 1) == [[Echo("", 1)]]
        gone.cancel()
        assert await asked(end, 2) == [[Echo("", 2)]]

    async def leave() -> None:
        waiting = asyncio.ensure_future(end.generate(request(90)))
        await asyncio.sleep(0)
        assert not waiting.done()

    asyncio.run(ask())
    asyncio.run(leave())  # its event loop ends with an answer due
    asyncio.run(ask())
    copy = pickle.loads(pickle.dumps(end))
    assert asyncio.run(asked(copy, 3)) == [[Echo("", 3)]]


def test_requests_at_a_dead_engine_fail_and_a_pool_repeats_them_elsewhere() -> None:
    first, second = made("first"), made("second")
    end = MailboxEnd(first)
    found = asyncio.run(asked(end, 90, 90, 95))
    assert all(isinstance(error, errors.RayActorError) for error in found)
    pool = EnginePool("policy", {"first": first, "second": second}, PATIENCE_S)

    async def ask() -> list[Any]:
        return await asyncio.gather(*(pool.generate(request(token)) for token in range(20)))

    assert asyncio.run(ask()) == [[Echo("second", token)] for token in range(20)]
    ray.kill(second)


async def test_answers_for_a_dead_caller_are_dropped() -> None:
    class Answer:
        """An answer that nobody but the mailbox holds."""

    class Memory:
        """Remembers its answers, weakly."""

        def __init__(self) -> None:
            self.made: list[weakref.ref[Answer]] = []

        async def generate(self, _request: GenerateRequest) -> list[Answer]:
            answer = Answer()
            self.made.append(weakref.ref(answer))
            return [answer]

    engine = Memory()
    mailbox = Mailbox(engine, forget_after_s=0)
    mailbox.post("dead", [0], [request(1)])
    await asyncio.sleep(0.01)
    assert engine.made[0]() is not None
    mailbox.post("alive", [0], [request(2)])
    answers, samples = await mailbox.collect("alive")
    assert answers == [(0, 1)] and len(samples) == 1
    gc.collect()
    assert engine.made[0]() is None


def test_an_actor_without_one_is_called_by_itself() -> None:
    remote: Any = ray.remote
    plain = remote(Engine).options(num_cpus=0).remote()
    assert mailbox_of(plain) is None
    pool = EnginePool("policy", {"plain": plain}, PATIENCE_S)
    assert asyncio.run(pool.generate(request(5))) == [Echo("", 5)]
    ray.kill(plain)
