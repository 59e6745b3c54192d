"""Plan that `dry_run` prints: roles, their resources and memory, and what a push moves."""

from __future__ import annotations

import os

from actors.config import choose_dtype
from actors.sglang.memory import served_bytes
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.placement.gpu_plan import GpuPlan
from cluster.placement.push_plan import describe_push
from cluster.placement.resource_plan import (
    Layout,
    RolePlan,
    engine_memory,
    learner_memory,
    render,
)
from cluster.placement.roles import (
    LEARNER,
    REWARD,
    bounds_of,
    colocated,
    engines_of,
    placed_roles,
    turn_roles,
)
from cluster.placement.starts_here import starts_here
from distill.models.loading import weight_files
from learner.config import TOKEN_BUDGET
from learner.memory import estimate_memory
from learner.pass_memory import estimate_pass


def describe_layout(config: CommonConfig, longest_rows: int = 0) -> str:
    """The plan that `dry_run` prints: who takes what, and what a push moves. Starts nothing.

    The device is chosen already (`with_device`).

    Args:
        longest_rows: see `LearnerConfig`; 0: not known.

    Raises:
        ConfigError: a role does not fit onto its part of a GPU.
    """
    device = config.cluster.device
    assert device != "auto", "the device of a run is chosen before its plan is made"
    largest = {role: bounds[1] for role, bounds in bounds_of(config).items()}
    plans = []
    for role in placed_roles(config, device):
        memory, note = _memory(config, role.name, device)
        plans.append(
            RolePlan(
                name=role.name,
                count=role.count,
                most=largest.get(role.name, role.count),
                cpus=role.resources.get("CPU", 0),
                gpus=role.resources.get("GPU", 0),
                nodes=role.nodes,
                span=role.span,
                memory=memory,
                note=note,
            )
        )
    push = ""
    if isinstance(config, RolloutConfig) and config.pushes:
        push = describe_push(config, device)
    cores = os.cpu_count() if starts_here() else None
    together, turns = colocated(config), turn_roles(config)
    plan = render(Layout(roles=plans, colocate=together, turns=turns, push=push, cores=cores))
    if not device.startswith("cuda"):
        return plan
    engines = engines_of(config, device) if isinstance(config, RolloutConfig) else {}
    here = {role: engine for role, engine in engines.items() if not engine.external}
    return "\n".join([plan, *GpuPlan(config, device, here, longest_rows).lines()])


def _memory(config: CommonConfig, role: str, device: str) -> tuple[int | None, str]:
    """Bytes of one member, as far as they are known before it starts, and of what."""
    if role == LEARNER:
        model, workers = config.model.path, config.learner.workers
        estimate = estimate_memory(model, config.learner_holding)
        dtype = choose_dtype(config.learner.dtype, device)
        passes = estimate_pass(model, dtype=dtype, device=device, workers=workers)
        budget = config.learner.token_budget or TOKEN_BUDGET[device]
        note = passes and passes.describe(budget, config.learner.gradient_checkpointing)
        frozen = config.frozen_in_learner(device)
        note = f"{'with copies of teachers, ' if frozen != 0 else ''}and {note or 'activations'}"
        return learner_memory(estimate, frozen, workers), note
    if role == REWARD and isinstance(config, RolloutConfig) and config.reward_model is not None:
        dtype = config.engine.dtype_on(device)
        return engine_memory(estimate_memory(config.reward_model), dtype), "and activations"
    engine = engines_of(config, device).get(role) if isinstance(config, RolloutConfig) else None
    if engine is None:
        return 0, ""
    if engine.external:
        return 0, "a server that runs elsewhere"
    if not weight_files(engine.model):
        return None, "and caches"
    ranks = parallelism(engine.server_flags).split if device == "cuda" else 1
    return served_bytes(engine.model, engine.dtype) // ranks, "and caches"
