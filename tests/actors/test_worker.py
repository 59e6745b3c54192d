"""The rollout worker: its requests, its deliveries, and its end."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from actors.rollout.worker import ActiveGroup, RolloutWorker
from distill.columns import GroupColumns
from distill.engine import GenerateRequest, Sample, SamplingModel, Score, ScoreRequest, ScoringModel
from distill.envs.base import Env, EnvGroupBuilder, EnvStream, StepResult
from distill.errors import EngineError
from distill.group_share import GroupShare, TeacherSamples
from distill.records import Lease, TrajectoryGroupMeta
from distill.sampling import TrainSampling
from distill.types import TokenArray, TrajectoryGroup
from tests.actors.prefix_engine import PrefixEngine
from tests.samples import TEMPERATURE, ids
from tests.tiny import VOCAB_SIZE
from tests.waiting import DEADLINE_S

SAMPLING = TrainSampling(temperature=TEMPERATURE, max_new_tokens=5)
POLICY = PrefixEngine(0)


@dataclass
class Turns(Env):
    """Turns after the same observation each; each pays its first token."""

    prompt_T: TokenArray
    turns: int = field(default=1, kw_only=True)

    async def initial_observation(self) -> TokenArray:
        return self.prompt_T

    async def step(self, sample: Sample) -> StepResult:
        self.turns -= 1
        return StepResult(
            reward=float(sample.tokens_T[0]), observation_T=self.prompt_T if self.turns else None
        )


@dataclass(frozen=True, kw_only=True)
class Group(EnvGroupBuilder):
    envs: Sequence[Env]

    def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
        return self.envs


def pair(_group_id: int, prompt_T: TokenArray) -> Sequence[Env]:
    """Two members with the same prompt."""
    return [Turns(prompt_T), Turns(prompt_T)]


class Dataset(EnvStream):
    """Even groups name the teacher `even`, odd ones `odd`; problems follow from the group id.

    `envs` makes the members of a group, given its id and its prompt.
    """

    def __init__(
        self,
        envs: Callable[[int, TokenArray], Sequence[Env]] = pair,
        teacher_tokens_T: TokenArray | None = None,
    ) -> None:
        self._envs, self._teacher_tokens_T = envs, teacher_tokens_T

    def builder(self, group_id: int) -> EnvGroupBuilder:
        return Group(
            envs=self._envs(group_id, ids(3, 4, 5 + group_id)),
            teacher="odd" if group_id % 2 else "even", teacher_tokens_T=self._teacher_tokens_T,
        )  # fmt: skip

    def describe(self, group_id: int) -> str:
        return f"problem {group_id + 1}"

    def source(self, group_id: int) -> str:
        return "primes"


@dataclass
class Sink:
    """Lease a number of groups, then close; record deliveries."""

    groups: int
    leased: int = 0
    most_under_way: int = 0
    done: list[TrajectoryGroup] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    closes: bool = True
    there: Mapping[int, TrajectoryGroup] = field(
        default_factory=dict
    )  # stored groups, to be rescored

    async def lease(self, max_groups: int) -> Sequence[Lease]:
        if self.leased == self.groups and not self.closes:
            await asyncio.Event().wait()
        first = self.leased
        self.leased = min(self.groups, first + max_groups)
        in_progress = self.leased - len(self.done) - len(self.failed)
        self.most_under_way = max(self.most_under_way, in_progress)
        return [Lease(group_id=i, attempt=1, epoch=1) for i in range(first, self.leased)]

    async def put(self, lease: Lease, meta: TrajectoryGroupMeta, columns: GroupColumns) -> None:
        assert lease.group_id == meta.group_id
        self.done.append(meta.group(columns.trajectories()))

    async def sampled(self, lease: Lease) -> TrajectoryGroup | None:
        return self.there.get(lease.group_id)

    async def fail(self, lease: Lease, reason: str) -> None:
        self.failed[lease.group_id] = reason

    async def report_user_code(self, problems: Mapping[int, str]) -> None:
        pass


@dataclass
class DelayedSink(Sink):
    """Sink that records a report after a delay."""

    known: Mapping[int, str] = field(default_factory=dict)
    reports: int = 0

    async def report_user_code(self, problems: Mapping[int, str]) -> None:
        self.reports += 1
        for _ in range(3):
            await asyncio.sleep(0)
        self.known = problems


def run(
    sink: Sink, *, teachers: Mapping[str, ScoringModel], **changes: Any
) -> dict[int, TrajectoryGroup]:
    settings: dict[str, Any] = {
        "policy": POLICY, "teachers": teachers, "sink": sink, "dataset": Dataset(),
        "sampling": SAMPLING, "seed": 1, "max_groups": 2,
    }  # fmt: skip
    worker = RolloutWorker(**settings | changes)
    asyncio.run(asyncio.wait_for(worker.run(), DEADLINE_S))
    return {group.group_id: group for group in sink.done}


def expect_scored_by(engine: PrefixEngine, group: TrajectoryGroup, field_name: str) -> None:
    for segment in group.segments():
        logprobs_T = getattr(segment, field_name)
        for t in np.flatnonzero(segment.action_mask_T):
            log_p_V = engine.distribution_V(segment.tokens_T[:t], TEMPERATURE)
            assert logprobs_T[t] == log_p_V[segment.tokens_T[t]]


def test_every_lease_is_rolled_out_scored_and_put() -> None:
    sink, teacher = Sink(groups=7), PrefixEngine(1)
    done = run(sink, teachers={"": teacher})
    assert sorted(done) == list(range(7)) and sink.most_under_way <= 2
    for group in done.values():
        expect_scored_by(POLICY, group, "behaviour_logprobs_T")
        expect_scored_by(teacher, group, "teacher_logprobs_T")
        assert {"time/rollout", "time/teacher"} <= group.metrics.keys()
        assert all(segment.teacher_top is None for segment in group.segments())
        assert all(segment.reference_logprobs_T is None for segment in group.segments())


def test_a_stored_group_is_rescored_without_sampling() -> None:
    """Another teacher rescores it at the policy's listed tokens and at its own."""
    settings: dict[str, Any] = {
        "reference": PrefixEngine(3), "policy_top_k": 2, "teacher_top_k": 1,
    }  # fmt: skip
    before = run(Sink(groups=2), teachers={"": PrefixEngine(1)}, **settings)
    teacher, reference = PrefixEngine(4), PrefixEngine(5)
    sink = Sink(groups=2, there={1: before[1]})
    after = run(sink, teachers={"": teacher}, **settings | {"reference": reference})
    for group_id in (0, 1):
        expect_scored_by(teacher, after[group_id], "teacher_logprobs_T")
        expect_scored_by(reference, after[group_id], "reference_logprobs_T")
    assert after[1].metrics == before[1].metrics
    for old, new in zip(before[1].segments(), after[1].segments(), strict=True):
        assert np.array_equal(old.behaviour_logprobs_T, new.behaviour_logprobs_T)
        assert old.teacher_top is not None and new.teacher_top is not None
        assert new.policy_top_ids_NK is None and new.teacher_top.k == 3
        assert np.array_equal(old.teacher_top.ids_NK[:, :2], new.teacher_top.ids_NK[:, :2])
        assert not np.array_equal(old.teacher_top.ids_NK[:, 2], new.teacher_top.ids_NK[:, 2])


def test_segments_have_the_numbers_of_their_scorers() -> None:
    class Numbered(PrefixEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
            return [replace(s, scored_by=self._salt) for s in await super().score(requests)]

    done = run(Sink(groups=2), teachers={"": Numbered(7)}, reference=Numbered(3))
    for group in done.values():
        assert {segment.scored_by for segment in group.segments()} == {(7, 3)}
        assert group.scored_by == (3, 7)
    [group] = run(Sink(groups=1), teachers={"": PrefixEngine(7)}).values()
    assert group.scored_by == ()


class Sampling(PrefixEngine):
    """Mark samples with the sampler; record requests."""

    def __init__(self, salt: int) -> None:
        super().__init__(salt)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        self.asked.append(request)
        return [replace(s, sampled_by=self._salt) for s in await super().generate(request)]


def by_teacher(warmup_groups: int, vocab_size: int = VOCAB_SIZE) -> TeacherSamples:
    return TeacherSamples(
        warmup_groups=warmup_groups, share=0.0, groups_per_step=1, seed=0, vocab_size=vocab_size
    )


def test_groups_of_teacher_samples_are_not_scored() -> None:
    teachers = {"even": Sampling(1), "odd": Sampling(2)}
    settings: dict[str, Any] = {"teacher_samples": by_teacher(2), "reference": PrefixEngine(3)}
    done = run(Sink(groups=4), teachers=teachers, policy_top_k=2, **settings)
    assert [done[i].by_teacher for i in range(4)] == [True, True, False, False]
    for group_id, name in ((0, "even"), (1, "odd")):
        group = done[group_id]
        expect_scored_by(teachers[name], group, "behaviour_logprobs_T")
        assert group.source == "primes" and group.metrics.keys() == {"time/teacher_rollout"}
        for segment in group.segments():
            assert segment.teacher_logprobs_T is None and segment.reference_logprobs_T is None
            assert segment.policy_top_ids_NK is None and segment.teacher_top is None
            assert segment.scored_by == (group_id + 1,)
    for group_id in (2, 3):
        expect_scored_by(POLICY, done[group_id], "behaviour_logprobs_T")
    # Samples of a teacher that has drifted since are sampled again.
    again = Sampling(5)
    after = run(Sink(groups=1, there=done), teachers={"": again}, teacher_samples=by_teacher(1))
    expect_scored_by(again, after[0], "behaviour_logprobs_T")


def test_where_the_learner_asks_a_copy_the_teacher_scores_a_share() -> None:
    teachers, reference = {"even": PrefixEngine(1), "odd": PrefixEngine(2)}, PrefixEngine(3)
    scored = GroupShare(share=0.5, groups_per_step=4)
    settings: dict[str, Any] = {"reference": reference, "scored": scored}
    done = run(Sink(groups=8), teachers=teachers, **settings)
    asked = [i in scored for i in range(8)]
    assert sum(asked[:4]) == sum(asked[4:]) == 2
    for i, group in done.items():
        expect_scored_by(reference, group, "reference_logprobs_T")
        if i in scored:
            expect_scored_by(teachers["odd" if i % 2 else "even"], group, "teacher_logprobs_T")
        else:
            assert all(segment.teacher_logprobs_T is None for segment in group.segments())
    # Rescoring keeps the choice.
    moved = PrefixEngine(5)
    again = run(Sink(groups=8, there=done), teachers={"": moved}, **settings)
    for i, group in again.items():
        there = [segment.teacher_logprobs_T is not None for segment in group.segments()]
        assert set(there) == {i in scored}


def test_a_teacher_samples_after_its_own_context_in_every_turn() -> None:
    teacher = Sampling(1)

    hinted = Dataset(lambda _, prompt_T: [Further(prompt_T)], teacher_tokens_T=ids(9, 8, 7, 6))
    [group] = run(
        Sink(groups=1), teachers={"": teacher}, dataset=hinted, teacher_samples=by_teacher(1)
    ).values()
    [segment] = {s.tokens_T.tobytes(): s for s in group.segments()}.values()
    assert segment.tokens_T[:3].tolist() == [3, 4, 5], "the hint is trained after"
    seen_T = np.concatenate([ids(9, 8, 7, 6), segment.tokens_T[3:]])
    for t in np.flatnonzero(segment.action_mask_T):
        log_q_V = teacher.distribution_V(seen_T[: t + 1], TEMPERATURE)
        assert segment.behaviour_logprobs_T[t] == log_q_V[segment.tokens_T[t]]
    assert [len(request.prompt_tokens_T) for request in teacher.asked] == [4, 4 + 5 + 1]


def test_a_token_that_the_student_does_not_have_fails_the_group() -> None:
    sink = Sink(groups=1)
    run(sink, teachers={"": PrefixEngine(1)}, teacher_samples=by_teacher(1, vocab_size=3))
    assert "a sample of the teacher" in sink.failed[0]


@dataclass(frozen=True)
class Further(Env):
    """Two turns, the second after the first and a token more."""

    prompt_T: TokenArray
    seen: list[TokenArray] = field(default_factory=list)

    async def initial_observation(self) -> TokenArray:
        return self.prompt_T

    async def step(self, sample: Sample) -> StepResult:
        if self.seen:
            return StepResult(reward=0.0)
        self.seen.append(np.concatenate([self.prompt_T, sample.tokens_T, ids(11)]))
        return StepResult(reward=0.0, observation_T=self.seen[0])


def test_a_finished_member_is_scored_while_others_continue() -> None:
    teacher, first_scored = PrefixEngine(1), asyncio.Event()

    class Telling(PrefixEngine):
        async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
            first_scored.set()
            return await super().score(requests)

    class Waiting(PrefixEngine):
        """Sample second turns only after a member was scored: scoring whole groups would hang."""

        async def generate(self, request: GenerateRequest) -> list[Sample]:
            if request.num_samples == 1:
                await first_scored.wait()
            return await super().generate(request)

    one_and_two = Dataset(lambda _, prompt_T: [Turns(prompt_T, turns=turns) for turns in (1, 2)])
    [group] = run(
        Sink(groups=1), policy=Waiting(0), teachers={"": Telling(1)}, dataset=one_and_two
    ).values()
    assert [len(member.segments) for member in group.trajectories_G] == [1, 2]
    expect_scored_by(teacher, group, "teacher_logprobs_T")


def test_a_failed_group_is_returned_with_its_reason() -> None:
    sink = Sink(groups=4)
    run(sink, teachers={"even": PrefixEngine(1), "maths": PrefixEngine(2)}, max_groups=1)
    assert [group.group_id for group in sink.done] == [0, 2] and sink.failed.keys() == {1, 3}
    for reason in sink.failed.values():
        assert re.search(r"'odd'.*even, maths.*, in problem \d", reason)


class Broken(PrefixEngine):
    async def generate(self, request: GenerateRequest) -> list[Sample]:
        raise EngineError("it has gone")


def test_a_failure_of_an_engine_is_logged_once_without_its_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Sink(groups=2)
    run(sink, policy=Broken(0), teachers={})
    assert sink.failed.keys() == {0, 1}
    [line] = [r.getMessage() for r in caplog.records if r.name == "actors.rollout.worker"]
    assert "it has gone" in line and "\n" not in line


class BadBonuses(Turns):
    async def step(self, sample: Sample) -> StepResult:
        return StepResult(bonuses_T=np.full(len(sample.tokens_T), np.nan, np.float32))


def second_pays_nan(group_id: int, prompt_T: TokenArray) -> Sequence[Env]:
    return [BadBonuses(prompt_T) if group_id == 1 else Turns(prompt_T), Turns(prompt_T)]


def test_bad_data_of_an_environment_is_not_delivered() -> None:
    sink = Sink(groups=3)
    run(sink, teachers={}, dataset=Dataset(second_pays_nan))
    assert {group.group_id for group in sink.done} == {0, 2} and sink.failed.keys() == {1}
    assert "bonuses_T" in sink.failed[1] and "problem 2" in sink.failed[1]


class HangingPolicy(PrefixEngine):
    """Sample the first group, and no other."""

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        if request.prompt_tokens_T[-1] != 5:
            await asyncio.Event().wait()
        return await super().generate(request)


def worker_of(sink: Sink, policy: ScoringModel) -> RolloutWorker:
    return RolloutWorker(
        policy=policy, teachers={}, sink=sink, dataset=Dataset(), sampling=SAMPLING, seed=1,
        max_groups=2,
    )  # fmt: skip


async def test_a_group_that_its_teacher_samples_waits_at_the_teacher() -> None:
    """So a teacher that hangs or is too small is not mistaken for the policy."""
    worker = RolloutWorker(
        policy=POLICY, teachers={"": HangingPolicy(0)}, sink=Sink(groups=3, closes=False),
        dataset=Dataset(), sampling=SAMPLING, seed=1, max_groups=2, teacher_samples=by_teacher(3),
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(worker.run())
        while [group.stage for group in worker.active] != ["scoring", "scoring"]:
            assert not running.done()
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@dataclass
class Querying(Turns):
    """Queries a model about each sample."""

    model: SamplingModel

    async def step(self, sample: Sample) -> StepResult:
        request = GenerateRequest(
            prompt_tokens_T=self.prompt_T, sampling=SAMPLING, num_samples=1, seed=0
        )
        await self.model.generate(request)
        return await super().step(sample)


@pytest.mark.parametrize(("queried", "stage"), [("opponent", "scoring"), ("teacher", "sampling")])
async def test_an_environment_that_queries_a_model_waits_at_its_engine(
    queried: str, stage: str
) -> None:
    """So a model that hangs is suspected in place of the worker; here the policy is the teacher."""

    class Groups(Dataset):
        def builder(self, group_id: int) -> EnvGroupBuilder:
            return Queries(envs=())

    class Queries(Group):
        def make_envs(self, models: Mapping[str, SamplingModel]) -> Sequence[Env]:
            return [Querying(ids(3, 4, 5), models[queried]) for _ in range(2)]

    class Once(HangingPolicy):
        """Answers the first request only."""

        async def generate(self, request: GenerateRequest) -> list[Sample]:
            answered.append(request)
            if len(answered) > 1:
                await asyncio.Event().wait()
            return await super().generate(request)

    answered = list[GenerateRequest]()
    policy, sink = Once(0), Sink(groups=1, closes=False)
    opponent = Once(0) if queried == "opponent" else POLICY
    worker = RolloutWorker(
        policy=policy, models={"opponent": opponent, "teacher": policy}, teachers={},
        sink=sink, dataset=Groups(), sampling=SAMPLING, seed=1, max_groups=1,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(worker.run())
        while len(answered) < 3:  # one for both members, and a query of each
            assert not running.done() and not sink.failed
            await asyncio.sleep(0)
        assert [group.stage for group in worker.active] == [stage]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_group_is_in_the_stage_of_a_call_that_is_pending() -> None:
    group = ActiveGroup(Lease(group_id=0, attempt=1, epoch=1))
    with group.waiting("sampling"):
        with group.waiting("scoring"), group.waiting("scoring"):
            assert group.stage == "scoring"
        assert group.stage == "sampling"
    assert group.stage == "environment"


async def test_groups_in_flight_are_listed_and_cancelled() -> None:
    sink = DelayedSink(groups=3, closes=False)
    async with asyncio.timeout(DEADLINE_S):
        worker = worker_of(sink, HangingPolicy(0))
        running = asyncio.create_task(worker.run())

        def stages() -> dict[int, str]:
            return {group.lease.group_id: group.stage for group in worker.active}

        while stages() != {1: "sampling", 2: "sampling"}:
            await asyncio.sleep(0)
        assert sink.known == {2: "problem 3"}  # group 1 had left when it entered
        worker.forget(epoch=1)  # they are of this epoch
        await asyncio.sleep(0.01)
        worker.cancel_restarted({1: 1}, epoch=2)  # of an epoch to come
        worker.cancel_restarted({1: 0}, epoch=1)  # of an attempt before
        await asyncio.sleep(0.01)
        assert len(worker.active) == 2
        worker.cancel_restarted({1: 1}, epoch=1)
        while len(worker.active) == 2:
            await asyncio.sleep(0)
        assert stages() == {2: "sampling"}
        worker.forget(epoch=2)
        while worker.active:
            await asyncio.sleep(0)
        assert not running.done()
        worker.drain()
        await running
    assert [group.group_id for group in sink.done] == [0] and not sink.failed


@dataclass
class SlowToClose(Turns):
    """Environment whose close waits for an event."""

    may: asyncio.Event
    events: list[str]

    async def close(self) -> None:
        self.events.append("closing")
        await self.may.wait()
        self.events.append("closed")


@pytest.mark.parametrize("group_id", [0, 1], ids=["ended", "sampling"])
async def test_cancelled_groups_close_their_environments(group_id: int) -> None:
    """The driver repeats the order while the group is restarted elsewhere."""
    may, events = asyncio.Event(), list[str]()

    try:
        async with asyncio.timeout(DEADLINE_S):
            worker = RolloutWorker(
                policy=HangingPolicy(0), teachers={}, sink=Sink(groups=2, closes=False),
                dataset=Dataset(lambda _, prompt_T: [SlowToClose(prompt_T, may, events)]),
                sampling=SAMPLING, seed=1, max_groups=2,
            )  # fmt: skip
            running = asyncio.create_task(worker.run())
            while events != ["closing"] or [g.stage for g in worker.active][-1] != "sampling":
                await asyncio.sleep(0)  # group 0 has ended
            for _ in range(3):
                worker.cancel_restarted({group_id: 1}, epoch=1)
                worker.forget(epoch=1)
                await asyncio.sleep(0.01)
            assert len(worker.active) == 2
            worker.forget(epoch=2)
            while events != ["closing", "closing"]:
                await asyncio.sleep(0)
            assert len(worker.active) == 2
            may.set()
            while worker.active:
                await asyncio.sleep(0)
            worker.drain()
            await running
    finally:
        may.set()  # so that a failing test can end
    assert events.count("closed") == 2


def test_a_group_cancelled_before_its_start_frees_its_slot() -> None:
    """A lease of an epoch that ended while it was in transit."""

    class Late(Sink):
        async def lease(self, max_groups: int) -> Sequence[Lease]:
            leases = await super().lease(max_groups)
            if leases and leases[0].group_id == 0:
                loop = asyncio.get_running_loop()
                # After the worker has begun with these, and before their tasks run.
                loop.call_soon(loop.call_soon, worker.forget, 2)
            return leases

    sink = Late(groups=6)
    worker = worker_of(sink, POLICY)
    asyncio.run(asyncio.wait_for(worker.run(), DEADLINE_S))
    assert [group.group_id for group in sink.done] == [2, 3, 4, 5] and not sink.failed


async def test_a_drained_worker_finishes_its_groups() -> None:
    sink = Sink(groups=100)
    async with asyncio.timeout(DEADLINE_S):
        worker = worker_of(sink, POLICY)
        running = asyncio.create_task(worker.run())
        while not sink.done:
            await asyncio.sleep(0)
        worker.drain()
        await running
    assert len(sink.done) == sink.leased < 100


@dataclass
class Watched(Turns):
    """Record whether the group's problem has been reported, at each step."""

    group_id: int
    sink: DelayedSink
    seen: list[bool]

    async def initial_observation(self) -> TokenArray:
        self.look()
        return await super().initial_observation()

    async def step(self, sample: Sample) -> StepResult:
        for _ in range(self.group_id):
            self.look()
            await asyncio.sleep(0)
        self.look()
        return await super().step(sample)

    def look(self) -> None:
        self.seen.append(self.sink.known.get(self.group_id) == f"problem {self.group_id + 1}")


class SlowPolicy(PrefixEngine):
    """Delay each request by its last token."""

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        for _ in range(int(request.prompt_tokens_T[-1])):
            await asyncio.sleep(0)
        return await super().generate(request)


def test_a_group_is_reported_before_it_enters_its_environment() -> None:
    sink, seen = DelayedSink(groups=12), []

    def watched(group_id: int, prompt_T: TokenArray) -> Sequence[Env]:
        seen.append(sink.known.get(group_id) == f"problem {group_id + 1}")
        return [Watched(prompt_T, group_id, sink, seen) for _ in range(2)]

    run(sink, teachers={}, policy=SlowPolicy(0), dataset=Dataset(watched), max_groups=5)
    assert sorted(group.group_id for group in sink.done) == list(range(12))
    # of each group: its builder, two observations, and in two steps its id and one more looks
    assert seen == [True] * sum(1 + 2 + 2 * (i + 1) for i in range(12))
    assert 12 < sink.reports < 12 * 4  # they travel together


def test_a_worker_without_user_code_reports_once() -> None:
    """A worker that never reports has all its groups suspected at its death."""
    sink = DelayedSink(groups=12, known={0: "problem 1"})
    run(sink, teachers={}, max_groups=5, runs_user_code=False)
    assert len(sink.done) == 12
    assert sink.reports == 1 and not sink.known
