"""Turns on shared GPUs, over hours on a simulated clock.

Engines, their clients' retries and deadlines, and the locks are real; the servers are simulated
and take seconds to release and restore their memory, like the learner's computation.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from actors.sglang import hosted
from actors.sglang.client import SglangClient
from actors.sglang.config import SglangConfig
from actors.sglang.turns import TurnTakingEngine
from distill.engine import GenerateRequest, ScoreRequest
from distill.gpu_turn import GpuTurn
from distill.sampling import TrainSampling
from tests.simulation import SimulatedLoop, simulated_time
from tests.tiny import TinyPair

RELEASE_S, RESUME_S, SCORE_S, TOKEN_S, LEARN_S = 2.0, 3.0, 1.0, 3.0, 40.0


class Gpus:
    """Servers with memory on the GPUs, and the number of releases."""

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self.changes = 0


class Server:
    """Running server process."""

    api_key = admin_api_key = "key"
    running = True

    def __init__(self, name: str, turn: GpuTurn) -> None:
        self.url, self.turn = name, turn

    async def ready(self) -> None:
        """Do nothing: the server is ready."""

    def exit_report(self) -> str:
        return "it has not ended"

    def stop(self) -> None:
        self.turn.close()


def client_of(gpus: Gpus) -> type[SglangClient]:
    class Client(SglangClient):
        """Client and server of this name."""

        def __init__(self, url: Any, **settings: Any) -> None:
            super().__init__(url, **settings)
            self._name = url()

        async def _send(
            self, path: str, payload: bytes | None, key: str | None
        ) -> tuple[int, bytes]:
            body = json.loads(payload or b"{}")
            match path:
                case "/model_info":
                    answer: Any = {"weight_version": "0"}
                case "/server_info":
                    answer = {"max_req_input_len": 1 << 20}
                case "/v1/tokenize":
                    answer = {"tokens": [[1]] if "prompt" in body else [1]}
                case "/generate":
                    assert gpus.awake == {self._name}
                    answer = await self._generate(body)
                    assert gpus.awake == {self._name}, "released under a call"
                case "/release_memory_occupation":
                    await asyncio.sleep(RELEASE_S)
                    gpus.awake.remove(self._name)
                    gpus.changes += 1
                    answer = {}
                case "/resume_memory_occupation":
                    assert not gpus.awake, "two servers on the GPUs"
                    gpus.awake.add(self._name)
                    await asyncio.sleep(RESUME_S)
                    answer = {}
                case _:
                    answer = {}
            return 200, orjson.dumps(answer)

        async def _generate(self, body: dict[str, Any]) -> list[Any]:
            params = body["sampling_params"]
            if isinstance(params, list):
                await asyncio.sleep(SCORE_S)
                asked = zip(body["input_ids"], params, body["logprob_start_len"], strict=True)
                return [scored(ids[start:], p["temperature"]) for ids, p, start in asked]
            length = params["max_new_tokens"]
            await asyncio.sleep(length * TOKEN_S)
            meta = {
                "finish_reason": {"type": "length", "length": length},
                "output_token_logprobs": [[-1.5, 7, None]] * length,
                "weight_version": "0",
            }
            return [{"output_ids": [7] * length, "meta_info": meta}]

    return Client


def scored(ids: list[int], temperature: float) -> dict[str, Any]:
    logprobs = [[-(1 + i % 5) / temperature, i, None] for i in ids]
    logprobs[0][0] = None
    return {"meta_info": {"input_token_logprobs": logprobs}}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLoop]:
    with simulated_time(monkeypatch) as loop:
        yield loop


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(hosted, "SglangClient", client_of(gpus))
    return gpus


async def engines_on(gpus: Gpus, number: int, pair: TinyPair, path: Path) -> list[TurnTakingEngine]:
    """Engines that have started one after the other, each in its turn."""
    made = []
    for i in range(number):
        turn = GpuTurn(path / "gpus.turn")
        await turn.acquire_async()
        gpus.awake.add(f"server {i}")
        server: Any = Server(f"server {i}", turn)
        engine = TurnTakingEngine(SglangConfig(model=pair.student, device="cpu"), server=server)
        await engine.health()
        made.append(engine)
    return made


async def spent(engines: list[TurnTakingEngine]) -> Counter[str]:
    """Costs of the engines' turns since the last call."""
    return sum([Counter(await engine.turns()) for engine in engines], Counter[str]())


ROW = ScoreRequest(tokens_T=np.arange(3, 11, dtype=np.int32), start=1, temperatures=(0.7,))
ASK = GenerateRequest(
    prompt_tokens_T=np.arange(3, 11, dtype=np.int32),
    sampling=TrainSampling(temperature=0.7, max_new_tokens=100), num_samples=1, seed=0,
)  # fmt: skip


def test_teachers_without_a_pause_have_equal_turns_that_cost_little(
    loop: SimulatedLoop, gpus: Gpus, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    answered, longest, lasts_s = Counter[int](), 0.0, 3000.0

    async def client(number: int, engine: TurnTakingEngine) -> None:
        nonlocal longest
        while loop.now < end:
            asked = loop.now
            await engine.score([ROW])
            answered[number] += 1
            longest = max(longest, loop.now - asked)

    async def all_of_it() -> None:
        await asyncio.gather(*(client(i, e) for i, e in enumerate(engines) for _ in range(4)))

    engines = loop.run_until_complete(engines_on(gpus, 3, tiny_pair, tmp_path))
    end, before = loop.now + lasts_s, gpus.changes
    loop.run_until_complete(all_of_it())
    changing_s = (gpus.changes - before) * (RELEASE_S + RESUME_S)
    assert 0 < changing_s < 0.15 * lasts_s
    assert min(answered.values()) > 0.25 * answered.total()
    assert longest < 0.1 * lasts_s, "one teacher waited for its turn for longer than two turns"


async def learn(turn: GpuTurn, gpus: Gpus, loop: SimulatedLoop) -> float:
    """A learner's computation in its turn; returns the seconds that it waited for the turn."""
    asked = loop.now
    await turn.acquire_async()
    waited = loop.now - asked
    for _ in range(int(LEARN_S)):
        assert not gpus.awake, "a server is on the learner's GPUs"
        await asyncio.sleep(1)
    turn.release()
    return waited


def test_a_step_of_learner_policy_and_teacher_is_a_turn_of_each(
    loop: SimulatedLoop, gpus: Gpus, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """The next samples are of the weights that the learner trained on the last ones."""
    steps, turn = 5, GpuTurn(tmp_path / "gpus.turn")

    async def group(number: int) -> None:
        await asyncio.sleep(number)
        policy, teacher = engines
        await policy.generate(ASK)
        await teacher.score([ROW])

    async def all_of_it() -> float:
        waited = 0.0
        for _ in range(steps):
            await asyncio.gather(*map(group, range(16)))
            waited = max(waited, await learn(turn, gpus, loop))
        return waited

    engines = loop.run_until_complete(engines_on(gpus, 2, tiny_pair, tmp_path))
    loop.run_until_complete(all_of_it())  # the first change measures its cost
    before = gpus.changes
    loop.run_until_complete(spent(engines))
    waited = loop.run_until_complete(all_of_it())
    metrics, changes = loop.run_until_complete(spent(engines)), 2 * steps
    assert gpus.changes - before == metrics["turns/changes"] == changes
    assert metrics["turns/proof"] == pytest.approx(changes * SCORE_S)
    assert metrics["turns/seconds"] == pytest.approx(changes * (RELEASE_S + RESUME_S + SCORE_S))
    assert not loop.run_until_complete(spent(engines)).total()
    assert waited < 3 * (RELEASE_S + RESUME_S), "a teacher without calls kept its turn"


def test_a_learner_has_its_turn_among_samples_and_scores_that_never_pause(
    loop: SimulatedLoop, gpus: Gpus, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    """With max_staleness above 0, later groups are in flight when a step is complete."""
    turn, lasts_s, answered = GpuTurn(tmp_path / "gpus.turn"), 20_000.0, Counter[str]()

    async def client(number: int) -> None:
        policy, teacher = engines
        while loop.now < end:
            await policy.generate(ASK)
            await teacher.score([ROW])
            answered["engines"] += 1

    async def learner() -> float:
        waited = 0.0
        while loop.now < end:
            waited = max(waited, await learn(turn, gpus, loop))
            answered["learner"] += 1
        return waited

    async def all_of_it() -> float:
        async with asyncio.TaskGroup() as tasks:
            waited = tasks.create_task(learner())
            for number in range(8):
                tasks.create_task(client(number))
        return waited.result()

    engines = loop.run_until_complete(engines_on(gpus, 2, tiny_pair, tmp_path))
    end = loop.now + lasts_s
    waited = loop.run_until_complete(all_of_it())
    assert waited < 0.1 * lasts_s and min(answered.values()) > 10
