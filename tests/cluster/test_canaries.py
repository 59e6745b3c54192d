"""Canaries: scorers that change during a run are found, terminated and kept out."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.embedded.reward_model import RewardAnswer
from cluster.base.background import Background
from cluster.base.outcomes import Interrupted
from cluster.config.opd import OpdConfig
from cluster.findings.finding import Finding
from cluster.handles import calls
from cluster.handles.engine_pool import EnginePool
from cluster.handles.local_actor import LocalActor
from cluster.placement.roles import REFERENCE, REWARD, ROLLOUT
from cluster.queue.group_queue import GroupQueue, WorkerEnd
from cluster.queue.journal import read_journal, replay
from cluster.queue.ledger_types import LedgerSettings
from cluster.queue.scoring import read_scoring
from cluster.runtime.canaries import Canaries, ScoredWrongly
from cluster.runtime.driver import Driver, Signals
from cluster.supervision.supervise import ActorSpec, Member, State, Supervisor, ready_call
from distill.engine import EngineInfo, Score, ScoreRequest
from distill.errors import CalibrationError, EngineError
from distill.records import TrainedGroups
from learner.canaries import CopyAnswer, CopyQuestion, watched
from learner.teachers import LocalTeachers
from tests.actors.prefix_engine import PrefixEngine
from tests.conftest import TinyPair
from tests.queues import queue_here
from tests.samples import engine_info, group, packed

DEADLINE_S = 60.0
T = 0.7
SETTINGS = LedgerSettings(groups_per_step=2, max_staleness=2, total_groups=12, lease_s=60.0)


class Frozen:
    """Models, named by salts, that answer in turns, as replicas behind one address do.

    `plant` changes the models, and sets by how much the log-probs drift with each call.
    """

    def __init__(self, *salts: int) -> None:
        self._salts: Sequence[int] = salts
        self._turn = 0
        self._drift = self._each = 0.0

    async def plant(self, *salts: int, drift: float = 0.0) -> None:
        self._salts, self._each = salts, drift

    async def info(self) -> EngineInfo:
        return engine_info()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        salt = self._salts[self._turn % len(self._salts)]
        self._turn += 1
        self._drift += self._each
        return [
            replace(
                score,
                logprobs_by_temperature=tuple(
                    logprobs_N - self._drift for logprobs_N in score.logprobs_by_temperature
                ),
            )
            for score in await PrefixEngine(salt).score(requests)
        ]


class Worker:
    """A rollout worker that forwards canaries."""

    def __init__(self) -> None:
        self._pool = EnginePool(REFERENCE, {}, DEADLINE_S)

    async def update(self, members: dict[str, Any], replicas: dict[str, int]) -> None:
        self._pool.update(members, replicas)

    async def canary(self, _role: str, engine: str, requests: Any, patience_s: float) -> Any:
        return await self._pool.score_with_next_batch(engine, requests, 0.05 if patience_s else 0.0)


class Holder:
    """A learner of two workers, each with a copy of a teacher; `plant` changes one of them."""

    def __init__(self, model: str) -> None:
        self._copies = [
            LocalTeachers({"maths": model}, dtype=torch.float32, device="cpu") for _ in range(2)
        ]
        self._watched = [watched(each, token_budget=4096) for each in self._copies]

    def canary(self, question: CopyQuestion) -> list[list[CopyAnswer]]:
        return [[each.answer(question) for each in of_rank] for of_rank in self._watched]

    def plant(self, rank: int) -> None:
        copy: Any = self._copies[rank].models["maths"]
        model = copy.model
        with torch.no_grad():
            next(model.parameters())[0, 0] += 0.01


class Noted(Background):
    """Records the tasks that are started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[asyncio.Task[None]] = []

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.started.append(task := super().start(coroutine))
        return task


class Judge:
    """A reward model whose first `failures` canaries fail."""

    def __init__(self, failures: int) -> None:
        self._failures = failures

    def canary(self, companies: Sequence[int] = (0,)) -> RewardAnswer:
        self._failures -= 1
        if self._failures >= 0:
            raise EngineError("no room for a batch")
        scores = [[0.5, -1.0] for _ in companies]
        return RewardAnswer(model="m", dtype="float32", digest="d", scores=scores)


class House:
    """Scorers of one role under the real supervisor, driver and queue.

    With `model` there is a learner with copies of it.
    """

    def __init__(self, path: Path, config: OpdConfig, model: str | None = None) -> None:
        self.learner = None if model is None else LocalActor(Holder, model)
        self.found: list[Finding] = []
        self.trusted = 0
        self.supervisor = Supervisor(
            print_line=print, record=lambda _event, **_fields: None,
            on_death=lambda _member, _why: None, hang_after_s=60, max_restarts=9,
        )  # fmt: skip
        self.supervisor.run_started = True
        self.supervisor.background = self.background = Noted()
        self._canaries: list[asyncio.Task[None]] = []
        self.signals = Signals()
        self.driver = Driver(
            supervisor=self.supervisor, signals=self.signals, deadline_s=DEADLINE_S
        )
        self.path = path / "ledger.jsonl"
        self.queue: GroupQueue = queue_here(SETTINGS, str(self.path), timeout_s=DEADLINE_S)
        self.canaries = Canaries(
            self,  # pyright: ignore[reportArgumentType] - what it needs of a fleet
            self.queue,
            config,
            [REFERENCE],
            found=self.found.append,
            trusted=self._mark_proven,
        )
        self.trained = TrainedGroups()
        self.version = 0

    def _mark_proven(self, step: int) -> None:
        self.trusted = step

    def add(self, role: str, index: int, handle: Any) -> Member:
        spec = ActorSpec(
            name=role, title=lambda index: f"{role} engine {index}",
            create=lambda _index, _attempt: LocalActor(Frozen, 1), heartbeat=ready_call, gated=True,
            start_deadline_s=60,
        )  # fmt: skip
        member = self.supervisor.adopt(spec, index, handle)
        member.state = State.READY
        return member

    def join(self, *engines: Sequence[int]) -> dict[str, str]:
        """Add engines of these models; return reasons of refusals. The others serve."""
        first = len(self.supervisor.members(REFERENCE))
        members = [
            self.add(REFERENCE, first + i, LocalActor(Frozen, *salts))
            for i, salts in enumerate(engines)
        ]
        refused = self.canaries.join(members)
        for member in members:
            if member.name not in refused:
                self.supervisor.admit(member)
        return refused

    def train(self, *by: int) -> None:
        """Train a step of two groups scored by these."""

        async def deliver() -> None:
            worker = WorkerEnd(self.queue, "a")
            for one in await worker.lease(2):
                await worker.put(one, *packed(group(one.group_id, scored_by=by)))

        asyncio.run(deliver())
        self.trained = self.queue.take(self.trained).after(self.trained)
        self.version += 1
        self.queue.publish(self.version, self.trained)

    def round(self) -> None:
        """Send a canary to all serving scorers, and wait until it is judged."""
        self._settle()  # a scorer without an answer would not be asked again
        before = len(self.background.started)
        try:
            self.canaries.after_step(self.version)
        finally:
            self._canaries = self.background.started[before:]
        self._settle()

    def _settle(self) -> None:
        for canary in self._canaries:
            self.driver.wait_for(canary)

    def plant(self, index: int, *salts: int, **how: float) -> None:
        [member] = [m for m in self.supervisor.members(REFERENCE) if m.index == index]
        calls.get(member.handle.plant.remote(*salts, **how), DEADLINE_S)

    def serving(self) -> list[str]:
        return list(self.supervisor.serving(REFERENCE))

    def train_again(self) -> None:
        """Rewind to the first step, for another learner."""
        self.trained, self.version = TrainedGroups(), 0
        calls.get(self.queue.actor.rewind.remote(self.trained, "the learner was replaced"))

    def close(self) -> None:
        self.driver.background.close()
        if self.learner is not None:
            self.learner.end()
        self.supervisor.end_all()
        self.queue.actor.end()


@pytest.fixture
def house(tmp_path: Path, opd: Callable[..., OpdConfig]) -> Iterator[Any]:
    made: list[House] = []

    def new(every: int = 1, model: str | None = None) -> House:
        estimator = "sampled" if model is None else "full"
        config = opd(temperature=T, verify_every=every, estimator=estimator)
        made.append(House(tmp_path, config, model))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_a_slow_drift_is_found(house: Any) -> None:
    """Consecutive canaries agree within their tolerance."""
    here = house()
    here.join([1])
    here.plant(0, 1, drift=8e-6)  # a twentieth of the tolerance, and half of that of the mean
    rounds = 0
    while not here.found:
        here.train(0)
        here.round()
        rounds += 1
        assert rounds < 20
    assert rounds >= 2
    with pytest.raises(ScoredWrongly) as raised:
        here.canaries.check()
    assert raised.value.before == rounds


def test_a_bad_answer_in_the_queue_counts_though_its_scorer_dies_before_the_last_canary(
    house: Any,
) -> None:
    here, resumed = house(), threading.Event()
    here.join([1])
    here.train(0)
    here.plant(0, 2)
    here.canaries.after_step(here.version)
    held = here.queue.actor.__ray_call__.remote(lambda _plain: resumed.wait(DEADLINE_S))
    here.driver.pause(2.0)  # the answer has arrived; the queue has not recorded it

    [engine] = here.supervisor.serving(REFERENCE).values()
    calls.kill(engine)

    async def release() -> None:
        await asyncio.sleep(0.2)
        resumed.set()

    here.background.start(release())
    with pytest.raises(ScoredWrongly) as raised:
        here.canaries.after_last(here.version)
    assert calls.get(held) and raised.value.before == 1 and len(here.found) == 1


def test_a_bad_replica_of_three_behind_one_address_is_found(house: Any) -> None:
    here = house()
    # At the start its first answers differ from one another.
    assert list(here.join([1, 1, 2])) == ["reference engine 0"]
    # Later it answers one of three canaries.
    assert here.join([1, 1, 1]) == {}
    here.plant(1, 1, 1, 2)
    rounds = 0
    while not here.found:
        here.train(0)
        here.round()
        rounds += 1
        assert rounds <= 3
    assert here.serving() == []


def test_an_engine_of_another_model_does_not_join(house: Any) -> None:
    here = house()
    assert list(here.join([1], [2], [1])) == ["reference engine 1"]
    assert list(here.join([2])) == ["reference engine 3"]
    assert here.join([1]) == {}


def test_verify_every_0_records_no_scorer_and_sends_no_canary(house: Any) -> None:
    here = house(every=0)
    assert here.join([1], [2]) == {} and here.canaries.replicas == {}
    here.canaries.after_step(10)
    here.canaries.after_last(here.version)
    calls.get(here.queue.actor.status.remote(), DEADLINE_S)  # the journal has begun
    assert [event["event"] for event in read_journal(here.path)] == ["start"]


def test_canaries_are_sent_by_a_worker_and_without_one_by_the_driver(house: Any) -> None:
    here = house()
    here.join([1])
    worker = LocalActor(Worker)
    serving = here.supervisor.serving(REFERENCE)
    calls.get(worker.update.remote(serving, here.canaries.replicas), DEADLINE_S)
    here.supervisor.admit(here.add(ROLLOUT, 0, worker))
    here.train(0)
    here.round()
    calls.kill(worker)
    here.train(0)
    here.round()
    answers = [event for event in read_journal(here.path) if event["event"] == "canary"]
    assert [event["rode"] for event in answers] == [False, False] and here.found == []


def test_a_copy_in_the_learner_proves_steps_until_it_changes(
    house: Any, tiny_pair: TinyPair
) -> None:
    here = house(model=tiny_pair.teacher, every=2)
    here.join([1])
    here.canaries.join_learner()
    here.train(0)
    here.train(0)
    here.round()
    assert here.trusted == 2 and here.found == []
    here.train(0)
    here.canaries.before_checkpoint(3)
    assert here.trusted == 2, "the engine has not been asked"
    here.canaries.before_checkpoint(3)  # once more sends nothing
    calls.get(here.learner.plant.remote(1), DEADLINE_S)
    here.train(0)
    with pytest.raises(ScoredWrongly) as raised:
        here.round()
    assert raised.value.before == 4
    [finding] = here.found
    copy = "learner worker 1's copy of teacher maths"
    assert copy in finding.text and "embed_tokens.weight" in finding.text
    scoring = read_scoring(here.path)
    assert scoring is not None and not scoring.holds and scoring.bad == {copy: [4]}
    # Another learner loads right copies, and trains all steps again.
    here.learner.end()
    here.learner = LocalActor(Holder, tiny_pair.teacher)
    here.train_again()
    here.canaries.join_learner()
    here.train(0)
    here.train(0)
    here.round()
    scoring = read_scoring(here.path)
    assert scoring is not None and scoring.holds and scoring.trained == 4 and here.trusted == 2
    again = replay(here.path).ledger
    assert again is not None and len(again.provenance.in_learner) == 2


def test_a_reward_model_that_fails_its_first_canary_is_asked_again(house: Any) -> None:
    here = house()
    here.supervisor.admit(here.add(REWARD, 0, LocalActor(Judge, 2)))
    here.canaries.ask_new_reward_models()
    here.driver.wait_for(here.background.started[-1])
    here.canaries.after_last(1)
    here.canaries.after_last(2)
    answers = [event for event in read_journal(here.path) if event["event"] == "canary"]
    assert [event["step"] for event in answers] == [2]


def test_copies_whose_canary_a_signal_interrupts_are_asked_at_the_end(
    house: Any, tiny_pair: TinyPair
) -> None:
    here = house(model=tiny_pair.teacher)
    here.canaries.join_learner()
    here.train()
    here.signals.received = signal.SIGINT
    with pytest.raises(Interrupted):
        here.canaries.before_checkpoint(1)
    with here.driver.ending(DEADLINE_S):
        here.canaries.after_last(1)
    assert here.trusted == 1


def test_a_new_learner_s_copy_must_equal_the_first_one(house: Any, tiny_pair: TinyPair) -> None:
    here = house(model=tiny_pair.teacher)
    here.canaries.join_learner()
    here.learner.end()
    here.learner = LocalActor(Holder, tiny_pair.student)
    with pytest.raises(CalibrationError):
        here.canaries.join_learner()
