"""Slow parts are waited for and frozen ones are found: engines, learner, pushes, evaluations.

The tests simulate hours. Worker, queue, ledger, supervisor, stall detection, engine pool, engine
and its client are real and have a run's own deadlines; the server is simulated.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine
from cluster.base.outcomes import ActorHung, LearnerLost
from cluster.placement.roles import EVALUATOR, POLICY
from cluster.queue.journal import read_journal
from cluster.runtime.watchdog import STALL_AFTER_S
from cluster.weights.transport import Sending, collect
from distill.engine import GenerateRequest, ScoreRequest
from distill.errors import EngineError, EngineLost
from distill.handshake.comparison import CalibrationReport, Comparison
from distill.pace import Pace
from distill.sampling import EvalSampling, TrainSampling
from tests.conftest import TinyPair
from tests.simulated_run import VOCAB_SIZE, SimulatedRun
from tests.simulation import SimulatedActor, SimulatedLoop, simulated_time

TOKENS, SECONDS = 32_000, 1800.0
AGREES = Comparison(
    party="engine", reference="learner", temperature=0.7, num_tokens=8, max_gap=1e-6, mean_gap=1e-7,
    tolerance=1e-3,
)  # fmt: skip


class SlowServer(SglangClient):
    """A client of a server that takes half an hour for 32,000 tokens.

    As SGLang's, its /health answers when the scheduler has put out tokens or a chunk of a prefill,
    every few seconds. From `frozen_from` on nothing is answered.
    """

    def __init__(self, loop: SimulatedLoop, frozen_from: float) -> None:
        super().__init__(lambda: "http://slow", api_key=None, admin_api_key=None, deadline_s=1800)
        self._loop, self._frozen_from = loop, frozen_from
        self.asked = 0

    async def _send(self, path: str, payload: bytes | None, key: str | None) -> tuple[int, bytes]:
        if path == "/health":
            await self._work(3.0)
            return 200, b""
        if path == "/model_info":
            return 200, b'{"weight_version": "0"}'
        assert path == "/generate" and payload is not None
        self.asked += 1
        body = json.loads(payload)
        params = body["sampling_params"]
        if isinstance(params, list):
            return 200, b"[]"
        length, number = params["max_new_tokens"], params["n"]
        await self._work(length * SECONDS / TOKENS)
        meta = {
            "finish_reason": {"type": "length", "length": length},
            "output_token_logprobs": [[-1.5, 7, None]] * length,
            "weight_version": "0",
        }
        return 200, orjson.dumps([{"output_ids": [7] * length, "meta_info": meta}] * number)

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._loop.now > self._frozen_from:
            await asyncio.sleep(1e9)


class CompilingServer(SlowServer):
    """A server that compiles kernels for its first request; /health fails meanwhile."""

    def __init__(self, loop: SimulatedLoop, compiling_s: float) -> None:
        super().__init__(loop, float("inf"))
        self._compiling_s, self._compiled_at = compiling_s, float("-inf")

    async def _send(self, path: str, payload: bytes | None, key: str | None) -> tuple[int, bytes]:
        if path == "/generate" and not self.asked:
            self._compiled_at = self._loop.now + self._compiling_s
            await asyncio.sleep(self._compiling_s)
        elif self._loop.now < self._compiled_at:
            await asyncio.sleep(20)
            return 503, b""
        return await super()._send(path, payload, key)


class SlowEngine(SglangEngine):
    """An engine of that server, which loads no weights."""

    def __init__(self, client: SlowServer) -> None:
        super().__init__(
            client, model="slow", vocab_size=VOCAB_SIZE, context_length=40_000,
            dtype="float32", stops=None, weights=None,
        )  # fmt: skip
        self.client = client

    async def load_weights(self, weights: Any, version: int) -> float:
        return 0.0


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLoop]:
    with simulated_time(monkeypatch) as loop:
        yield loop


@pytest.fixture
def student(tiny_pair: TinyPair, tmp_path: Path) -> str:
    """A checkpoint with a context of 40,000 tokens, which is not loaded."""
    directory = tmp_path / "student"
    directory.mkdir()
    for file in Path(tiny_pair.student).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 40_000
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def run_of(
    loop: SimulatedLoop,
    out: Path,
    student: str,
    frozen_from: Callable[[int, int], float] = lambda _index, _attempt: float("inf"),
    **settings: Any,
) -> SimulatedRun:
    """Two groups a step of one response of 32,000 tokens each, two engines, and one worker."""

    def engine(_run: SimulatedRun, index: int, attempt: int) -> SlowEngine:
        return SlowEngine(SlowServer(loop, frozen_from(index, attempt)))

    async def agree(*_parties: Any) -> CalibrationReport:  # this server scores nothing
        return CalibrationReport(comparisons=(AGREES,))

    return SimulatedRun(
        loop, out / "run", student, engine=engine, examine=agree, policy_engines=2,
        prompts_per_step=2, group_size=2, max_new_tokens=TOKENS, steps=10, max_staleness=0,
        **settings,
    )  # fmt: skip


def events(run: SimulatedRun, *kinds: str) -> list[Mapping[str, Any]]:
    lines = (Path(run.config.out) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] in kinds]


def leased_once(run: SimulatedRun) -> bool:
    """True if every group was leased, and delivered, once at most, and none was set aside."""
    journal = list(read_journal(Path(run.config.out) / "ledger.jsonl"))
    leases = [event for event in journal if event["event"] == "lease"]
    kinds = {event["event"] for event in journal}
    first = all(attempt == 1 for event in leases for attempt in event["attempts"])
    return bool(leases) and first and kinds.isdisjoint({"dup", "late", "set_aside"})


def test_a_group_that_takes_half_an_hour_is_waited_for(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    run = run_of(loop, tmp_path, student)
    assert STALL_AFTER_S * 2 < run.config.queue.lease_s < SECONDS, "no deadline is long enough"
    began = loop.now
    assert sorted(run.step()) == [0, 1]
    assert SECONDS <= loop.now - began < SECONDS + 30
    assert not events(run, "death")
    asked = [member.handle.plain.client.asked for member in run.members()]
    assert sum(asked) == 2, "a group was sampled twice"
    assert leased_once(run)


SAMPLE = GenerateRequest(
    prompt_tokens_T=np.arange(3, 19, dtype=np.int32),
    sampling=TrainSampling(temperature=0.7, max_new_tokens=TOKENS), num_samples=1, seed=0,
)  # fmt: skip


@pytest.mark.parametrize(("compiling_s", "dead_after_s"), [(400.0, None), (1e9, 600.0)])
def test_heartbeats_are_answered_while_kernels_compile_as_long_as_a_start_may_take(
    loop: SimulatedLoop, compiling_s: float, dead_after_s: float | None
) -> None:
    engine = SlowEngine(CompilingServer(loop, compiling_s))

    async def beat_until_sampled() -> float | None:
        began, sampling = loop.now, loop.create_task(engine.generate(SAMPLE))
        beats = 0
        while not sampling.done():
            asked, before = loop.now, beats
            try:
                beats = await engine.health()
            except EngineLost:
                return asked - began
            assert loop.now - asked < 60 and beats > before, "a supervisor would terminate it"
            await asyncio.sleep(2)
        return None

    lost_at = loop.run_until_complete(beat_until_sampled())
    assert lost_at == (dead_after_s and pytest.approx(dead_after_s, abs=30))


def test_a_frozen_engine_is_found_and_another_samples_its_group(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    """The first engine's scheduler freezes ten minutes into its answer."""
    freeze = 600.0

    def frozen_from(index: int, attempt: int) -> float:
        return 1000 + freeze if (index, attempt) == (0, 0) else float("inf")

    run = run_of(loop, tmp_path, student, frozen_from)
    while loop.now < 1000 + freeze:
        run.fleet.driver.pause(10)
    assert not events(run, "death")
    assert sorted(run.step()) == [0, 1]
    [death] = events(run, "death")
    assert death["who"] == "policy engine 0" and "60 s" in death["why"]
    found_at = 1000 + freeze + run.fleet.supervisor.hang_after_s
    assert loop.now < found_at + SECONDS + 60, "another engine began later"
    assert leased_once(run), "the worker lost its lease"


def test_deadlines_follow_the_measured_pace() -> None:
    pace = Pace(0.25)
    assert pace.allowance_s(1000) == 250
    pace.note(seconds=3000, tokens=10_000)  # 0.3 s a token: the allowance is four times that
    assert pace.allowance_s(1000) == pytest.approx(1200)
    for _ in range(100):
        pace.note(seconds=10, tokens=10_000)
    assert pace.allowance_s(1000) == 250


class Patience(SlowServer):
    """A client that records the deadlines of its requests."""

    allowed: list[float]

    async def _request(self, *given: Any, **named: Any) -> Any:
        self.allowed.append(self._deadline_s + named.get("allowance_s", 0))
        return await super()._request(*given, **named)


def test_the_deadline_of_a_request_grows_with_its_tokens(loop: SimulatedLoop) -> None:
    client = Patience(loop, float("inf"))
    client.allowed = []
    engine = SlowEngine(client)
    loop.run_until_complete(engine.generate(SAMPLE))
    assert client.allowed == [1800 + TOKENS * 0.25]
    chains = [ScoreRequest(tokens_T=np.full(30_000, 7, np.int32), start=1, temperatures=(0.7,))]
    with pytest.raises(EngineError):  # this server scores nothing
        loop.run_until_complete(engine.score(chains * 16))
    assert max(client.allowed[1:]) == 1800 + 16 * 30_000 * 0.002


# --- the learner, pushes, evaluations ------------------------------------------------------------


def test_a_learner_s_step_may_last_while_it_makes_progress(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    run = run_of(loop, tmp_path, student, no_progress_s=100)
    began = loop.now
    step = run.fleet.learner.step.remote([90.0] * 8)
    assert run.fleet.driver.ask_learner("the learner's step", step) == "trained"
    assert loop.now - began == pytest.approx(720, abs=2)
    assert not events(run, "death")
    began = loop.now
    step = run.fleet.learner.step.remote([90.0, 1e6])
    with pytest.raises(LearnerLost):
        run.fleet.driver.ask_learner("the learner's step", step)
    assert loop.now - began == pytest.approx(190, abs=4)


def test_a_frozen_learner_is_found_by_its_heartbeat(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    run = run_of(loop, tmp_path, student)
    run.fleet.driver.pause(10)
    step = run.fleet.learner.step.remote([100.0] * 100)
    run.fleet.learner.freeze()
    began = loop.now
    with pytest.raises(LearnerLost):
        run.fleet.driver.ask_learner("the learner's step", step)
    assert loop.now - began < run.fleet.supervisor.hang_after_s + 10


class Receiver:
    """An engine that loads weights in so many seconds."""

    async def load_weights(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return 1.0


class Sends(Sending):
    """A push that sends a bucket to linked engines every nine seconds."""

    linked = True

    def __init__(self, loop: SimulatedLoop, buckets: int) -> None:
        super().__init__(timeout_s=0)
        for i in range(buckets):
            loop.call_later(9.0 * (i + 1), self._send)

    def _send(self) -> None:
        self.sent += 1

    def _run(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("buckets", "engines"), [(10, 1), (0, 10)])
def test_a_push_may_last_while_it_makes_progress(
    loop: SimulatedLoop, buckets: int, engines: int
) -> None:
    """Ten buckets to one engine, or ten engines in sequence, nine seconds each."""
    began, waits = loop.now, list[float]()
    pending = {
        f"engine {i}": SimulatedActor(loop, Receiver).load_weights.remote(9.0 * (buckets or i + 1))
        for i in range(engines)
    }
    answers = collect(
        pending, 10, Sends(loop, buckets) if buckets else None,
        waiting=lambda: waits.append(loop.now),
    )  # fmt: skip
    assert not answers.failures and list(answers.values) == list(pending)
    assert loop.now - began == pytest.approx(90, abs=1)
    assert max(b - a for a, b in pairwise(waits)) < 1, "`waiting` was not called"


def test_a_push_without_progress_is_given_up(loop: SimulatedLoop) -> None:
    """The fourth bucket has the same deadline as the first."""
    began = loop.now
    loading = SimulatedActor(loop, Receiver).load_weights.remote(1e9)
    answers = collect({"engine": loading}, 10, Sends(loop, 3))
    assert answers.failures.keys() == {"engine"}
    assert loop.now - began == pytest.approx(37, abs=1)


def evaluation(run: SimulatedRun, evaluator: Any) -> Any:
    """A call of the evaluator."""
    sampling = EvalSampling(temperature=0, max_new_tokens=TOKENS)
    pool = run.fleet.pool(POLICY, run.fleet.supervisor.hang_after_s)
    return evaluator.evaluate.remote(pool, sampling, {}, 0)


def test_an_evaluation_may_last_while_its_engines_make_progress(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    run = run_of(loop, tmp_path, student, eval_every=5, no_progress_s=300)
    began = loop.now
    asked = run.fleet.evaluator_calls.ask("evaluation", partial(evaluation, run))
    evaluated = run.fleet.driver.wait_for(asked)
    assert evaluated.metrics["eval/response_length"] == TOKENS
    assert SECONDS <= loop.now - began < SECONDS + 60
    assert not events(run, "death")


def test_an_evaluation_without_progress_is_found_while_engines_work_for_others(
    loop: SimulatedLoop, tmp_path: Path, student: str
) -> None:
    run = run_of(loop, tmp_path, student, eval_every=5, no_progress_s=300)

    async def never(*_given: Any) -> None:
        await asyncio.Event().wait()

    [evaluator] = run.fleet.supervisor.serving(EVALUATOR).values()
    evaluator.plain._evaluator.evaluate = never
    began = loop.now
    with pytest.raises(ActorHung):
        asked = run.fleet.driver.answer("evaluation", evaluation(run, evaluator), worker=EVALUATOR)
        run.fleet.driver.wait_for(asked)
    assert 300 <= loop.now - began < 320
    assert all(
        run.fleet.supervisor.since_progress_s()[member.name] < 10 for member in run.members()
    )
