"""Servers with turns on the same GPUs: one is awake, and verifies its weights when it wakes."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.config import SglangConfig
from actors.sglang.installed import sglang_installed
from actors.sglang.turns import TurnTakingEngine
from distill.engine import CheckpointDirectory, ScoreRequest
from distill.errors import EngineError, EngineLost
from distill.gpu_turn import GpuTurn
from tests.tiny import TinyPair, tiny_model_dir
from tests.waiting import DEADLINE_S

needs_sglang = pytest.mark.skipif(not sglang_installed(), reason="SGLang is not installed")

# Takes the turn, starts a child that holds it too, prints its id, and waits.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from distill.gpu_turn import GpuTurn

turn = GpuTurn(Path(sys.argv[1]))
turn.acquire()
waits = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(waits, pass_fds=[turn.file], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


async def test_a_turn_is_one_server_s_and_the_next_is_another_s(tmp_path: Path) -> None:
    turns = [GpuTurn(tmp_path / "turns" / "a.turn") for _ in range(3)]
    order: list[int] = []

    async def server(number: int) -> None:
        for _ in range(5):
            await turns[number].acquire_async()
            order.append(number)
            taken = len(order)
            while len(order) < 12 and not turns[number].wanted:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # time for others to take it by mistake
            assert len(order) == taken
            turns[number].release()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*map(server, range(3)))
    assert sorted(order) == sorted([0, 1, 2] * 5)
    assert all(len({*order[i : i + 3]}) == 3 for i in range(0, 12, 3)), "one was passed over"


async def test_a_cancelled_wait_leaves_the_queue_of_the_turn(tmp_path: Path) -> None:
    holder, waits = GpuTurn(tmp_path / "a"), GpuTurn(tmp_path / "a")
    holder.acquire()
    waiting = asyncio.create_task(waits.acquire_async())
    while not holder.wanted:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not holder.wanted
    holder.release()
    waits.acquire()


async def test_the_turn_of_a_dead_process_ends_when_its_server_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a"
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    waits = GpuTurn(path)
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(waits.acquire_async())
        await asyncio.sleep(0.3)
        assert not waiting.done(), "its server still has the GPUs"
        child.kill()
        await waiting


@asynccontextmanager
async def two_engines(pair: TinyPair, out: Path) -> AsyncIterator[list[TurnTakingEngine]]:
    """Engines of student and teacher with one turn; the second starts when the first sleeps."""
    made: list[TurnTakingEngine] = []
    try:
        for name, model in (("student", pair.student), ("teacher", pair.teacher)):
            config = SglangConfig(
                model=model, device="cpu", start_deadline_s=DEADLINE_S, turn=str(out / "gpus.turn"),
                log_path=str(out / f"{name}.log"), server_flags="--log-level-http info",
            )  # fmt: skip
            engine = await asyncio.to_thread(TurnTakingEngine, config)
            made.append(engine)
            await engine.health()
        yield made
    finally:
        for engine in made:
            await engine.close()


def rows(number: int) -> list[ScoreRequest]:
    tokens_NT = np.random.default_rng(number).integers(2, 150, size=(2, 24)).astype(np.int32)
    return [
        ScoreRequest(tokens_T=tokens_T, start=1, temperatures=(0.7, 1.0)) for tokens_T in tokens_NT
    ]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(of.user + of.system for of in times)


async def awake(engine: TurnTakingEngine) -> None:
    await engine.score(rows(0))


async def asleep(engine: TurnTakingEngine, other: TurnTakingEngine) -> None:
    """Wait until the engine sleeps, by having the other one take the turn."""
    await awake(engine)
    await awake(other)


@pytest.mark.slow
@needs_sglang
def test_engines_in_turns_score_as_they_do_alone(tiny_pair: TinyPair, tmp_path: Path) -> None:
    async def by_turns() -> list[list[np.ndarray]]:
        async with two_engines(tiny_pair, tmp_path) as engines:

            async def client(number: int) -> list[np.ndarray]:
                scores = await engines[number % 2].score(rows(number))
                beats = [await engine.health() for engine in engines]
                assert all(beats), "who sleeps, or waits for the turn, is not dead"
                return [score.logprobs_by_temperature[0] for score in scores]

            found = []
            for wave in range(3):
                numbers = range(8 * wave, 8 * wave + 8)
                found += await asyncio.gather(*map(client, numbers))
            for engine in engines:
                metrics = await engine.turns()
                assert metrics["turns/changes"] >= 1
                assert 0 < metrics["turns/proof"] < metrics["turns/seconds"]
            return found

    found = asyncio.run(asyncio.wait_for(by_turns(), DEADLINE_S))
    for number, scored in enumerate(found):
        model = (tiny_pair.student, tiny_pair.teacher)[number % 2]
        alone = EmbeddedEngine(model_path=model, device="cpu", threads=1)
        expected = asyncio.run(alone.score(rows(number)))
        for a_N, score in zip(scored, expected, strict=True):
            np.testing.assert_allclose(a_N, score.logprobs_by_temperature[0], atol=1e-4)
    for name in ("student", "teacher"):
        log = (tmp_path / f"{name}.log").read_text()
        asked = re.findall(r'"(?:POST|GET) /(\w+)[^"]*" 200', log)
        turns = [i for i, path in enumerate(asked) if path == "release_memory_occupation"]
        assert turns, "it never slept"
        for i in turns:
            end = (
                asked.index("continue_generation", i) if "continue_generation" in asked[i:] else -1
            )
            assert "generate" not in asked[i:end], "a server that sleeps answered a request"


@pytest.mark.slow
@needs_sglang
async def test_an_engine_with_other_weights_is_mute(tiny_pair: TinyPair, tmp_path: Path) -> None:
    other = tiny_model_dir(tmp_path, seed=9, hidden_size=32, layers=1)
    async with asyncio.timeout(DEADLINE_S):
        async with two_engines(tiny_pair, tmp_path) as (student, teacher):
            await asleep(student, teacher)
            server = student.server
            headers = {"Authorization": f"Bearer {server.admin_api_key}"}
            body = {"model_path": other}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{server.url}/update_weights_from_disk", json=body) as answer,
            ):
                assert answer.status == 200, await answer.text()
            with pytest.raises(EngineLost):
                await student.score(rows(1))
            with pytest.raises(EngineError, match=re.escape(tiny_pair.student)):
                await student.health()


@pytest.mark.slow
@needs_sglang
def test_new_weights_wake_an_engine_and_are_its_own_after_the_next_sleep(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    other = tiny_model_dir(tmp_path, seed=9, hidden_size=32, layers=1)

    async def all_of_it() -> list[list[np.ndarray]]:
        async with two_engines(tiny_pair, tmp_path) as (student, teacher):
            await asleep(student, teacher)
            before = await student.weight_checksums()
            await asleep(student, teacher)
            await student.load_weights(CheckpointDirectory(path=other), 1)
            after = await student.weight_checksums()
            assert before != after
            found = [await student.score(rows(1))]
            await asleep(student, teacher)
            assert await student.weight_checksums() == after
            found.append(await student.score(rows(1)))
            assert {score.version for scores in found for score in scores} == {1}
            return [[score.logprobs_by_temperature[0] for score in scores] for scores in found]

    found = asyncio.run(asyncio.wait_for(all_of_it(), DEADLINE_S))
    alone = EmbeddedEngine(model_path=other, device="cpu", threads=1)
    expected = asyncio.run(alone.score(rows(1)))
    for scored in found:
        for a_N, score in zip(scored, expected, strict=True):
            np.testing.assert_allclose(a_N, score.logprobs_by_temperature[0], atol=1e-4)


@pytest.mark.slow
@needs_sglang
async def test_a_server_that_dies_asleep_holds_no_turn(tiny_pair: TinyPair, tmp_path: Path) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with two_engines(tiny_pair, tmp_path) as (student, teacher):
            await asleep(student, teacher)
            lengths = [await engine.queue_length() for engine in (student, teacher)]
            assert lengths[0] > lengths[1] == 0, "who sleeps is asked last"
            before, began = cpu_seconds(student.server.pid), time.monotonic()
            await asyncio.sleep(4)
            used, seconds = cpu_seconds(student.server.pid) - before, time.monotonic() - began
            assert used < seconds / 4, "a server that sleeps spins on a core"
            os.kill(student.server.pid, 9)
            with pytest.raises(EngineLost):
                while True:
                    await student.health()
            await awake(teacher)
