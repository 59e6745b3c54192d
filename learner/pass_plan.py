"""Plan of a worker's forward and backward passes: tokens at a time, layers recomputed or not."""

from __future__ import annotations

import logging

from distill.gpu import CONTEXT_BYTES
from learner.config import TOKEN_BUDGET, LearnerConfig
from learner.memory import holding_of, room_bytes
from learner.pass_memory import LearnerMemory, PassPlan, PassRequest
from learner.process_group import WorkerGroup

logger = logging.getLogger(__name__)


def plan_passes(config: LearnerConfig, device: str, group: WorkerGroup) -> PassPlan:
    """Plan of the passes for the memory that the model leaves; alike on all workers.

    Raises:
        ConfigError: no pass fits beside the model.
    """
    asked = PassPlan(
        config.learner.token_budget or TOKEN_BUDGET[device.partition(":")[0]],
        bool(config.learner.gradient_checkpointing),
    )
    memory = LearnerMemory.of(
        config.model,
        dtype=config.dtype,
        device=device,
        holding=holding_of(adapter=config.lora.trains_adapter, followed=config.shadow is not None),
    )
    sharers = 1 if device.startswith("cuda") else group.workers_here()
    plan = None
    if memory is not None:
        # This process has its context already: it is not in what is free.
        room = room_bytes(device, config.gpu_part, config.gpu_taken) // sharers + CONTEXT_BYTES
        plan = memory.plan(
            room,
            PassRequest.of(config.learner, config.longest_rows),
            workers=group.size,
            offloads=config.learner.offload_optimizer,
        )
    plan = plan or asked
    if group.total(float(plan.gradient_checkpointing)):
        plan = plan._replace(gradient_checkpointing=True)
    if group.total(float(not plan.reduces_once)):
        plan = plan._replace(reduces_once=False)
    if plan[:2] != asked[:2]:
        logger.warning(
            "memory is short on %s: gradient_checkpointing=%s, token_budget=%d",
            device,
            plan.gradient_checkpointing,
            plan.token_budget,
        )
    return plan
