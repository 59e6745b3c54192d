"""Rollout worker, which turns prompts into scored trajectory groups.

    lease     waits for: credit (slots)        unblocked by: the learner's publish
    rollout   waits for: the policy engine
    score     waits for: the group's teacher and the reference, if any; each member is scored when
                         it has ended
    put       waits for: room in the queue     unblocked by: the learner's take

A group of `teacher_samples` is sampled by its teacher instead, through the teacher's engine or, as
text, through an endpoint. Such a group is not scored.

Many groups run concurrently, each as one task. A group that fails is reported with the reason and
is leased again by any worker with free capacity; the worker continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from bdb import BdbQuit
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from actors.rollout.episode import rollout_group
from actors.rollout.teacher import Scorer, Scorers, States, TeacherSampler, teacher_of
from actors.rollout.text_teacher import NewTextSampler, TextSampler, TextTeacher
from actors.together import task_group
from distill.columns import GroupColumns, checked
from distill.engine import GenerateRequest, Sample, SamplingModel, ScoringModel
from distill.envs.base import EnvGroupBuilder, EnvStream
from distill.errors import EngineError, IsothermError, described, kind_of, users_frames
from distill.group_share import EVERY_GROUP, NO_TEACHER_SAMPLES, GroupShare, TeacherSamples
from distill.objective.sums import meta_of
from distill.records import Lease, TrajectoryGroupMeta
from distill.rewards.length import LengthRules
from distill.rewards.model_reward import REWARD_MODEL
from distill.sampling import TrainSampling
from distill.types import Segment, TrajectoryGroup

logger = logging.getLogger(__name__)

# Time in seconds for the environments of a cancelled group to close.
_CLOSE_S = 60.0

# Stage of a group: running its environment (or waiting for an endpoint or the reward model),
# sampling by the policy engine, scoring or sampling by another engine, or delivery to the queue.
Stage = Literal["environment", "sampling", "scoring", "delivery"]


class GroupSink(Protocol):
    """Source of leases and sink of finished groups."""

    async def lease(self, max_groups: int) -> Sequence[Lease]:
        """Lease groups: at least one, or none if the run is closing."""
        ...

    async def put(self, lease: Lease, meta: TrajectoryGroupMeta, columns: GroupColumns) -> None: ...

    async def sampled(self, lease: Lease) -> TrajectoryGroup | None:
        """The sampled group of a lease that needs only scoring; None if it must be sampled."""
        ...

    async def fail(self, lease: Lease, reason: str) -> None:
        """Return the lease of a group that failed."""
        ...

    async def report_user_code(self, problems: Mapping[int, str]) -> None:
        """Report all groups that run an environment's or a reward's code, with their problems.

        Returns once the report would survive a crash of this process.
        """
        ...


@dataclass(slots=True, eq=False)
class ActiveGroup:
    """State of a group in progress.

    Attributes:
        stage: current stage, entered at `since` (`time.monotonic`).
        waits_for: number of pending calls of models, by the stage of their group meanwhile.
        problem: description of the group's problem.
        in_user_code: number of the group's members that run an environment's or a reward's code.
        reported: True if the group has been reported to the sink as running such code.
        cancelled_at: time of the last cancellation (`time.monotonic`); None: not cancelled.
    """

    lease: Lease
    task: asyncio.Task[None] | None = None
    stage: Stage = "environment"
    since: float = field(default_factory=time.monotonic)
    waits_for: Counter[Stage] = field(default_factory=Counter)
    problem: str = ""
    in_user_code: int = 0
    reported: bool = False
    cancelled_at: float | None = None

    def enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()

    @contextmanager
    def waiting(self, stage: Stage) -> Iterator[None]:
        """Context of a call of a model. The group is in `stage` until its last such call ends."""
        self.waits_for[stage] += 1
        self.enter(stage)
        try:
            yield
        finally:
            self.waits_for[stage] -= 1
            if not self.waits_for[stage]:
                pending = list(+self.waits_for)
                self.enter(pending[0] if pending else "environment")

    def cancel(self) -> None:
        """Cancel the group's task.

        Later calls cancel it again only if its environments have not closed within `_CLOSE_S`.
        """
        now = time.monotonic()
        if self.task is not None and (
            self.cancelled_at is None or now - self.cancelled_at > _CLOSE_S
        ):
            self.cancelled_at = now
            self.task.cancel()


@dataclass(slots=True, eq=False, kw_only=True)
class RolloutWorker:
    """Leases, rolls out, scores and delivers groups until the sink closes or `drain` is called.

    Attributes:
        policy: engine that samples.
        teachers: teacher engines by the names that groups use; empty for plain RL.
        reference: policy of the objective's reference (KL) term; None without such a term.
        models: models that environments may query, besides the policy, by name.
        policy_top_k: number of the policy's likeliest tokens at each action at which the objective
            needs the teacher's log-probs.
        teacher_top_k: number of the teacher's likeliest (other) tokens at each action for which the
            objective needs them.
        lengths: rules that change rewards by the lengths of episodes.
        routed_experts: request the experts that tokens are routed to with each sample.
        scored: groups that the teacher engine scores; the learner scores the others with its copy
            of the teacher.
        states: hidden states requested from each teacher, by name.
        teacher_samples: groups that their teacher samples.
        text_teachers: teachers whose samples come from an endpoint as text, by name.
        max_groups: maximum number of concurrent groups.
        runs_user_code: environments or rewards may crash or hang this process, so each group is
            reported before it enters them.
    """

    policy: ScoringModel
    teachers: Mapping[str, ScoringModel]
    sink: GroupSink
    dataset: EnvStream
    sampling: TrainSampling
    seed: int
    max_groups: int
    reference: ScoringModel | None = None
    models: Mapping[str, SamplingModel] = field(default_factory=dict)
    policy_top_k: int = 0
    teacher_top_k: int = 0
    lengths: LengthRules | None = None
    routed_experts: bool = False
    scored: GroupShare = EVERY_GROUP
    states: Mapping[str, States] = field(default_factory=dict)
    teacher_samples: TeacherSamples = NO_TEACHER_SAMPLES
    text_teachers: Mapping[str, TextTeacher] = field(default_factory=dict)
    runs_user_code: bool = True
    _open_teachers: dict[str, NewTextSampler] = field(init=False, default_factory=dict)
    _active: dict[Lease, ActiveGroup] = field(init=False, default_factory=dict)
    _logged: set[str] = field(init=False, default_factory=set)  # kinds of failures
    _has_room: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _reporting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _draining: bool = field(init=False, default=False)
    _asking: asyncio.Task[Sequence[Lease]] | None = field(init=False, default=None)

    @property
    def active(self) -> list[ActiveGroup]:
        return list(self._active.values())

    def drain(self) -> None:
        """Stop leasing; `run` returns when the last group in progress has ended."""
        self._draining = True
        self._has_room.set()
        if self._asking is not None:
            self._asking.cancel()

    def forget(self, epoch: int) -> None:
        """Cancel groups of earlier epochs, which will not be trained on."""
        for group in self.active:
            if group.lease.epoch < epoch:
                group.cancel()

    def cancel_restarted(self, over: Mapping[int, int], epoch: int) -> None:
        """Cancel groups that were restarted on another worker.

        Args:
            over: last obsolete attempt of this epoch, by group id.
        """
        for group in self.active:
            lease = group.lease
            if lease.epoch == epoch and lease.attempt <= over.get(lease.group_id, 0):
                group.cancel()

    async def run(self) -> None:
        """Run up to `max_groups` groups concurrently until the sink closes or `drain` is called."""
        async with AsyncExitStack() as endpoints:
            for name, teacher in self.text_teachers.items():
                opened = await endpoints.enter_async_context(teacher.opened())
                self._open_teachers[name] = opened
            await self._run()

    async def _run(self) -> None:
        if not self.runs_user_code:
            # Once: without any report all groups would be suspects.
            await self.sink.report_user_code({})
        async with task_group() as tasks:
            while leases := await self._lease():
                for lease in leases:
                    group = self._active[lease] = ActiveGroup(lease)
                    group.task = tasks.create_task(self._deliver(group))
                    # Not in the task itself, which may be cancelled before it starts.
                    group.task.add_done_callback(partial(self._has_left, lease))

    async def _lease(self) -> Sequence[Lease]:
        while not self._draining and len(self._active) >= self.max_groups:
            self._has_room.clear()
            await self._has_room.wait()
        if self._draining:
            return []
        room = self.max_groups - len(self._active)
        self._asking = asyncio.ensure_future(self.sink.lease(room))
        try:
            return await self._asking
        except asyncio.CancelledError:
            if not self._draining:
                raise
            return []  # groups leased at this moment are leased again later
        finally:
            self._asking = None

    async def _deliver(self, group: ActiveGroup) -> None:
        """Produce a group and deliver it, or report its failure."""
        try:
            made = await self._produce(group)
            columns = checked(made)
            meta = meta_of(made, columns)
        except BdbQuit:
            raise  # the user quit the debugger, which ends the run
        except Exception as error:  # a bad rollout is data: any error is reported
            reason = described(error) + (f", in {group.problem}" if group.problem else "")
            self._log_once(group.lease.group_id, reason, error)
            await self.sink.fail(group.lease, reason)
        else:
            group.enter("delivery")
            await self.sink.put(group.lease, meta, columns)

    def _log_once(self, group_id: int, reason: str, error: Exception) -> None:
        """Log the first failure of each kind, with a traceback cut to the user's frames if any."""
        if (kind := kind_of(reason)) in self._logged:
            return
        self._logged.add(kind)
        trace = ""
        if not isinstance(error, IsothermError | EngineError):  # their messages are complete
            frames = users_frames(error) or traceback.extract_tb(error.__traceback__)
            trace = "\n" + "".join(traceback.format_list(frames)).rstrip()
        logger.warning("group %d failed: %s%s", group_id, reason, trace)

    def _has_left(self, lease: Lease, _task: asyncio.Task[None]) -> None:
        self._active.pop(lease, None)
        self._has_room.set()

    async def _produce(self, active: ActiveGroup) -> TrajectoryGroup:
        sampled = await self.sink.sampled(active.lease)
        if sampled is not None and not sampled.by_teacher:
            # Its scorer was quarantined, or holds different weights.
            active.enter("scoring")
            scorers = self._scorers(sampled.group_id, sampled.teacher)
            return await scorers.score_again(sampled, self.policy_top_k)
        group_id = active.lease.group_id
        active.problem = self.dataset.describe(group_id)
        async with self._user_code(active):
            builder = self.dataset.builder(group_id)
        made = self._by_teacher if group_id in self.teacher_samples else self._by_policy
        return replace(await made(active, builder), source=self.dataset.source(group_id))

    async def _by_policy(self, active: ActiveGroup, builder: EnvGroupBuilder) -> TrajectoryGroup:
        """Sample the group from the policy, and score it."""
        started = time.perf_counter()
        scorers = self._scorers(active.lease.group_id, builder.teacher)
        async with task_group() as tasks:
            scorer = Scorer(tasks, scorers)
            asked = {"top_k": self.policy_top_k, "experts": self.routed_experts}
            policy = _Awaited(self.policy, active, "sampling", asked)
            group = await self._rollout(policy, active, builder, scorer.ended)
            sampled = time.perf_counter()
            active.enter("scoring")
            scorer.finish()
        timings = {"time/rollout": sampled - started}
        if scorers:
            timings["time/teacher"] = time.perf_counter() - sampled
        scored = scorer.filled(group)
        return replace(scored, metrics={**scored.metrics, **timings})

    def _scorers(self, group_id: int, name: str) -> Scorers:
        """Engines that score a group whose teacher has this name (`teacher_of`)."""
        teacher = None
        if self.teachers and group_id in self.scored:
            teacher = teacher_of(self.teachers, name)
        if len(self.teachers) == 1:
            [name] = self.teachers
        return Scorers(
            teacher=teacher,
            reference=self.reference,
            top_k=self.teacher_top_k,
            states=self.states.get(name, "none"),
        )

    async def _by_teacher(self, active: ActiveGroup, builder: EnvGroupBuilder) -> TrajectoryGroup:
        """Sample the group from its teacher."""
        started = time.perf_counter()
        teacher = self._teacher_sampler(active, builder)
        stage: Stage = "environment" if isinstance(teacher, TextSampler) else "scoring"
        sampler = _Awaited(teacher, active, stage)
        group = teacher.mark_sampled(await self._rollout(sampler, active, builder))
        return replace(group, metrics={"time/teacher_rollout": time.perf_counter() - started})

    def _teacher_sampler(
        self, active: ActiveGroup, builder: EnvGroupBuilder
    ) -> TeacherSampler | TextSampler:
        new_sampler = self._open_teachers.get(builder.teacher)
        if new_sampler is not None:
            assert builder.single_prompt is not None, "settings were checked for it"
            return new_sampler(builder.single_prompt, partial(active.enter, "environment"))
        return TeacherSampler(
            teacher_of(self.teachers, builder.teacher),
            builder.teacher_tokens_T,
            self.teacher_samples.vocab_size,
        )

    async def _rollout(
        self,
        sampler: SamplingModel,
        active: ActiveGroup,
        builder: EnvGroupBuilder,
        ended: Callable[[Sequence[Segment]], None] = lambda segments: None,
    ) -> TrajectoryGroup:
        return await rollout_group(
            sampler,
            builder,
            self.sampling,
            group_id=active.lease.group_id,
            seed=self.seed,
            models={name: self._queried(active, name) for name in self.models},
            user_code=partial(self._user_code, active),
            ended=ended,
            lengths=self.lengths,
        )

    def _queried(self, active: ActiveGroup, name: str) -> Any:
        """Model that an environment of the group may query. A reward model is no sampler."""
        model = self.models[name]
        if name == REWARD_MODEL:
            return model
        stage: Stage = "sampling" if model is self.policy else "scoring"
        return _Awaited(model, active, stage)

    def _user_code(self, group: ActiveGroup) -> AbstractAsyncContextManager[None]:
        """Context manager for calls of an environment's or a reward's code.

        User code is reported before it starts, because it may crash or hang this process.
        """
        return self._reported(group) if self.runs_user_code else nullcontext()

    @asynccontextmanager
    async def _reported(self, group: ActiveGroup) -> AsyncIterator[None]:
        group.in_user_code += 1
        try:
            async with self._reporting:  # groups that wait here are part of the next report
                if not group.reported:
                    await self._report()
            yield
        finally:
            group.in_user_code -= 1
            group.reported = group.reported and group.in_user_code > 0

    async def _report(self) -> None:
        in_user_code = [group for group in self.active if group.in_user_code]
        await self.sink.report_user_code(
            {group.lease.group_id: group.problem for group in in_user_code}
        )
        for group in in_user_code:
            group.reported = group.in_user_code > 0


@dataclass(slots=True, eq=False)
class _Awaited:
    """Wraps a model: sets the group's stage to `stage` while samples are pending.

    `asked` are fields of each request, such as the number of likeliest tokens.
    """

    model: SamplingModel
    group: ActiveGroup
    stage: Stage
    asked: Mapping[str, Any] = field(default_factory=dict)

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        with self.group.waiting(self.stage):
            return await self.model.generate(replace(request, **self.asked))
