"""Speed of each stage measured alone, in this process, without waiting for other stages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.rollout.episode import rollout_group
from actors.rollout.teacher import score_group
from cluster.config.opd import OpdConfig
from cluster.config.rollout_checks import check_rollout
from cluster.placement.engines import RunEngines
from distill.envs.base import EnvStream
from distill.objective.rows import policy_rows
from distill.types import TrajectoryGroup
from distill.weights.model_weights import total_bytes
from distill.weights.shared_memory import SharedBlock
from learner.learner import Learner
from learner.plan import Part
from learner.policy_loss import PolicyObjectiveLoss

REPEATS = 5


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = run()
    return time.perf_counter() - started, value


def measure_stages(config: OpdConfig, scratch: Path) -> dict[str, Any]:
    """Median seconds per step and tokens per second of rollout, scoring, learning and loading."""
    inputs = check_rollout(config)
    dataset = EnvStream(inputs.train, group_size=config.sampling.group_size, seed=config.seed)
    engines = RunEngines(config)
    policy = engines.policy(config.model.path, str(scratch / "policy.log")).build()
    teacher = engines.teacher(
        config.teacher_models()[""].model, str(scratch / "teacher.log")
    ).build()
    learner = Learner(config.learner_config(), str(scratch))
    loss = PolicyObjectiveLoss(objective=config.objective)

    async def rollout(step: int) -> list[TrajectoryGroup]:
        first = step * config.data.batch_size
        return await asyncio.gather(
            *(
                rollout_group(
                    policy, dataset.builder(g), config.sampling.train(), group_id=g, seed=0
                )
                for g in range(first, first + config.data.batch_size)
            )
        )

    async def score(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return await asyncio.gather(*(score_group(teacher, group) for group in groups))

    def learn(groups: list[TrajectoryGroup]) -> None:
        learner.step(Part(rows_D=policy_rows(groups, loss.objective), loss=loss))

    seconds: dict[str, list[float]] = {"rollout": [], "teacher": [], "learn": [], "load": []}
    block = SharedBlock()
    block.write(learner.weights())
    weights = block.share()
    groups: list[TrajectoryGroup] = []
    with asyncio.Runner() as runner:
        for step in range(REPEATS + 1):
            rolled, groups = _timed(lambda s=step: runner.run(rollout(s)))
            scored, groups = _timed(lambda g=groups: runner.run(score(g)))
            learnt, _ = _timed(lambda g=groups: learn(g))
            loaded, _ = _timed(lambda s=step: runner.run(policy.load_weights(weights, s)))
            if step == 0:
                continue  # the first pass warms caches and kernels
            for name, value in zip(seconds, (rolled, scored, learnt, loaded), strict=True):
                seconds[name].append(value)
    memcpy_s = _memcpy_seconds(total_bytes(learner.weights()))
    tokens = sum(group.num_actions for group in groups)
    context = sum(len(s) for group in groups for s in group.segments())
    return {
        "trained_tokens_per_step": tokens,
        "context_tokens_per_step": context,
        "load_over_memcpy": median(seconds["load"]) / memcpy_s,
        **{
            name: {"seconds": median(values), "tokens_per_s": tokens / median(values)}
            for name, values in seconds.items()
        },
    }


def _memcpy_seconds(nbytes: int) -> float:
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    return median(_timed(lambda: target.copy_(source))[0] for _ in range(9))
