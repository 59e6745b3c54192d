"""A pool of engines whose members die, answer wrongly, leave and join."""

import asyncio
import os
import pickle
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from cluster.handles.engine_pool import EnginePool
from cluster.handles.local_actor import LocalActor
from distill.engine import Score, ScoreRequest
from distill.errors import DataError, EngineError, EngineLost

pytestmark = pytest.mark.usefixtures("ray_cluster")
PATIENCE_S = 60


class Trouble:
    """An engine whose `score` answers the engine's name, or fails."""

    def __init__(self, name: str, how: str = "answers", times: int = 10**9) -> None:
        self._name, self._how, self._times = name, how, times
        self._gate: asyncio.Event | None = None

    async def score(self, requests: list[ScoreRequest]) -> list[str]:
        self._times -= 1
        if self._times >= 0:
            if self._how == "dies":
                os._exit(1)
            if self._how == "is lost":
                raise EngineLost("its server is gone")
            if self._how == "is wrong":
                raise EngineError("seven log-probs for eight tokens")
            if self._how == "refuses":
                raise DataError("a token outside of the vocabulary")
            if self._how == "waits":
                self._gate = asyncio.Event()
                await self._gate.wait()
        return [self._name] * len(requests)

    async def queue_length(self) -> int:
        return 0

    async def open(self) -> None:
        assert self._gate is not None
        self._gate.set()

    async def waits(self) -> bool:
        return self._gate is not None


def made(*hows: Any, on_ray: bool = False) -> dict[str, Any]:
    """Engines e0, e1, ... in this process; engines that die have their own process."""
    remote = ray.remote(Trouble).options(num_cpus=0).remote
    members = {}
    for i, how in enumerate(hows):
        arguments = (f"e{i}", *(how if isinstance(how, tuple) else (how,)))
        apart = on_ray or "dies" in arguments
        members[f"e{i}"] = remote(*arguments) if apart else LocalActor(Trouble, *arguments)
    return members


def asked(pool: EnginePool, times: int = 1) -> list[Any]:
    async def ask() -> list[Any]:
        return [await answer(pool) for _ in range(times)]

    return asyncio.run(ask())


async def answer(pool: EnginePool) -> Any:
    [answered] = await pool.score([to_score(1)])
    return answered


@pytest.mark.parametrize("how", ["dies", "is lost"])
def test_another_engine_answers_for_one_that_is_lost(how: str) -> None:
    pool = EnginePool("policy", made(how, "answers"), PATIENCE_S)
    assert asked(pool, times=3) == ["e1"] * 3
    assert pool.in_progress == {}


def test_a_wrong_answer_is_requested_once_more_and_then_raised() -> None:
    pool = EnginePool("policy", made(("is wrong", 1), "answers"), PATIENCE_S)
    assert asked(pool) == ["e1"]
    pool = EnginePool("policy", made("is wrong", "is wrong", "is wrong"), PATIENCE_S)
    with pytest.raises(EngineError):
        asked(pool)


def test_a_refused_request_is_not_sent_to_another_engine() -> None:
    pool = EnginePool("policy", made(("refuses", 1), ("refuses", 1)), PATIENCE_S)
    for _ in range(2):
        with pytest.raises(DataError):
            while True:
                asked(pool)
    assert asked(pool) in (["e0"], ["e1"])


async def test_a_request_waits_for_an_engine_to_join() -> None:
    members = made("dies", "answers")
    pool = EnginePool("policy", {"e0": members["e0"]}, PATIENCE_S)
    waiting = asyncio.create_task(answer(pool))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    pool.update({"e1": members["e1"]})
    assert str(await waiting) == "e1"


def test_a_request_fails_when_its_patience_ends() -> None:
    pool = EnginePool("teacher", made("is lost"), patience_s=0.5)
    with pytest.raises(EngineLost):
        asked(pool)
    with pytest.raises(EngineLost):
        asked(EnginePool("teacher", {}, patience_s=0.1))


def test_without_patience_every_engine_is_asked_once() -> None:
    assert asked(EnginePool("policy", made("is lost", "answers"))) == ["e1"]
    with pytest.raises(EngineLost):
        asked(EnginePool("policy", made("is lost", "is lost")))
    with pytest.raises(RayActorError):
        asked(EnginePool("policy", made("dies")))


async def test_an_engine_that_left_is_idle_once_its_last_request_is_answered() -> None:
    members = made("waits", "answers", on_ray=True)
    pool = pickle.loads(pickle.dumps(EnginePool("policy", {"e0": members["e0"]}, PATIENCE_S)))
    waiting = asyncio.create_task(answer(pool))
    while not await members["e0"].waits.remote():
        await asyncio.sleep(0.01)
    pool.update({"e1": members["e1"]})
    assert pool.in_progress == {"e0": 1}
    assert await answer(pool) == "e1"
    members["e0"].open.remote()
    assert await waiting == "e0"
    pool.update({"e1": members["e1"]})
    assert pool.in_progress == {}


class Echo:
    """An engine that scores a request by its first token, refuses 13, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.fails = False

    async def score(self, requests: list[ScoreRequest]) -> list[Score]:
        self.calls.append(len(requests))
        if self.fails or any(request.tokens_T[0] == 13 for request in requests):
            raise DataError("a token outside of the vocabulary")
        return [
            Score(logprobs_by_temperature=(-request.tokens_T[:1].astype(np.float32),))
            for request in requests
        ]

    async def recorded_calls(self) -> list[int]:
        return self.calls

    async def fail(self) -> None:
        self.fails = True


def to_score(token: int) -> ScoreRequest:
    return ScoreRequest(
        tokens_T=np.array([token, 0], np.int32), start=1, temperatures=(0.7,)
    )  # fmt: skip


def first_tokens(scores: list[Score]) -> list[int]:
    return [-int(score.logprobs_by_temperature[0][0]) for score in scores]


async def test_canaries_are_sent_with_the_next_batch_and_answered_separately() -> None:
    engine = LocalActor(Echo)
    pool = EnginePool("teacher", {}, PATIENCE_S)
    pool.update({"e0": engine}, {"e0": 7})
    riding = asyncio.ensure_future(
        pool.score_with_next_batch("e0", [to_score(8), to_score(9)], PATIENCE_S)
    )
    await asyncio.sleep(0)
    scores = await pool.score([to_score(1), to_score(2), to_score(3)])
    assert first_tokens(scores) == [1, 2, 3] and {s.scored_by for s in scores} == {7}
    canaries, rode = await riding
    assert rode and first_tokens(canaries) == [8, 9]
    # Without a batch they are sent alone. An absent engine is an error.
    alone, batched = await pool.score_with_next_batch("e0", [to_score(5)], 0.01)
    assert not batched and first_tokens(alone) == [5]
    with pytest.raises(EngineLost):
        await pool.score_with_next_batch("e9", [to_score(5)], PATIENCE_S)
    assert await engine.recorded_calls.remote() == [5, 1]
    await engine.fail.remote()
    riding = asyncio.ensure_future(pool.score_with_next_batch("e0", [to_score(8)], PATIENCE_S))
    await asyncio.sleep(0)
    with pytest.raises(DataError):
        await pool.score([to_score(1)])
    with pytest.raises(EngineError):
        await riding
    engine.end()


async def test_concurrent_requests_are_one_call_with_separate_answers() -> None:
    engine = LocalActor(Echo)

    async def ask(*groups: list[int]) -> list[Any]:
        pool = EnginePool("teacher", {}, PATIENCE_S)
        pool.update({"e0": engine}, {"e0": 7})
        scores = (pool.score([to_score(token) for token in group]) for group in groups)
        found = await asyncio.gather(*scores, return_exceptions=True)
        assert pool.in_progress == {}
        return [first_tokens(each) if isinstance(each, list) else each for each in found]

    assert await ask([1, 2], [3], [4, 5]) == [[1, 2], [3], [4, 5]]
    assert await engine.recorded_calls.remote() == [5]
    first, refused, last = await ask([1], [13, 2], [3])
    assert (first, last) == ([1], [3]) and isinstance(refused, DataError)
    assert sorted((await engine.recorded_calls.remote())[1:]) == [1, 1, 2, 4]
    engine.end()


async def test_a_lost_call_is_repeated_at_another_engine_for_all_its_requests() -> None:
    pool = EnginePool("teacher", made("is lost", "answers"), PATIENCE_S)
    assert await asyncio.gather(*(answer(pool) for _ in range(20))) == ["e1"] * 20
    assert pool.in_progress == {}
