"""The choice of an engine for a request, when many workers have a copy of the pool each."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.handles.engine_pool import EnginePool
from distill.engine import GenerateRequest
from distill.sampling import TrainSampling
from tests.handles import Handle

REQUEST = GenerateRequest(
    prompt_tokens_T=np.array([3], np.int32),
    sampling=TrainSampling(temperature=1.0, max_new_tokens=1), num_samples=16, seed=0,
)  # fmt: skip


class Clock:
    """Deterministic rounds, in which every engine finishes some of its samples."""

    def __init__(self) -> None:
        self.engines: list[Busy] = []

    async def run(self, work: asyncio.Task[Any]) -> None:
        while not work.done():
            for _ in range(20):  # answered workers make their next requests before the next round
                await asyncio.sleep(0)
            for engine in self.engines:
                engine.work()


class Busy:
    """An engine that finishes `speed` samples a round, oldest first."""

    def __init__(self, clock: Clock, speed: int = 32, tells: bool = True) -> None:
        self.groups, self.load, self._speed, self._tells = 0, 0, speed, tells
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.sessions: list[str] = []
        clock.engines.append(self)

    async def generate(self, request: GenerateRequest) -> list[Any]:
        self.groups += 1
        self.sessions.append(request.session)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request.num_samples, done))
        await done
        return []

    async def queue_length(self) -> int:
        if not self._tells:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)  # as a call of an actor: concurrent callers have called by then
        return sum(samples for samples, _ in self._waiting)

    def work(self) -> None:
        self.load += sum(samples for samples, _ in self._waiting)
        left = self._speed
        while self._waiting and self._waiting[0][0] <= left:
            samples, done = self._waiting.pop(0)
            left -= samples
            done.set_result(None)


async def roll_out(
    clock: Clock, engines: list[Busy], workers: int, groups_per_worker: int, rounds: int = 40
) -> None:
    """Each worker samples `groups_per_worker` groups concurrently, `rounds` times."""

    async def sample(pool: EnginePool) -> None:
        for _ in range(rounds):
            await pool.generate(REQUEST)

    members = {f"policy engine {i}": Handle(engine) for i, engine in enumerate(engines)}
    pools = [EnginePool("policy", members, 60) for _ in range(workers)]
    everyone = asyncio.gather(*(sample(pool) for pool in pools for _ in range(groups_per_worker)))
    await asyncio.gather(clock.run(everyone), everyone)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "workers, engines, groups_per_worker", [(1, 8, 64), (64, 8, 1), (64, 8, 2)]
)
def test_engines_get_equal_shares(workers: int, engines: int, groups_per_worker: int) -> None:
    clock = Clock()
    made = [Busy(clock) for _ in range(engines)]
    asyncio.run(roll_out(clock, made, workers, groups_per_worker))
    for shares in ([engine.groups for engine in made], [engine.load for engine in made]):
        assert max(shares) / np.mean(shares) < 1.3, shares


def test_a_slow_engine_gets_less() -> None:
    clock = Clock()
    slow, *others = [Busy(clock, speed=16), *(Busy(clock, speed=64) for _ in range(3))]
    asyncio.run(roll_out(clock, [slow, *others], workers=16, groups_per_worker=2))
    assert slow.groups < 0.6 * np.mean([engine.groups for engine in others])


def test_an_engine_without_a_queue_length_delays_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.handles.engine_pool.QUEUE_QUERY_S", 0.01)
    clock = Clock()
    made = [Busy(clock, tells=False), Busy(clock)]
    asyncio.run(roll_out(clock, made, workers=2, groups_per_worker=2, rounds=5))
    assert min(engine.groups for engine in made) > 0


async def test_turns_of_an_episode_stay_at_one_engine() -> None:
    clock = Clock()
    made = [Busy(clock) for _ in range(4)]
    pool = EnginePool("policy", {str(i): Handle(e) for i, e in enumerate(made)}, 60)

    async def turns(session: str) -> None:
        for _ in range(5):
            await pool.generate(replace(REQUEST, session=session, num_samples=1))

    everyone = asyncio.gather(*(turns(f"group {i}") for i in range(40)))
    await asyncio.gather(clock.run(everyone), everyone)  # type: ignore[arg-type]
    assert sorted(name for engine in made for name in set(engine.sessions)) == sorted(
        f"group {i}" for i in range(40)
    )
    assert max(engine.groups for engine in made) < 2 * 5 * 40 / len(made)


async def test_a_session_leaves_an_engine_that_is_overloaded_or_gone() -> None:
    clock = Clock()
    busy, idle = Busy(clock, speed=0), Busy(clock)
    homely = replace(REQUEST, session="s", num_samples=1)
    handles = {"busy": Handle(busy)}
    pool = EnginePool("policy", dict(handles), 60)
    stuck = [asyncio.create_task(pool.generate(homely)) for _ in range(17)]
    await asyncio.sleep(0.01)
    handles["idle"] = Handle(idle)
    pool.update(dict(handles))
    answer = asyncio.create_task(pool.generate(homely))
    await clock.run(answer)
    assert (busy.groups, idle.groups) == (17, 1)
    pool.update({"busy": handles["busy"]})
    stuck.append(asyncio.create_task(pool.generate(homely)))
    await asyncio.sleep(0.01)
    assert busy.groups == 18  # its home is no longer in the pool
    for task in stuck:
        task.cancel()
