"""Simulator of a run's schedule, to evaluate step rules and routing.

    python -m benchmarks.scheduling [engines=8] [steps=40] [seeds=2] [agents=True] [hangs=0.0005]
        [sigma=0.2] [longest=131072] [of_slots=1] [only=restart]

A discrete-event simulation on an event loop whose clock jumps from one event to the next. The
ledger with its step rule and the pools of engines are real; engines, learner and lengths are
simulated:

- Lengths are log-normal, mean 4,000 tokens, p99 24,000, truncated at 32,768. Half of the variance
  of their logarithm is due to the prompt. Group i is the same in every schedule.
- An engine decodes 40 tokens/s in each of 64 slots. A push stops it for 5 s. Then the contexts in
  progress are prefilled again (SGLang's `retract`), at 8 times the rate at which a full engine
  decodes. Contexts of turns that are not cached at their engine are prefilled as well.
- The learner is exactly as fast as full engines, so the ideal is 100 % of both.
- Agents take 12 turns on average (at most 40) of 350 tokens (p99 2,200), with 800 observed tokens
  and a tool call of 5 s (p99 60 s) between turns; a share `hangs` of its calls takes an hour.
- A group that is restarted is cancelled where it was. Its new samples, of the same prompt, differ.

Columns of the table:

    rate       ideal duration of a step over the simulated one
    learner    share of the time in which the learner is idle
    engines    share of the slots that are idle; pause: share of the time that engines are stopped
               or prefill
    off        versions between the sampling of a token and its training: mean, p95 and maximum;
               age: from the start of the token's group, maximum
    mixed      share of samples with tokens of several versions
    bias       mean length of trained samples over the true mean, less 1
    restarted  restarted groups, as a share of the trained ones
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any, Self

import chz
import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.command import run_command
from cluster.handles.engine_pool import EnginePool
from cluster.queue.ledger import Ledger
from cluster.queue.ledger_types import LedgerSettings
from distill.records import Lease, OnStale, TrainedGroups

SPEED = 40.0  # tokens/s of a slot
SLOTS = 64  # of an engine
PREFILL = 8 * SPEED * SLOTS  # tokens/s of an engine
PUSH_S = 5.0
LONGEST = 32_768
HANGS_S = 3600.0
POLL_S = 2.0  # how often groups that are overdue are looked for
# Steps until the pipeline is in its usual state.
SETTLING = 10


class _Instant(selectors.DefaultSelector):
    """Selector that returns immediately, because the clock has already jumped."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits, and no event is scheduled"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next event."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of an episode: new context tokens, samples, and seconds of the tool call."""

    observed: int
    length: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups by id.

    Attributes:
        agents: True for episodes of several turns; else single samples.
        longest: length in tokens at which samples are truncated.
        tool_sigma: sigma of the log-normal seconds of a tool call.
        hangs: share of tool calls that take an hour.
    """

    group_size: int
    agents: bool = False
    sigma: float = 0.974
    mean: float = 4000.0
    longest: int = LONGEST
    tool_sigma: float = 1.66
    hangs: float = 0.0
    seed: int = 0

    def group(self, group_id: int, attempt: int = 1) -> list[list[Turn]]:
        """Episodes of a group, each as a list of turns."""
        chance = np.random.default_rng([self.seed, group_id])
        of_prompt = 0.0 if self.agents else chance.normal()
        if attempt > 1:
            chance = np.random.default_rng([self.seed, group_id, attempt])
        if self.agents:
            return [self._episode(chance) for _ in range(self.group_size)]
        of_sample = chance.normal(size=self.group_size)
        z = (of_prompt + of_sample) / np.sqrt(2)
        lengths = np.exp(np.log(self.mean) - self.sigma**2 / 2 + self.sigma * z)
        return [[Turn(0, int(min(n, self.longest)) + 1, 0.0)] for n in lengths]

    def _episode(self, chance: np.random.Generator) -> list[Turn]:
        return [
            Turn(
                observed=800,
                length=1 + int(chance.lognormal(np.log(350) - 0.34, 0.82)),
                tool_s=self._tool_s(chance),
            )
            for _ in range(min(40, int(chance.geometric(1 / 12.5))))
        ]  # fmt: skip

    def _tool_s(self, chance: np.random.Generator) -> float:
        seconds = 5.0 * float(chance.lognormal(-(self.tool_sigma**2) / 2, self.tool_sigma))
        return HANGS_S if self.hangs and chance.random() < self.hangs else seconds


@cache
def mean_tokens(workload: Workload) -> float:
    """Mean tokens of a sample or episode."""
    groups = [workload.group(group_id) for group_id in range(1000 if workload.agents else 4000)]
    return float(np.mean([sum(t.length for t in turns) for g in groups for turns in g]))


@dataclass(slots=True)
class Request:
    """Request that `EnginePool` forwards: turns of some episodes, sampled together."""

    session: str
    episodes: list[tuple[int, ...]]  # by name
    lengths: list[int]
    contexts: list[int]

    @property
    def num_samples(self) -> int:
        return len(self.lengths)


# Tokens of a sample by the version that sampled them.
Sampled = dict[int, int]


@dataclass(slots=True)
class _Running:
    length: int
    context: int
    from_work: float
    version: int
    done: asyncio.Future[Sampled]
    sampled: Sampled = field(default_factory=dict)

    def observe(self, work: float, version: int) -> None:
        """Account for tokens decoded so far, and continue under another version."""
        made = min(self.length, round((work - self.from_work) * SPEED)) - sum(self.sampled.values())
        if made > 0:
            self.sampled[self.version] = self.sampled.get(self.version, 0) + made
        self.version = version


class Engine:
    """Engine of 64 slots that decode at a constant rate, first come, first served."""

    def __init__(
        self, in_place: bool = False, ended: Callable[[int], None] = lambda samples: None
    ) -> None:
        """
        Args:
            in_place: a push keeps the contexts in progress.
            ended: called with the number of samples that are no longer in progress.
        """
        self.version = 0
        self._ended = ended
        self._in_place = in_place
        self.busy_s = self.paused_s = 0.0  # of slots; of the engine
        self.prefilled = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[Sampled]]] = deque()
        self._running: list[tuple[float, int, _Running]] = []  # a heap by the end of each, in work
        self._number = 0
        self._stopped = 0.0  # seconds that no work was done
        self._resumes = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cached: dict[tuple[int, ...], int] = {}

    async def queue_length(self) -> int:
        return len(self._waiting) + len(self._running)

    async def generate(self, request: Request) -> list[Sampled]:
        loop = asyncio.get_running_loop()
        fresh = 0
        waited = []
        for name, length, context in zip(
            request.episodes, request.lengths, request.contexts, strict=True
        ):
            fresh += context - self._cached.get(name, 0)
            self._cached[name] = context + length
            waited.append(loop.create_future())
            self._waiting.append((length, context, waited[-1]))
        self._prefill(fresh)
        self._fill()
        try:
            return list(await asyncio.gather(*waited))
        except asyncio.CancelledError:
            self._cancel(set(waited))
            raise

    def _cancel(self, cancelled: set[asyncio.Future[Sampled]]) -> None:
        work, before = self._work(), len(self._waiting) + len(self._running)
        self._waiting = deque(each for each in self._waiting if each[2] not in cancelled)
        for _, _, each in self._running:
            if each.done in cancelled:
                each.observe(work, self.version)
                self.busy_s += sum(each.sampled.values()) / SPEED
        self._running = [entry for entry in self._running if entry[2].done not in cancelled]
        heapq.heapify(self._running)
        self._ended(before - len(self._waiting) - len(self._running))
        self._fill()

    def push(self, version: int) -> None:
        """Push new weights: a stop; then, by default, contexts in progress are prefilled again."""
        work = self._work()
        for _, _, each in self._running:
            each.observe(work, version)
        self.version = version
        self._cached.clear()
        self._stop(PUSH_S)
        if not self._in_place:
            self._prefill(
                sum(each.context + sum(each.sampled.values()) for _, _, each in self._running)
            )
        self._arm()

    def _prefill(self, tokens: int) -> None:
        self.prefilled += tokens
        self._stop(tokens / PREFILL)

    def _stop(self, seconds: float) -> None:
        self._resumes = max(self._resumes, asyncio.get_running_loop().time()) + seconds
        self._stopped += seconds
        self.paused_s += seconds

    def _work(self) -> float:
        """Seconds of finished work."""
        now = asyncio.get_running_loop().time()
        return max(now, self._resumes) - self._stopped

    def _fill(self) -> None:
        while self._waiting and len(self._running) < SLOTS:
            length, context, done = self._waiting.popleft()
            work = self._work()
            running = _Running(length, context, work, self.version, done)
            self._number += 1
            heapq.heappush(self._running, (work + length / SPEED, self._number, running))
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._running:
            when = self._running[0][0] + self._stopped
            self._timer = asyncio.get_running_loop().call_at(when, self._end)

    def _end(self) -> None:
        work = self._work()
        while self._running and self._running[0][0] <= work + 1e-9:
            _, _, each = heapq.heappop(self._running)
            each.observe(each.from_work + each.length / SPEED, self.version)
            self.busy_s += each.length / SPEED
            each.done.set_result(each.sampled)
            self._ended(1)
        self._fill()


class _Handle:
    """Stand-in for an actor handle: methods are called by `.remote`."""

    def __init__(self, engine: Engine) -> None:
        self.generate = _Method(engine.generate)
        self.queue_length = _Method(engine.queue_length)


class _Method:
    def __init__(self, method: Any) -> None:
        self.remote = method


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule to evaluate.

    Attributes:
        steps_in_flight: window of the ledger, in steps of P groups.
        sticky: True if the turns of a group go to one engine.
        in_place: True if a push keeps the contexts in progress.
        restart_after: as in `LedgerSettings`.
        samples: groups start only while there are fewer unfinished samples than this multiple of
            the slots.
    """

    max_staleness: int = 1
    steps_in_flight: float | None = None
    on_stale: OnStale = "wait"
    workers: int = 4
    sticky: bool = True
    in_place: bool = False
    restart_after: float = 2.0
    samples: float | None = None

    def __str__(self) -> str:
        name = f"H = {self.max_staleness}"
        name += "" if self.on_stale == "wait" else f" {self.on_stale}"
        if self.on_stale == "restart":
            name += f" after {self.restart_after:g} medians"
        if self.steps_in_flight is not None:
            name += f", {self.steps_in_flight:g} steps in flight"
        name += f", samples < {self.samples:g} x slots" if self.samples is not None else ""
        name += "" if self.sticky else ", any engine"
        name += ", in place" if self.in_place else ""
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Columns of the table, see the module."""

    rate: float
    step_s: float
    learner: float
    engines: float
    pause: float
    off: float
    p95: float
    most: int
    age: int
    mixed: float
    bias: float
    restarted: float
    first: tuple[float, ...]  # mean length of the first steps over the true mean

    @classmethod
    def mean(cls, outcomes: Sequence[Outcome]) -> Self:
        """Mean over seeds; of maxima the maximum."""
        of = {
            name: float(np.mean([getattr(outcome, name) for outcome in outcomes]))
            for name in ("rate", "step_s", "learner", "engines", "pause", "off", "p95", "mixed",
                         "bias", "restarted")
        }  # fmt: skip
        return cls(
            **of,
            most=max(outcome.most for outcome in outcomes),
            age=max(outcome.age for outcome in outcomes),
            first=tuple(np.mean([outcome.first for outcome in outcomes], axis=0)),
        )


class Simulation:
    """One run of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        workload: Workload,
        *,
        groups_per_step: int,
        engines: int,
        steps: int,
        barrier: bool = False,
    ) -> None:
        """`barrier`: the first turns of a group are one request, answered when all have ended."""
        self._barrier = barrier
        self._workload, self._per_step, self._steps = workload, groups_per_step, steps
        self.engines = [Engine(schedule.in_place, self._ended) for _ in range(engines)]
        window = 0
        if schedule.steps_in_flight is not None:
            window = round(schedule.steps_in_flight * groups_per_step)
        settings = LedgerSettings(
            groups_per_step=groups_per_step,
            max_staleness=schedule.max_staleness,
            total_groups=groups_per_step * steps,
            lease_s=1e9,
            groups_in_flight=window,
            on_stale=schedule.on_stale,
            restart_after=schedule.restart_after,
        )
        self._each = -(-settings.window // schedule.workers)
        self._workers, self._sticky = schedule.workers, schedule.sticky
        self._loop = VirtualLoop()
        self.ledger = Ledger(settings, TrainedGroups(), epoch=1, clock=self._loop.time)
        self._settings = settings
        self._capacity = float("inf")
        if schedule.samples is not None:
            self._capacity = schedule.samples * SLOTS * engines
        self._unfinished = 0  # samples
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._restarts = 0
        self._changed: asyncio.Condition
        self._version = 0
        self._leased_at: dict[int, int] = {}
        self._made: dict[int, list[Sampled]] = {}
        self.steps: list[tuple[float, float, list[int]]] = []  # its end, seconds waited, ids

    def run(self) -> Outcome:
        """Simulate the run; returns its outcome after the warm-up steps."""
        try:
            self._loop.run_until_complete(self._run())
        finally:
            self._loop.close()
        return self._outcome

    async def _run(self) -> None:
        self._changed = asyncio.Condition()
        handles = {f"policy engine {i}": _Handle(engine) for i, engine in enumerate(self.engines)}
        workers = [
            asyncio.create_task(self._work(f"worker {i}", EnginePool("policy", handles, 60.0)))
            for i in range(self._workers)
        ]
        await self._learn()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, name: str, pool: EnginePool) -> None:
        in_progress: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:  # until it is cancelled
                leases: list[Lease] = []
                async with self._changed:
                    while not leases:
                        room = min(self._each - len(in_progress), self._sample_room())
                        leases = self.ledger.lease(name, room) if room > 0 else []
                        if not leases:
                            await self._changed.wait()
                self._unfinished += len(leases) * self._workload.group_size
                for lease in leases:
                    self._leased_at[lease.group_id] = self._version
                    task = tasks.create_task(self._make(pool, lease, name))
                    in_progress.add(task)
                    self._tasks[lease.group_id] = task
                    task.add_done_callback(in_progress.discard)

    def _sample_room(self) -> int:
        """Number of groups that may start, given the samples at the engines."""
        if self._capacity == float("inf"):
            return self._settings.window
        free = self._capacity - self._unfinished
        return max(0, math.ceil(free / self._workload.group_size))

    def _ended(self, samples: int) -> None:
        """Remove single samples from those in progress."""
        if not self._workload.agents:
            self._finished(samples)

    def _finished(self, samples: int) -> None:
        self._unfinished -= samples
        if samples and self._unfinished < self._capacity < float("inf"):
            self._wakes = self._loop.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _make(self, pool: EnginePool, lease: Lease, worker: str) -> None:
        episodes = self._workload.group(lease.group_id, lease.attempt)
        names = [(lease.group_id, lease.attempt, number) for number in range(len(episodes))]
        if self._workload.agents:
            firsts: list[Any] = [None] * len(episodes)
            if self._barrier:
                turns = [episode[0] for episode in episodes]
                request: Any = Request(
                    str(lease.group_id),
                    names,
                    [turn.length for turn in turns],
                    [turn.observed for turn in turns],
                )
                firsts = await pool.generate(request)
            made = await asyncio.gather(*map(partial(self._play, pool), names, episodes, firsts))
        else:
            lengths = [turns[0].length for turns in episodes]
            request = Request(str(lease.group_id), names, lengths, [0] * len(lengths))
            made = await pool.generate(request)
        self._made[lease.group_id] = made  # type: ignore[assignment]
        async with self._changed:
            self.ledger.deliver(lease, worker)
            self._changed.notify_all()

    async def _play(
        self, pool: EnginePool, name: tuple[int, ...], turns: list[Turn], first: Sampled | None
    ) -> Sampled:
        """Play an episode from its first turn, or from the answer of its first turn."""
        sampled: Counter[int] = Counter()
        context = 0
        try:
            for turn in turns:
                context += turn.observed
                if first is None:
                    session = str(name[0]) if self._sticky else ""
                    request: Any = Request(session, [name], [turn.length], [context])
                    answers: Any = await pool.generate(request)
                    first = answers[0]
                sampled.update(first)
                first = None
                context += turn.length
                await asyncio.sleep(turn.tool_s)
        finally:
            self._finished(1)
        return dict(sampled)

    async def _learn(self) -> None:
        loop = asyncio.get_running_loop()
        trained = TrainedGroups()
        for _ in range(self._steps):
            started = loop.time()
            async with self._changed:
                while self.ledger.ready() is None:
                    await self._wait()
                step = self.ledger.take(trained)
            assert step is not None
            waited = loop.time() - started
            tokens = sum(sum(s.values()) for i in step.group_ids for s in self._made[i])
            await asyncio.sleep(tokens / (SPEED * SLOTS * len(self.engines)))
            self.steps.append((loop.time(), waited, step.group_ids))
            self._version += 1
            for engine in self.engines:
                engine.push(self._version)
            await asyncio.sleep(PUSH_S)
            trained = step.after(trained)
            async with self._changed:
                self.ledger.publish(self._version, trained)
                self._changed.notify_all()
            if len(self.steps) == SETTLING:
                self._settled = loop.time(), self._busy(), self._paused()
        seconds = loop.time() - self._settled[0]
        self._seconds = seconds
        self._busy_share = (self._busy() - self._settled[1]) / (seconds * SLOTS * len(self.engines))
        self._pause_share = (self._paused() - self._settled[2]) / (seconds * len(self.engines))

    async def _wait(self) -> None:
        """Wait for a change, or until some groups are overdue."""
        if overdue := self.ledger.overdue():
            self.ledger.restart_groups(overdue)
            self._restarts += len(overdue)
            for group_id in overdue:
                self._tasks[group_id].cancel()
            self._changed.notify_all()
        looks = self._settings.on_stale == "restart"
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), POLL_S if looks else None)

    def _busy(self) -> float:
        return sum(engine.busy_s for engine in self.engines)

    def _paused(self) -> float:
        return sum(engine.paused_s for engine in self.engines)

    @property
    def _outcome(self) -> Outcome:
        size = self._workload.group_size
        mean = mean_tokens(self._workload)
        off: Counter[int] = Counter()
        samples = mixed = age = 0
        means = []
        for version, (_, _, ids) in enumerate(self.steps):
            lengths = [sum(sampled.values()) for i in ids for sampled in self._made[i]]
            means.append(float(np.mean(lengths)) / mean)
            if version < SETTLING:
                continue
            age = max(age, *(version - self._leased_at[i] for i in ids))
            for sampled in (each for i in ids for each in self._made[i]):
                samples += 1
                mixed += len(sampled) > 1
                for at, tokens in sampled.items():
                    off[version - at] += tokens
        stale = np.array(sorted(off))
        tokens_of = np.array([off[each] for each in stale])
        at_95 = np.searchsorted(np.cumsum(tokens_of), 0.95 * tokens_of.sum())
        ends = [end for end, _, _ in self.steps]
        steps = len(self.steps) - SETTLING
        step_s = float(np.mean([b - a for a, b in pairwise(ends[SETTLING - 1 :])]))
        waited = sum(waited for _, waited, _ in self.steps[SETTLING:])
        ideal = self._per_step * size * mean / (SPEED * SLOTS * len(self.engines))
        return Outcome(
            rate=ideal / step_s,
            step_s=step_s,
            learner=(waited + steps * PUSH_S) / self._seconds,
            engines=1 - self._busy_share - self._pause_share,
            pause=self._pause_share,
            off=float((stale * tokens_of).sum() / tokens_of.sum()),
            p95=float(stale[at_95]),
            most=int(stale.max()),
            age=age,
            mixed=mixed / samples,
            bias=float(np.mean(means[SETTLING:])) - 1,
            restarted=self._restarts / (self._per_step * len(self.steps)),
            first=tuple(means[:8]),
        )


SCHEDULES = (
    Schedule(max_staleness=0),
    Schedule(max_staleness=1),
    Schedule(max_staleness=4),
    Schedule(max_staleness=2),
    Schedule(max_staleness=4, steps_in_flight=2),
    Schedule(max_staleness=4, steps_in_flight=3),
    Schedule(max_staleness=8, steps_in_flight=2),
    Schedule(max_staleness=8, steps_in_flight=3),
    Schedule(max_staleness=8, steps_in_flight=4),
    Schedule(max_staleness=8, steps_in_flight=4, in_place=True),
    Schedule(max_staleness=8, on_stale="train_late", steps_in_flight=3),
    Schedule(max_staleness=4, on_stale="restart", steps_in_flight=3),
    Schedule(max_staleness=8, samples=0.5),
    Schedule(max_staleness=8, samples=0.75),
    Schedule(max_staleness=8, samples=1.0),
)

AGENTS = (
    Schedule(max_staleness=1, sticky=False),
    Schedule(max_staleness=1),
    Schedule(max_staleness=4),
    Schedule(max_staleness=8, steps_in_flight=3, sticky=False),
    Schedule(max_staleness=8, steps_in_flight=3),
    Schedule(max_staleness=8, steps_in_flight=3, in_place=True),
    Schedule(max_staleness=8, on_stale="train_late", steps_in_flight=3),
    Schedule(max_staleness=4, steps_in_flight=3),
    Schedule(max_staleness=4, on_stale="train_late", steps_in_flight=3),
    Schedule(max_staleness=4, on_stale="restart", steps_in_flight=3),
    Schedule(
        max_staleness=4,
        on_stale="restart",
        steps_in_flight=3,
        restart_after=4.0,
    ),
    Schedule(max_staleness=8, steps_in_flight=2),
    Schedule(max_staleness=8, samples=0.5),
    Schedule(max_staleness=8, samples=0.75),
)


@chz.chz
class SchedulingConfig:
    """Simulate schedules on long-tailed lengths."""

    engines: int = chz.field(default=8, doc="policy engines of 64 slots")
    group_size: int = chz.field(default=16, doc="samples of a group")
    steps: int = chz.field(default=40, doc="steps, the first ten of which settle")
    seeds: int = chz.field(default=2, doc="runs whose mean is shown")
    agents: bool = chz.field(default=False, doc="episodes of several turns with tools")
    barrier: bool = chz.field(
        default=False, doc="agents: a group's first turns are one request, as in a run"
    )
    sigma: float = chz.field(default=0.974, doc="of the logarithm of lengths; 0.2: nearly alike")
    longest: int = chz.field(default=LONGEST, doc="tokens at which single samples are cut off")
    hangs: float = chz.field(default=0.0, doc="agents: share of a tool's calls that take an hour")
    of_slots: tuple[int, ...] = chz.field(
        default=(1, 4), doc="samples of a step, in multiples of the slots"
    )
    only: str = chz.field(default="", doc="schedules whose names contain this")


def table(config: SchedulingConfig, of_slots: int) -> Table:
    """Results of every schedule, for steps with `of_slots` times as many samples as slots."""
    samples = of_slots * config.engines * SLOTS
    made = Table(title=f"{config.engines * SLOTS} slots, {samples} samples a step")
    for column in ("", "rate", "step s", "learner", "engines", "pause", "off", "p95", "max", "age",
                   "mixed", "bias", "restarted", "length of steps 1 to 8"):  # fmt: skip
        made.add_column(column, justify="left" if not column else "right")
    for schedule in AGENTS if config.agents else SCHEDULES:
        if config.only not in str(schedule):
            continue
        found = Outcome.mean([_outcome(config, schedule, samples, s) for s in range(config.seeds)])
        made.add_row(
            str(schedule), f"{found.rate:.0%}", f"{found.step_s:.0f}", f"{found.learner:.0%}",
            f"{found.engines:.0%}", f"{found.pause:.1%}", f"{found.off:.2f}", f"{found.p95:.1f}",
            str(found.most), str(found.age), f"{found.mixed:.0%}", f"{found.bias:+.1%}",
            f"{found.restarted:.1%}",
            " ".join(f"{mean:.2f}" for mean in found.first),
        )  # fmt: skip
    return made


def _outcome(config: SchedulingConfig, schedule: Schedule, samples: int, seed: int) -> Outcome:
    workload = Workload(
        group_size=config.group_size,
        agents=config.agents,
        sigma=config.sigma,
        longest=config.longest,
        hangs=config.hangs,
        seed=seed,
    )
    return Simulation(
        schedule,
        workload,
        groups_per_step=samples // config.group_size,
        engines=config.engines,
        steps=config.steps,
        barrier=config.barrier,
    ).run()


def print_tables(config: SchedulingConfig, console: Console) -> None:
    for of_slots in config.of_slots:
        console.print(table(config, of_slots))


if __name__ == "__main__":
    raise SystemExit(run_command(SchedulingConfig, print_tables, None))
