"""RL run on a simulated clock with the real queue, workers, fleet and handshake.

Engines and learner are simulated: they take a given time, and score as one small model that knows
every temperature.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.config.recipes import make
from cluster.config.rollout_checks import check_rollout
from cluster.handles.engine_pool import EnginePool
from cluster.handshake.handshake import handshake
from cluster.hosts.build import RolloutCast
from cluster.hosts.learners import LearnerActors
from cluster.placement.placement_groups import Placement
from cluster.placement.roles import POLICY, ROLLOUT, placed_roles
from cluster.queue.queue_actor import GroupQueueActor
from cluster.run_files.run_directory import RunDirectory
from cluster.runtime.driver import Signals
from cluster.runtime.fleet import Fleet
from cluster.supervision.supervise import Member, State, WorkDone
from distill.engine import EngineInfo, GenerateRequest, Sample, Score, ScoreRequest
from distill.handshake.comparison import CalibrationReport
from distill.pace import Progress
from distill.records import TrainedGroups
from distill.tokenizer import TokenizerProbe, probe_tokenizer
from distill.types import FloatArray, StopReason
from tests.simulation import SimulatedActor, SimulatedLoop

VOCAB_SIZE = 300
_LOGITS_V = np.random.default_rng(0).normal(size=VOCAB_SIZE).astype(np.float32)


def logprobs_V(temperature: float) -> FloatArray:
    scaled_V = _LOGITS_V / np.float32(temperature)
    return scaled_V - np.logaddexp.reduce(scaled_V)


def engine_info(tokenizer: TokenizerProbe | None = None) -> EngineInfo:
    return EngineInfo(
        kind="simulated", model="a model", vocab_size=VOCAB_SIZE, context_length=4096,
        weight_version=0, dtype="float32", eos_token_ids=(1,), tokenizer=tokenizer,
        temperature_scaling="",
    )  # fmt: skip


class SimulatedEngine:
    """Engine that scores at once and samples at a given rate; tokens ignore the context."""

    def __init__(self, info: EngineInfo, tokens_per_s: float) -> None:
        self._info, self._tokens_per_s = info, tokens_per_s
        self._beats = 0
        self.calls = 0  # of what a handshake asks

    async def health(self) -> int:
        self._beats += 1
        return self._beats

    async def info(self) -> EngineInfo:
        return self._info

    async def queue_length(self) -> int:
        return 0

    async def load_weights(self, seconds: float, version: int) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def generate(self, request: GenerateRequest) -> list[Sample]:
        self.calls += 1
        length = request.sampling.max_new_tokens
        await asyncio.sleep(length / self._tokens_per_s)
        rng = np.random.default_rng([request.seed, request.num_samples])
        logprobs = logprobs_V(request.sampling.temperature)
        samples = []
        for _ in range(request.num_samples):
            tokens_T = rng.integers(3, VOCAB_SIZE, size=length).astype(np.int32)
            samples.append(
                Sample(
                    tokens_T=tokens_T, logprobs_T=logprobs[tokens_T],
                    versions_T=np.zeros(length, np.int32), stop_reason=StopReason.LENGTH,
                )
            )  # fmt: skip
        return samples

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.calls += 1
        await asyncio.sleep(0.5)
        return [
            Score(
                logprobs_by_temperature=tuple(
                    logprobs_V(t)[request.tokens_T[request.start :]] for t in request.temperatures
                )
            )
            for request in requests
        ]

    async def decode_score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return await self.score(requests)


class SimulatedLearner:
    """Learner that pushes to engines that join, and scores as they do."""

    def __init__(self, push_s: float) -> None:
        self._push_s = push_s
        self.pushes: list[list[str]] = []
        self.forwards = 0
        self.work = Progress()

    async def admit(self, engines: Mapping[str, Any]) -> None:
        self.pushes.append(list(engines))
        await asyncio.gather(*(e.load_weights.remote(self._push_s, 0) for e in engines.values()))

    async def join(self, engines: Mapping[str, Any]) -> int | None:
        """Push to `engine`; the push leaves no copy, like a collective one."""
        return None

    async def progress(self) -> WorkDone:
        return WorkDone(self.work.count)

    async def step(self, passes: Sequence[float]) -> str:
        """Sleep for the given time in each pass, and report progress after each."""
        for seconds in passes:
            await asyncio.sleep(seconds)
            self.work.mark()
        return "trained"

    async def pushed(self, wait: bool) -> None:
        """No push is concurrent with a step."""

    async def logprobs(self, rows_D: Sequence[Any]) -> list[FloatArray]:
        self.forwards += 1
        return [logprobs_V(r.temperature)[r.tokens_T[r.first_trained :]] for r in rows_D]


class SimulatedRun:
    """Fleet, with the state that `start` and `work` leave.

    Args:
        engine: creates the policy engine for an index and an attempt, as a plain object.
        examine: handshake; by default a real one, recorded in `examined`.
        start_s: duration of an engine's creation.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        out: Path,
        student: str,
        *,
        engine: Callable[[SimulatedRun, int, int], Any] | None = None,
        examine: Callable[..., Awaitable[CalibrationReport]] | None = None,
        start_s: Callable[[int, int], float] = lambda _index, _attempt: 1.0,
        push_s: float = 10.0,
        tokens_per_s: float = 10.0,
        **settings: Any,
    ) -> None:
        self.loop, self.lines = loop, list[str]()
        self._engine = engine or _usual
        self.tokens_per_s = tokens_per_s
        self._start_s, self._push_s = start_s, push_s
        out.mkdir(parents=True)
        prompts = out / "prompts.jsonl"
        lines = (json.dumps({"prompt": f"say {i}", "answer": "3"}) for i in range(64))
        prompts.write_text("\n".join(lines))
        self.config = make(
            "rl",
            student=student, prompts=str(prompts), out=str(out / "out"), temperature=0.7,
            local=True, engine="embedded", smoke_test=False, **({"eval_every": 0} | settings),
        )  # fmt: skip
        self.inputs = check_rollout(self.config)
        directory = RunDirectory(self.config)
        directory.path.mkdir()
        (directory.path / "config.json").write_text('{"run_id": "simulated"}')
        roles = [replace(r, resources={}) for r in placed_roles(self.config)]
        placement = Placement(roles, name="simulated")
        cast = RolloutCast(self.config, self.inputs, directory, placement)
        cast._make = self._make
        cast.learners = self._learners  # type: ignore[method-assign]
        self._indices = itertools.count()
        self.tokenizer = probe_tokenizer(self.inputs.tokenizer)
        handshake: Any = SimpleNamespace(examine=examine or self._examine)
        self.fleet = Fleet(
            cast=cast, signals=Signals(), handshake=handshake, print_line=self.lines.append,
            trained=TrainedGroups(), start_model=student, found=print,
        )  # fmt: skip
        self.examined: list[list[str]] = []
        self.trained, self.version = TrainedGroups(), 0
        self.fleet.start(None)
        self.fleet.queue.publish(0, self.trained)
        self.fleet.work()

    def _make(self, plain: type, options: Mapping[str, Any], *given: Any, **named: Any) -> Any:
        if plain is GroupQueueActor or plain.__name__ in ("RolloutActor", "EvaluatorActor"):
            return SimulatedActor(self.loop, plain, *given, **named)
        role, *numbers = options["name"].split("/")[-1].split("-")
        index, attempt = int(numbers[0]), int(numbers[-1]) if len(numbers) > 1 else 0
        assert role == POLICY
        return SimulatedActor(
            self.loop, self._made_engine, index, attempt, start_s=self._start_s(index, attempt)
        )

    def _made_engine(self, index: int, attempt: int) -> Any:
        return self._engine(self, index, attempt)

    def _learners(self, *_given: Any) -> LearnerActors:
        leader = SimulatedActor(self.loop, SimulatedLearner, self._push_s)
        return LearnerActors(leader=leader, followers=[], meeting_point=None)

    async def _examine(
        self, fleet: Fleet, policies: Mapping[str, EnginePool], scorers: Mapping[str, EnginePool]
    ) -> CalibrationReport:
        self.examined.append(list(policies))

        async def learner(rows_D: Any) -> Any:
            return await fleet.learner.logprobs.remote(rows_D)

        return await handshake(
            policies=policies, teachers=scorers, learner=learner, tokenizer=self.tokenizer,
            temperature=self.config.sampling.temperature, learner_dtype="float32", deadline_s=60,
        )  # fmt: skip

    def step(self) -> list[int]:
        """One step of the driver with a learner that takes no time; the ids of its groups."""
        self.fleet.wait_for_groups()
        taken = self.fleet.queue.take(self.trained)
        self.trained = taken.after(self.trained)
        self.version += 1
        self.fleet.queue.publish(self.version, self.trained)
        return taken.group_ids

    def members(self, role: str = POLICY) -> list[Member]:
        return self.fleet.supervisor.members(role)

    def serving(self, role: str = POLICY) -> int:
        return len(self.fleet.supervisor.members(role, State.SERVING))

    def worker_rosters(self) -> list[Mapping[str, Any]]:
        """Engines that each worker knows."""
        return [m.handle.plain._roster[POLICY] for m in self.members(ROLLOUT)]


def _usual(run: SimulatedRun, _index: int, _attempt: int) -> SimulatedEngine:
    return SimulatedEngine(engine_info(run.tokenizer), run.tokens_per_s)
