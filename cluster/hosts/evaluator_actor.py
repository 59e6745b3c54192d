"""The evaluator's actor: hosts the evaluator and reports its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from actors.rollout.evaluator import Evaluation, Evaluator
from cluster.handles.engine_pool import EnginePool
from cluster.supervision.supervise import WorkDone
from distill.envs.base import EnvDataset
from distill.sampling import EvalSampling, TrainSampling
from distill.types import Tokenizer


class EvaluatorActor:
    """Hosts an `Evaluator`, which its arguments build, in an actor."""

    def __init__(self, problems: EnvDataset, tokenizer: Tokenizer, user_code_file: str) -> None:
        self._evaluator = Evaluator(problems, tokenizer, user_code_file)
        self._asked: list[EnginePool] = []  # by calls in progress
        self._answers = 0  # of pools whose calls have ended

    async def progress(self) -> WorkDone:
        """Heartbeat; call it in `HEALTH_GROUP`. Its count changes with every engine's answer."""
        engines = frozenset(name for pool in self._asked for name in pool.in_progress)
        return WorkDone(self._answers + sum(pool.answers for pool in self._asked), engines)

    async def evaluate(
        self,
        engines: EnginePool,
        sampling: EvalSampling,
        models: Mapping[str, EnginePool],
        keep: int | None,
    ) -> Evaluation:
        """See `Evaluator.evaluate`."""
        with self._asking([engines, *models.values()]):
            return await self._evaluator.evaluate(engines, sampling, models, keep)

    async def reverse_kl(
        self,
        policy: EnginePool,
        teachers: Mapping[str, EnginePool],
        sampling: TrainSampling,
        models: Mapping[str, EnginePool],
    ) -> dict[str, float]:
        """See `Evaluator.reverse_kl`."""
        with self._asking([policy, *teachers.values(), *models.values()]):
            return await self._evaluator.reverse_kl(policy, teachers, sampling, models=models)

    @contextmanager
    def _asking(self, pools: Iterable[EnginePool]) -> Iterator[None]:
        asked = list(pools)
        self._asked += asked
        try:
            yield
        finally:
            self._asked = [pool for pool in self._asked if pool not in asked]
            self._answers += sum(pool.answers for pool in asked)
