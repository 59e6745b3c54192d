"""Plan of a worker's forward and backward passes: tokens at a time, layers recomputed or not."""

from __future__ import annotations

import logging

from learner.config import TOKEN_BUDGET, LearnerConfig
from learner.memory import (
    MOMENTS,
    PassPlan,
    estimate_memory,
    estimate_pass,
    fit_pass,
    holding_of,
    room_bytes,
)
from learner.process_group import WorkerGroup

logger = logging.getLogger(__name__)


def plan_passes(config: LearnerConfig, device: str, group: WorkerGroup, share: float) -> PassPlan:
    """Plan of the passes for the memory that the model leaves; alike on all workers.

    Args:
        share: of the model's bytes, that of one memory.
    """
    asked = PassPlan(
        config.token_budget or TOKEN_BUDGET[device.partition(":")[0]],
        bool(config.gradient_checkpointing),
    )
    holding = holding_of(adapter=config.trains_adapter, followed=config.shadow is not None)
    states = estimate_memory(config.model, holding)
    memory = estimate_pass(config.model, dtype=config.dtype, device=device, workers=group.size)
    sharers = 1 if device.startswith("cuda") else group.workers_here()
    plan = asked
    if states is not None and memory is not None:
        held = states.bytes
        if config.offload_optimizer and not config.trains_adapter:
            held -= states.parameters * MOMENTS  # elsewhere during a pass
        plan = fit_pass(
            memory,
            (room_bytes(device, config.gpu_taken) - int(held * share)) // sharers,
            device=device,
            token_budget=config.token_budget,
            gradient_checkpointing=config.gradient_checkpointing,
        )
    if group.total(float(plan.gradient_checkpointing)):
        plan = plan._replace(gradient_checkpointing=True)
    if plan != asked:
        logger.warning(
            "memory is short on %s: gradient_checkpointing=%s, token_budget=%d",
            device,
            plan.gradient_checkpointing,
            plan.token_budget,
        )
    return plan
