"""Sleeping engines: a server that released its memory serves nothing until it is restored."""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from actors.sglang.client import ServerFacts
from actors.sglang.config import OnWeightUpdate
from actors.sglang.weights import Use, WeightSession
from distill.engine import CheckpointDirectory, Sample
from distill.errors import EngineError, EngineLost
from distill.models.loading import tensor_shapes
from distill.types import StopReason
from tests.tiny import tiny_model_dir
from tests.waiting import DEADLINE_S

ALL = {"weights", "kv_cache", "cuda_graph"}


class Server:
    """SGLang's memory: its contents, and whether its requests may run.

    It fails, as a GPU would, on work with missing memory, and on weights that are released or
    loaded
    while something runs.
    """

    def __init__(self, mode: OnWeightUpdate, fails: str = "", *, keeps: bool = False) -> None:
        self.released: set[str] = set()
        self.paused, self.holds_weights, self.version = False, True, 0
        self.orders: list[str] = []
        self.running = 0
        self._mode, self._fails, self._keeps = mode, fails, keeps
        self._going = asyncio.Event()
        self._going.set()

    async def order(self, path: str, body: Mapping[str, Any], **_more: Any) -> None:
        self.orders.append(path)
        await asyncio.sleep(0)
        if path == self._fails:
            self._fails = ""
            raise EngineError("on purpose")
        getattr(self, "_on_" + path[1:])(body)

    async def facts(self) -> ServerFacts:
        return ServerFacts.of({"tp_size": 1})

    def _on_pause_generation(self, _body: Mapping[str, Any]) -> None:
        assert not self.paused, "paused twice"
        self.paused = True
        self._going.clear()

    def _on_continue_generation(self, _body: Mapping[str, Any]) -> None:
        assert not self.released, f"it goes on without {self.released}"
        self.paused = False
        self._going.set()

    def _on_release_memory_occupation(self, body: Mapping[str, Any]) -> None:
        assert self.paused and not self.released
        self.released, self.holds_weights = set(body["tags"]), False

    def _on_resume_memory_occupation(self, body: Mapping[str, Any]) -> None:
        assert set(body["tags"]) <= self.released
        self.holds_weights = self.holds_weights or self._keeps
        assert "kv_cache" not in body["tags"] or self.holds_weights, "the cache comes last"
        self.released -= set(body["tags"])

    def _on_update_weights_from_disk(self, body: Mapping[str, Any]) -> None:
        assert self.paused and "weights" not in self.released, "a load into no memory"
        self.holds_weights, self.version = True, int(body["weight_version"])

    def _on_begin_weight_update(self, _body: Mapping[str, Any]) -> None:
        assert self.paused and "weights" not in self.released

    _on_end_weight_update = _on_begin_weight_update

    def _on_abort_request(self, _body: Mapping[str, Any]) -> None:
        pass

    async def generate(self, _use: Use, tokens: int = 3) -> list[Sample]:
        versions = []
        for _ in range(tokens):
            if self.paused and self._mode == "restart":
                return [sample(versions, StopReason.ABORTED)]
            await self._going.wait()
            assert not self.released and self.holds_weights, "a token of released weights"
            versions.append(self.version)
            await asyncio.sleep(0)
        return [sample(versions, StopReason.LENGTH)]

    async def score(self, _use: Use) -> int:
        assert not self.paused and not self.released and self.holds_weights
        self.running += 1
        await asyncio.sleep(0.001)
        assert not self.released and self.holds_weights, "released under a scoring"
        self.running -= 1
        return self.version


def sample(versions: list[int], reason: StopReason) -> Sample:
    versions_T = np.asarray(versions, np.int32)
    return Sample(
        tokens_T=np.ones_like(versions_T), logprobs_T=np.zeros(len(versions), np.float32),
        versions_T=versions_T, stop_reason=reason,
    )  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), seed=1)


def session_of(server: Server, mode: OnWeightUpdate, directory: str) -> WeightSession:
    client: Any = server
    return WeightSession(client, mode, lambda: tensor_shapes(directory))


@pytest.mark.parametrize("mode", ["continue", "restart", "finish"])
@pytest.mark.parametrize("seed", range(3))
async def test_released_weights_are_unused(mode: OnWeightUpdate, seed: int, directory: str) -> None:
    server, draw = Server(mode), random.Random(seed)
    session = session_of(server, mode, directory)

    async def client(number: int) -> list[int]:
        await asyncio.sleep(draw.random() * 0.02)
        if number % 4 == 0:
            return [await session.score(server.score)]
        [made] = await session.generate(lambda use: server.generate(use, draw.randrange(1, 30)))
        assert made.stop_reason is StopReason.LENGTH, "a sample was cut short"
        return made.versions_T.tolist()

    async def learner() -> None:
        for version in (1, 2, 3):
            await session.sleep()
            assert session.asleep and server.released == ALL and server.running == 0
            await session.sleep()  # once more changes nothing
            await asyncio.sleep(0.004)  # the step
            seconds = await session.load(CheckpointDirectory(path=directory), version)
            assert seconds >= 0.004, "the pause began with the sleep"
            assert not session.asleep and not server.paused
            await asyncio.sleep(0.002)

    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client(i)) for i in range(40)]
        tasks.create_task(learner())
    for versions in (each.result() for each in clients):
        assert versions == sorted(versions)
        if mode != "continue":
            assert len(set(versions)) == 1
    once = [
        "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation",
        "/update_weights_from_disk", "/resume_memory_occupation", "/continue_generation",
    ]  # fmt: skip
    assert server.orders == once * 3


@pytest.mark.parametrize(
    "fails, first",
    [
        ("/release_memory_occupation", "it is unknown whether"),
        ("/resume_memory_occupation", "no complete weights have arrived"),
        ("/update_weights_from_disk", "parts of two versions"),
    ],
)
async def test_a_sleep_that_fails_serves_nothing_until_whole_weights_come(
    fails: str, first: str, directory: str
) -> None:
    server = Server("continue", fails)
    session = session_of(server, "continue", directory)
    source = CheckpointDirectory(path=directory)
    async with asyncio.timeout(DEADLINE_S):
        waiting: asyncio.Task[list[Sample]] | None = None
        with pytest.raises(EngineError):
            await session.sleep()
            waiting = asyncio.create_task(session.generate(server.generate))
            await session.load(source, 1)
        with pytest.raises(EngineLost):
            await session.generate(server.generate)
        assert (waiting is None) == (fails == "/release_memory_occupation")
        if waiting is not None:
            with pytest.raises(EngineLost):
                await waiting
            await session.load(source, 2)
            [made] = await session.generate(server.generate)
            assert made.versions_T.tolist() == [2, 2, 2]


async def test_weights_that_do_not_fit_leave_it_asleep(directory: str, tmp_path: Any) -> None:
    server = Server("continue")
    session = session_of(server, "continue", directory)
    async with asyncio.timeout(DEADLINE_S):
        await session.sleep()
        waiting = asyncio.create_task(session.generate(server.generate))
        with pytest.raises(EngineError):
            await session.load(CheckpointDirectory(path=str(tmp_path)), 1)
        assert session.asleep and server.released == ALL and not waiting.done()
        await session.load(CheckpointDirectory(path=directory), 1)
        [made] = await waiting
        assert made.versions_T.tolist() == [1, 1, 1]


@pytest.mark.parametrize("good", [True, False])
async def test_kept_weights_serve_after_their_verification(good: bool, directory: str) -> None:
    server = Server("finish", keeps=True)
    session = session_of(server, "finish", directory)
    proven: list[int] = []

    async def prove() -> None:
        proven.append(await server.score(Use()))
        await asyncio.sleep(0.01)
        assert not waiting.done() and not late.done()
        if not good:
            raise EngineLost("other weights")

    async with asyncio.timeout(DEADLINE_S):
        await session.sleep()
        wanted = asyncio.create_task(session.waiters.wait_for_call())
        await asyncio.sleep(0.01)
        assert not wanted.done() and session.asleep
        waiting = asyncio.create_task(session.score(server.score))
        await wanted
        late = asyncio.create_task(session.generate(server.generate))
        if good:
            await session.wake(prove)
            assert await waiting == 0 and len(await late) == 1 and not session.asleep
        else:
            for waits in (session.wake(prove), waiting, late):
                with pytest.raises(EngineLost):
                    await waits
    assert proven == [0]
    assert server.orders == [
        "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation",
        "/continue_generation",
    ]  # fmt: skip


async def test_requests_that_waited_or_were_cancelled_wake_no_engine(directory: str) -> None:
    server = Server("finish", keeps=True)
    session = session_of(server, "finish", directory)

    async def prove() -> None:
        pass

    async with asyncio.timeout(DEADLINE_S):
        load = asyncio.create_task(session.load(CheckpointDirectory(path=directory), 1))
        while not server.paused:
            await asyncio.sleep(0)
        assert await session.score(server.score) == 1
        await load
        await session.sleep()
        gone = asyncio.create_task(session.score(server.score))
        await asyncio.sleep(0.01)
        gone.cancel()
        wanted = asyncio.create_task(session.waiters.wait_for_call())
        await asyncio.sleep(0.01)
        assert not wanted.done()
        waiting = asyncio.create_task(session.score(server.score))
        await wanted
        await session.wake(prove)
        assert await waiting == 1


async def test_a_server_that_cannot_take_its_memory_back_serves_nothing(directory: str) -> None:
    server = Server("finish", "/resume_memory_occupation", keeps=True)
    session = session_of(server, "finish", directory)

    async def prove() -> None:
        raise AssertionError("there is nothing to prove")

    async with asyncio.timeout(DEADLINE_S):
        await session.sleep()
        waiting = asyncio.create_task(session.score(server.score))
        await session.waiters.wait_for_call()
        with pytest.raises(EngineError):
            await session.wake(prove)
        with pytest.raises(EngineLost):
            await waiting
