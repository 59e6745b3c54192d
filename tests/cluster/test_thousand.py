"""Many actors: the number of calls grows as the number of actors, and a lost node is soon back."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from cluster.base.background import Background
from cluster.base.outcomes import RunFailed
from cluster.handles import calls
from cluster.handshake.handshake import handshake
from cluster.hosts.rollout_actor import RosterChange, WorkerStatus
from cluster.placement.roles import POLICY
from cluster.runtime.driver import Driver, Signals
from cluster.runtime.workers import Workers
from cluster.supervision.supervise import Member
from cluster.weights.publisher import Publisher
from cluster.weights.transport import PushSettings, Transport
from distill.engine import GenerateRequest, Sample, Score, ScoreRequest
from distill.handshake.comparison import CalibrationReport
from distill.records import TrainedGroups
from distill.tokenizer import TokenizerProbe
from distill.weights.model_weights import HeldWeights
from tests.conftest import TinyPair
from tests.simulated_run import (
    SimulatedEngine,
    SimulatedLearner,
    SimulatedRun,
    engine_info,
    logprobs_V,
)
from tests.simulation import SimulatedActor, SimulatedLoop, simulated_time

ENGINES, LOST, WORKERS = 120, 100, 8


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLoop]:
    with simulated_time(monkeypatch) as loop:
        yield loop


def test_a_node_of_a_hundred_engines_is_back_within_two_minutes(
    loop: SimulatedLoop, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    run = SimulatedRun(
        loop, tmp_path / "run", tiny_pair.student,
        start_s=lambda index, attempt: 60.0 + index / 20 if attempt else 1.0, tokens_per_s=2.0,
        policy_engines=ENGINES, rollout_workers=WORKERS, prompts_per_step=16, group_size=2,
        max_new_tokens=100, steps=1000,
    )  # fmt: skip
    run.step()
    learner = run.fleet.learner.plain
    assert run.serving() == ENGINES and not learner.pushes

    lost, died = run.members()[:LOST], loop.now
    for member in lost:
        member.handle.end()
    while run.serving() < ENGINES or loop.now == died:
        run.step()
    assert loop.now - died < 120

    names = [member.name for member in lost]
    for joined in (learner.pushes, run.examined):
        assert [set(engines) for engines in joined] == [set(names)], "not all at once"
    assert learner.forwards == 1
    handles = {member.name: member.handle for member in run.members()}
    assert all(known == handles for known in run.worker_rosters())


def test_an_engine_that_does_not_answer_its_handshake_delays_no_other(
    loop: SimulatedLoop, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    """The engine answers heartbeats, and its second start is healthy."""

    class Silent(SimulatedEngine):
        async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
            await asyncio.sleep(10_000)
            return await super().decode_score(requests)

    def engine(run: SimulatedRun, index: int, attempt: int) -> SimulatedEngine:
        kind = Silent if (index, attempt) == (3, 1) else SimulatedEngine
        return kind(engine_info(run.tokenizer), tokens_per_s=2.0)

    run = SimulatedRun(
        loop, tmp_path / "run", tiny_pair.student, engine=engine, policy_engines=12,
        prompts_per_step=4, group_size=2, max_new_tokens=100, steps=1000,
    )  # fmt: skip
    run.step()
    died = loop.now
    for member in run.members()[:8]:
        member.handle.end()
    while run.serving() < 12 or loop.now == died:
        run.step()
    pushes = [len(names) for names in run.fleet.learner.plain.pushes]
    assert pushes == [8, 7, 1], "not all that died, all but one, and that one after its restart"
    [line] = [line for line in run.lines if "not admitted" in line]
    assert "policy engine 3 " in line


def test_an_engine_that_dies_while_it_is_removed_is_not_restarted(
    loop: SimulatedLoop, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    run = SimulatedRun(
        loop, tmp_path / "run", tiny_pair.student, policy_engines=2, prompts_per_step=4,
        group_size=2, max_new_tokens=100, steps=1000,
    )  # fmt: skip
    run.step()
    leaving, removed = run.members()[-1], []

    async def remove_engines(names: list[str]) -> None:
        leaving.handle.end()
        await asyncio.sleep(60)
        removed.extend(names)

    run.fleet.learner.plain.remove_engines = remove_engines
    run.fleet.shrink(POLICY)
    while not removed:
        run.step()
    run.step()
    assert [member.index for member in run.members()] == [0]
    assert run.fleet.supervisor.expected(POLICY) == 1


@pytest.mark.parametrize("number", [2, 40])
def test_a_handshake_makes_as_many_calls_of_each_engine_and_one_of_the_learner(
    loop: SimulatedLoop, number: int
) -> None:
    engines: dict[str, Any] = {
        f"policy engine {i}": SimulatedEngine(engine_info(), 50) for i in range(number)
    }
    learner = SimulatedLearner(push_s=0)

    async def shake() -> CalibrationReport:
        return await handshake(
            policies=engines, teachers={}, learner=learner.logprobs,
            tokenizer=TokenizerProbe(texts=(), chat=None), temperature=0.7,
            learner_dtype="float32",
        )  # fmt: skip

    began = loop.now
    report = loop.run_until_complete(shake())
    report.require_agreement()
    assert learner.forwards == 1
    first, *others = (engine.calls for engine in engines.values())
    assert len(set(others)) == 1 and others[0] == first + 1  # they score their own samples too
    parties = {comparison.party for comparison in report.comparisons}
    assert all({f"{name} decode", f"{name} prefill"} <= parties for name in engines)
    assert loop.now - began < 5, "engines were asked in sequence"


def test_a_second_engine_s_decode_is_compared_with_its_own_prefill(loop: SimulatedLoop) -> None:
    class Unscaled(SimulatedEngine):
        async def generate(self, request: GenerateRequest) -> list[Sample]:
            return [
                replace(sample, logprobs_T=logprobs_V(1.0)[sample.tokens_T])
                for sample in await super().generate(request)
            ]

    kinds = {"policy engine 0": SimulatedEngine, "policy engine 1": Unscaled}
    shaking = handshake(
        policies={name: kind(engine_info(), 50) for name, kind in kinds.items()}, teachers={},
        learner=SimulatedLearner(0).logprobs, tokenizer=TokenizerProbe(texts=(), chat=None),
        temperature=0.7, learner_dtype="float32",
    )  # fmt: skip
    report = loop.run_until_complete(shaking)
    assert {(c.party, c.reference) for c in report.failures} == {
        ("policy engine 1 decode", "policy engine 1 prefill")
    }


class Acknowledges(Transport):
    """A transport whose engines load one a little after the other."""

    def describe(self) -> str:
        return "a transport"

    def start(self, weights: Any, version: int) -> dict[str, Any]:
        return {
            name: engine.load_weights.remote(i / 100, version)
            for i, (name, engine) in enumerate(self.engines.items())
        }


def test_the_work_of_a_push_grows_linearly_with_the_engines(
    loop: SimulatedLoop, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls, and references that the driver waits for, with 40 engines and with 400."""
    looked: list[int] = []
    wait = calls.wait

    def count(references: Sequence[Any], **how: Any) -> Any:
        looked.append(len(references))
        return wait(references, **how)

    def choose(_settings: Any, engines: Mapping[str, Any], _lenders: Any) -> list[Transport]:
        return [Acknowledges(engines)]

    monkeypatch.setattr(calls, "wait", count)
    monkeypatch.setattr("cluster.weights.publisher.choose_transports", choose)
    settings = PushSettings(
        choice="auto", served=False, device="cpu", directory="", model=tiny_pair.student,
        temperature=0.7, dtype="float32", probe_every=1, prove_every=0, timeout_s=60,
    )  # fmt: skip
    found = []
    for number in (40, 400):
        engines = {
            f"policy engine {i}": SimulatedActor(loop, SimulatedEngine, engine_info(), 50)
            for i in range(number)
        }

        def learnt(rows_D: Sequence[Any]) -> list[Any]:
            return [logprobs_V(r.temperature)[r.tokens_T[r.first_trained :]] for r in rows_D]

        publish = Publisher(engines, settings, learnt)
        weights = HeldWeights({})
        publish(weights, 0, TrainedGroups())
        before = sum(engine.asked for engine in engines.values())
        looked.clear()
        metrics = publish(weights, 1, TrainedGroups())
        assert metrics["push/engines"] == number and metrics["push/probe_gap"] < 1e-6
        asked = sum(engine.asked for engine in engines.values()) - before
        found.append((asked / number, sum(looked) / number, metrics["push/pause"]))
    (few_calls, few_looks, _), (many_calls, many_looks, pause_s) = found
    assert few_calls == many_calls == 2, "load and score"
    assert few_looks < 5 and many_looks < 5 + pause_s / 0.25


class Worker:
    """A rollout worker that records announcements of engines."""

    def __init__(self) -> None:
        self.roster: dict[str, dict[str, Any]] = {}
        self.heard: list[int] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def status(self) -> WorkerStatus:
        return WorkerStatus(groups=(), requests={"heard": len(self.heard)})

    async def update(self, change: RosterChange, max_groups: int, epoch: int) -> None:
        handles = [handle for pool in change.engines.values() for handle in pool.values()]
        self.heard.append(sum(handle is not None for handle in handles))
        self.roster = change.applied(self.roster)


class Office:
    """Serving workers, and the `Workers` that announces engines to them."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.members: list[Member] = []
        self.supervisor: Any = SimpleNamespace(
            members=lambda *_: self.members, changes=0, background=Background()
        )
        self.driver = Driver(supervisor=self.supervisor, signals=Signals(), deadline_s=60)
        self.workers = Workers(self.supervisor, self.driver, drained=print)

    def add(self, handle: Any) -> Member:
        spec: Any = SimpleNamespace(title=lambda index: f"rollout worker {index}")
        member = Member(spec=spec, index=len(self.members), handle=handle, attempt=0)
        self.members.append(member)
        return member

    def announce(self, **roster: Mapping[str, Any]) -> None:
        self.supervisor.changes += 1
        assert not self.workers.all_current
        self.workers.announce(roster, 4, 0, {})
        self._loop.let_pass(3)
        self.driver.pause(0)
        assert self.workers.all_current


def test_workers_get_all_engines_once_and_then_changes(loop: SimulatedLoop) -> None:
    office = Office(loop)
    workers = [office.add(SimulatedActor(loop, Worker)).handle for _ in range(3)]
    engines = {f"policy engine {i}": object() for i in range(50)}

    def announce() -> None:
        roster: dict[str, Any] = {POLICY: dict(engines), "teacher": {"teacher engine 0": 1}}
        office.announce(**roster)
        assert all(worker.plain.roster == roster for worker in workers)

    announce()
    engines["policy engine 7"] = object()  # restarted
    del engines["policy engine 8"], engines["policy engine 9"]
    announce()
    assert [worker.plain.heard for worker in workers] == [[51, 1]] * 3
    workers.append(office.add(SimulatedActor(loop, Worker)).handle)
    engines["policy engine 50"] = object()
    announce()
    assert [worker.plain.heard[-1] for worker in workers] == [1, 1, 1, 50]


def test_a_worker_that_missed_a_message_gets_all_engines_again(loop: SimulatedLoop) -> None:
    lost: list[bool] = []

    class Deaf(Worker):
        async def update(self, change: RosterChange, max_groups: int, epoch: int) -> None:
            if lost.pop():
                raise ActorUnavailableError("the connection broke", None)
            await super().update(change, max_groups, epoch)

    class Handle(SimulatedActor):
        def _as_ray_error(self, error: Exception) -> Exception:
            return error

    office, engines = Office(loop), {}
    deaf = office.add(Handle(loop, Deaf)).handle
    for i, misses in enumerate([False, True, False, False]):
        lost.append(misses)
        engines[f"policy engine {i}"] = i
        office.announce(**{POLICY: dict(engines)})
    assert deaf.plain.heard == [1, 3, 1]
    assert deaf.plain.roster == {POLICY: engines}


def test_a_worker_that_hangs_delays_no_other(loop: SimulatedLoop) -> None:
    office = Office(loop)
    members = [office.add(SimulatedActor(loop, Worker)) for _ in range(2)]
    office.announce()
    members[0].handle.freeze()
    office.supervisor.changes += 1
    office.workers.announce({}, 4, 0, {})
    loop.let_pass(3)
    assert not office.workers.all_current
    assert office.workers.statuses[members[1].name].requests == {"heard": 2}
    members[0].handle.end()
    loop.let_pass(3)
    assert list(office.workers.statuses) == [members[1].name]


def test_an_error_of_a_worker_ends_the_run(loop: SimulatedLoop) -> None:
    class Fails(Worker):
        async def run(self) -> None:
            raise ValueError("in the environment")

    office = Office(loop)
    office.add(SimulatedActor(loop, Fails))
    with pytest.raises(RunFailed):
        office.announce()
