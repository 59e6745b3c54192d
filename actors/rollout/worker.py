"""The rollout worker: prompts in, scored trajectory groups out.

    lease     waits for: credit (slots)        unblocked by: the learner's publish
    rollout   waits for: the policy engine
    score     waits for: the group's teacher and the reference, where there are any; each member
                         as soon as it has ended
    put       waits for: room in the queue     unblocked by: the learner's take

A group of `teacher_samples` is sampled by its teacher instead, by an engine of it or in words by an
endpoint, and scored by nobody.
Many groups are under way at once; each is a task of its own. A group that fails is reported with
its reason and leased again, by whoever has room; the worker goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from bdb import BdbQuit
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

from actors.rollout.episode import rollout_group
from actors.rollout.teacher import Scorer, TeacherSampler, score_again, teacher_of
from actors.rollout.text_teacher import OpenTextTeacher, TextSampler, TextTeacher
from distill.delivery import Lease
from distill.engine import Engine, GenerateRequest, Sample, Sampler
from distill.envs.base import EnvGroupBuilder, EnvStream
from distill.errors import IsothermError, described, kind_of, users_frames
from distill.group_share import EVERY_GROUP, GroupShare
from distill.rewards.length import LengthRules
from distill.sampling import TrainSampling
from distill.teacher_samples import NO_TEACHER_SAMPLES, TeacherSamples
from distill.types import Segment, TrajectoryGroup

logger = logging.getLogger(__name__)

# How long environments of a group that was given up may take to close, seconds.
_CLOSE_S = 60.0

# Where a group is: its environment's turn (or an endpoint's), the policy engine's, or the
# teacher's, which scores or samples.
Stage = Literal["environment", "sampling", "scoring", "delivery"]


class GroupSink(Protocol):
    """Source of leases and sink of finished groups."""

    async def lease(self, max_groups: int) -> Sequence[Lease]:
        """Groups to work on, at least one; empty once the run is closing."""
        ...

    async def put(self, lease: Lease, group: TrajectoryGroup) -> None: ...

    async def sampled(self, lease: Lease) -> TrajectoryGroup | None:
        """The group of a lease, if it is only to be scored again; None: it is to be made."""
        ...

    async def fail(self, lease: Lease, reason: str) -> None:
        """Returns the lease of a group that failed."""
        ...

    async def inside(self, problems: Mapping[int, str]) -> None:
        """Reports the groups that run an environment's or a reward's code, and their problems; all
        others do not. Returns once that would outlive this process."""
        ...


@dataclass(slots=True, eq=False)
class UnderWay:
    """A group at work: where it is, since when (`time.monotonic`), and its samples to come.

    `inside` counts its members in an environment's or a reward's code, that of `problem`;
    `reported`: the sink knows. `given_up`: since when nobody wants it any more.
    """

    lease: Lease
    task: asyncio.Task[None] | None = None
    stage: Stage = "environment"
    since: float = field(default_factory=time.monotonic)
    waits_for_sampler: int = 0
    problem: str = ""
    inside: int = 0
    reported: bool = False
    given_up: float | None = None

    def enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()

    def give_up(self) -> None:
        """Cancels its task; again if its environments have not closed for long, however often that
        is said."""
        now = time.monotonic()
        if self.task is not None and (self.given_up is None or now - self.given_up > _CLOSE_S):
            self.given_up = now
            self.task.cancel()


class RolloutWorker:
    """Runs until the sink closes, or until it is drained.

    Args:
        policy: samples.
        teachers: by name, as groups name theirs; none for plain RL.
        reference: the policy that the learner is held near to; None without such a term.
        models: what environments may ask besides the policy and the teachers, by name.
        policy_top_k: at how many of the policy's own likeliest tokens the objective wants to know
            the teacher, at each action.
        teacher_top_k: at how many of the teacher's likeliest (others).
        lengths: what the lengths of episodes do to their rewards.
        routed_experts: the policy is asked for the experts of a mixture as well.
        scored: the groups that their teacher scores; the others' learner asks a copy of its own.
        teacher_samples: the groups that their teacher samples.
        text_teachers: by the teachers' names, those whose samples an endpoint writes.
        max_groups: most groups under way at once.
        runs_user_code: environments or rewards may end or hang this process, so that each group
            is reported before it enters them.
    """

    def __init__(
        self,
        *,
        policy: Engine,
        teachers: Mapping[str, Engine],
        sink: GroupSink,
        dataset: EnvStream,
        sampling: TrainSampling,
        seed: int,
        max_groups: int,
        reference: Engine | None = None,
        models: Mapping[str, Sampler] | None = None,
        policy_top_k: int = 0,
        teacher_top_k: int = 0,
        lengths: LengthRules | None = None,
        routed_experts: bool = False,
        scored: GroupShare = EVERY_GROUP,
        teacher_samples: TeacherSamples = NO_TEACHER_SAMPLES,
        text_teachers: Mapping[str, TextTeacher] | None = None,
        runs_user_code: bool = True,
    ) -> None:
        self._policy = policy
        self._teachers = teachers
        self._reference = reference
        self._models = {**teachers, **(models or {})}
        self._policy_top_k, self._teacher_top_k = policy_top_k, teacher_top_k
        self._lengths = lengths
        self._routed_experts = routed_experts
        self._scored = scored
        self._teacher_samples = teacher_samples
        self._text_teachers = text_teachers or {}
        self._open_teachers: dict[str, OpenTextTeacher] = {}
        self._sink = sink
        self._dataset = dataset
        self._sampling = sampling
        self._seed = seed
        self._runs_user_code = runs_user_code
        self.max_groups = max_groups
        self._under_way: dict[Lease, UnderWay] = {}
        self._logged: set[str] = set()  # kinds of failures
        self._has_room = asyncio.Event()
        self._reporting = asyncio.Lock()
        self._draining = False
        self._asking: asyncio.Task[Sequence[Lease]] | None = None

    @property
    def under_way(self) -> list[UnderWay]:
        return list(self._under_way.values())

    def drain(self) -> None:
        """Leases no more; `run` ends with the last group under way."""
        self._draining = True
        self._has_room.set()
        if self._asking is not None:
            self._asking.cancel()

    def forget(self, epoch: int) -> None:
        """Gives up groups of earlier epochs: nobody would train on them."""
        for group in self.under_way:
            if group.lease.epoch < epoch:
                group.give_up()

    def give_up(self, over: Mapping[int, int], epoch: int) -> None:
        """Gives up groups that were begun again elsewhere.

        Args:
            over: by group, the last attempt in this epoch of which nothing is wanted any more.
        """
        for group in self.under_way:
            lease = group.lease
            if lease.epoch == epoch and lease.attempt <= over.get(lease.group_id, 0):
                group.give_up()

    async def run(self) -> None:
        """Keeps up to `max_groups` groups under way."""
        async with AsyncExitStack() as endpoints:
            for name, teacher in self._text_teachers.items():
                opened = await endpoints.enter_async_context(teacher.opened())
                self._open_teachers[name] = opened
            await self._run()

    async def _run(self) -> None:
        if not self._runs_user_code:
            await self._sink.inside({})  # for good: without a report all groups are suspects
        try:
            async with asyncio.TaskGroup() as tasks:
                while leases := await self._lease():
                    for lease in leases:
                        group = self._under_way[lease] = UnderWay(lease)
                        group.task = tasks.create_task(self._deliver(group))
                        # Not by the task itself, which may be given up before it begins.
                        group.task.add_done_callback(partial(self._has_left, lease))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled by the first

    async def _lease(self) -> Sequence[Lease]:
        while not self._draining and len(self._under_way) >= self.max_groups:
            self._has_room.clear()
            await self._has_room.wait()
        if self._draining:
            return []
        room = self.max_groups - len(self._under_way)
        self._asking = asyncio.ensure_future(self._sink.lease(room))
        try:
            return await self._asking
        except asyncio.CancelledError:
            if not self._draining:
                raise
            return []  # what was leased in that moment is leased again
        finally:
            self._asking = None

    async def _deliver(self, group: UnderWay) -> None:
        """Rolls out a group and delivers it; or reports its failure."""
        try:
            made = await self._produce(group)
        except BdbQuit:
            raise  # the user left the debugger: that ends the run
        except Exception as error:  # a bad rollout is data: of whatever kind, it is reported
            reason = described(error) + (f", in {group.problem}" if group.problem else "")
            self._log_once(group.lease.group_id, reason, error)
            await self._sink.fail(group.lease, reason)
        else:
            group.enter("delivery")
            await self._sink.put(group.lease, made)

    def _log_once(self, group_id: int, reason: str, error: Exception) -> None:
        """Log a failure, one of each kind with its traceback, cut to the user's frames if any."""
        if (kind := kind_of(reason)) in self._logged:
            return
        self._logged.add(kind)
        trace = ""
        if not isinstance(error, IsothermError):  # whose message is complete
            frames = users_frames(error) or traceback.extract_tb(error.__traceback__)
            trace = "\n" + "".join(traceback.format_list(frames)).rstrip()
        logger.warning("group %d failed: %s%s", group_id, reason, trace)

    def _has_left(self, lease: Lease, _task: asyncio.Task[None]) -> None:
        self._under_way.pop(lease, None)
        self._has_room.set()

    async def _produce(self, under_way: UnderWay) -> TrajectoryGroup:
        sampled = await self._sink.sampled(under_way.lease)
        if sampled is not None and not sampled.by_teacher:
            return await self._score_again(under_way, sampled)
        group_id = under_way.lease.group_id
        under_way.problem = self._dataset.describe(group_id)
        async with self._user_code(under_way):
            builder = self._dataset.builder(group_id)
        made = self._by_teacher if group_id in self._teacher_samples else self._by_policy
        return replace(await made(under_way, builder), source=self._dataset.source(group_id))

    async def _by_policy(self, under_way: UnderWay, builder: EnvGroupBuilder) -> TrajectoryGroup:
        """The group as the policy samples it, scored."""
        started = time.perf_counter()
        teacher = self._scorer(under_way.lease.group_id, builder.teacher)
        try:
            async with asyncio.TaskGroup() as tasks:
                scorer = Scorer(
                    tasks, teacher=teacher, reference=self._reference, top_k=self._teacher_top_k
                )
                policy = _Asked(self._policy, self._policy_top_k, self._routed_experts)
                group = await self._rollout(policy, under_way, builder, scorer.ended)
                sampled = time.perf_counter()
                under_way.enter("scoring")
                scorer.no_more()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled by the first
        timings = {"time/rollout": sampled - started}
        if teacher is not None or self._reference is not None:
            timings["time/teacher"] = time.perf_counter() - sampled
        scored = scorer.filled(group)
        return replace(scored, metrics={**scored.metrics, **timings})

    def _scorer(self, group_id: int, name: str) -> Engine | None:
        """The teacher that scores the group, if one does."""
        if not self._teachers or group_id not in self._scored:
            return None
        return teacher_of(self._teachers, name)

    async def _by_teacher(self, under_way: UnderWay, builder: EnvGroupBuilder) -> TrajectoryGroup:
        """The group as its teacher samples it."""
        started = time.perf_counter()
        teacher = self._teacher_sampler(under_way, builder)
        stage: Stage = "environment" if isinstance(teacher, TextSampler) else "scoring"
        group = teacher.signed(await self._rollout(teacher, under_way, builder, stage=stage))
        return replace(group, metrics={"time/teacher_rollout": time.perf_counter() - started})

    def _teacher_sampler(
        self, under_way: UnderWay, builder: EnvGroupBuilder
    ) -> TeacherSampler | TextSampler:
        opened = self._open_teachers.get(builder.teacher)
        if opened is not None:
            assert builder.asked is not None, "settings were checked for it"
            return opened.sampler(builder.asked, partial(under_way.enter, "environment"))
        return TeacherSampler(
            teacher_of(self._teachers, builder.teacher),
            builder.teacher_tokens_T,
            self._teacher_samples.vocab_size,
        )

    async def _rollout(
        self,
        sampler: Sampler,
        under_way: UnderWay,
        builder: EnvGroupBuilder,
        ended: Callable[[Sequence[Segment]], None] = lambda segments: None,
        stage: Stage = "sampling",
    ) -> TrajectoryGroup:
        return await rollout_group(
            _Sampled(sampler, under_way, stage),
            builder,
            self._sampling,
            group_id=under_way.lease.group_id,
            seed=self._seed,
            models=self._models,
            user_code=partial(self._user_code, under_way),
            ended=ended,
            lengths=self._lengths,
        )

    async def _score_again(self, under_way: UnderWay, group: TrajectoryGroup) -> TrajectoryGroup:
        """What one scored who has moved since, or holds other weights, by another."""
        under_way.enter("scoring")
        return await score_again(
            group,
            teacher=self._scorer(group.group_id, group.teacher),
            reference=self._reference,
            policy_top_k=self._policy_top_k,
            top_k=self._teacher_top_k,
        )

    @asynccontextmanager
    async def _user_code(self, group: UnderWay) -> AsyncIterator[None]:
        """Context of an environment's or a reward's code.

        The user's is reported before it begins, for it may end or hang this process.
        """
        if not self._runs_user_code:
            yield
            return
        group.inside += 1
        try:
            async with self._reporting:  # those that wait here travel with the next report
                if not group.reported:
                    await self._report()
            yield
        finally:
            group.inside -= 1
            group.reported = group.reported and group.inside > 0

    async def _report(self) -> None:
        inside = [group for group in self.under_way if group.inside]
        await self._sink.inside({group.lease.group_id: group.problem for group in inside})
        for group in inside:
            group.reported = group.inside > 0


class _Asked:
    """A policy that is asked for its likeliest tokens, and for experts, with each sample."""

    def __init__(self, policy: Engine, top_k: int, experts: bool) -> None:
        self._policy, self._top_k, self._experts = policy, top_k, experts

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        asked = replace(request, top_k=self._top_k, experts=self._experts)
        return await self._policy.generate(asked)


class _Sampled:
    """Notes when a group waits for whoever samples it, as that stage."""

    def __init__(self, sampler: Sampler, group: UnderWay, stage: Stage) -> None:
        self._sampler, self._group = sampler, group
        self._stage: Stage = stage

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        self._group.waits_for_sampler += 1
        self._group.enter(self._stage)
        try:
            return await self._sampler.generate(request)
        finally:
            self._group.waits_for_sampler -= 1
            if not self._group.waits_for_sampler:
                self._group.enter("environment")
