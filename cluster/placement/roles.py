"""Roles of a run: their names, the number of actors of each, and the resources of one actor.

This module imports neither Ray nor torch, so that Ray can be started before they are imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from actors.config import EngineConfig
from actors.sglang.address import is_url
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from cluster.config.supervised import DpoConfig
from cluster.config.teachers import teacher_setting
from cluster.placement.engines import RunEngines
from cluster.placement.resources import ResourceDemand
from distill.envs.base import TEACHER
from distill.rewards.model_reward import REWARD_MODEL
from distill.settings import changed
from distill.stops import StopTokens

POLICY, REFERENCE, ROLLOUT, REWARD = "policy", "reference", "rollout", "reward model"
LEARNER, EVALUATOR, QUEUE = "learner", "evaluator", "queue"
RECORDER = "group recorder"  # replaces the learner if groups are only kept
EVALUATION = "evaluation"  # policy engines that serve only evaluations


def teacher_role(teacher: str) -> str:
    """Name of a teacher's role and of its pool."""
    return f"teacher {teacher}" if teacher else "teacher"


def teacher_roles(config: RolloutConfig) -> dict[str, str]:
    """Role of each teacher, by teacher name. A teacher that is the live policy has role POLICY."""
    if config.teacher.moves and config.teacher_rule is None:
        return {"": POLICY}
    return {name: teacher_role(name) for name in config.teacher_models()}


def served_teachers(config: RolloutConfig) -> dict[str, str]:
    """Roles of the teachers with their own engines, by teacher name."""
    return {name: role for name, role in teacher_roles(config).items() if role != POLICY}


def queried_roles(config: RolloutConfig) -> dict[str, str]:
    """Roles of the models, besides the policy, that environments may query, by model name."""
    roles = {name or TEACHER: role for name, role in teacher_roles(config).items()}
    roles |= dict.fromkeys(config.env.queried_models, REFERENCE)
    return roles if config.reward_model is None else roles | {REWARD_MODEL: REWARD}


def following_role(config: RolloutConfig) -> str | None:
    """Role of the engines that serve an EMA or lagged teacher; None without such a teacher."""
    return None if config.teacher_rule is None else teacher_role("")


def learner_title(index: int) -> str:
    return f"learner worker {index}" if index else "learner"


def worker_title(index: int) -> str:
    return f"rollout worker {index}"


def placed_roles(config: CommonConfig) -> list[ResourceDemand]:
    """Resource demands of every role of the run, at its smallest size."""
    compute, turns = _compute(config), turn_roles(config)
    on_gpu = config.cluster.device == "cuda"
    by_turns = {"CPU": 1.0, "GPU": 1 / len(turns)} if turns and on_gpu else {"CPU": 1.0}
    resources = by_turns if LEARNER in turns else compute
    learner = config.learner
    roles = [
        ResourceDemand(
            name=LEARNER,
            count=learner.workers,
            resources=resources,
            together=learner.shards if learner.replicas > 1 else 1,
        )
    ]
    if not isinstance(config, RolloutConfig) or config.train_from is not None:
        return roles
    if config.only_keeps:
        roles = []  # no learner; the actor that keeps groups reserves no resources
    bounds = pool_bounds(config)
    for role, engine in engines_of(config).items():
        count = bounds[role][0] if role in bounds else 1
        span = _workers_shared(config, engine) if role == POLICY else 1
        resources = compute if span > 1 else _engine_resources(config, engine)
        if role in turns:
            resources = by_turns
            span = parallelism(engine.server_flags).gpus if on_gpu else 1
        roles.append(
            ResourceDemand(
                name=role, count=count, resources=resources, nodes=engine.nodes, span=span
            )
        )
    if config.reward_model is not None:
        roles.append(ResourceDemand(name=REWARD, count=1, resources=compute))
    resources = {"CPU": config.rollout.cpus}
    roles.append(ResourceDemand(name=ROLLOUT, count=bounds[ROLLOUT][0], resources=resources))
    return roles


def unplaced_roles(config: CommonConfig) -> list[ResourceDemand]:
    """Roles of one actor each, which requests no resources, on the driver's node."""
    if not isinstance(config, RolloutConfig) or config.train_from is not None:
        return []
    names = [QUEUE]
    if config.only_keeps:
        names.append(RECORDER)
    elif config.eval.size:
        names.append(EVALUATOR)
    return [ResourceDemand(name=name, count=1, resources={}) for name in names]


def engine_makers(
    config: RolloutConfig, stops: StopTokens | None = None
) -> dict[str, tuple[str, Callable[[str, str], EngineConfig]]]:
    """Model of each role's engines, and what makes their settings from a model and a log file."""
    of, teachers = RunEngines(config, stops), config.teacher_models()
    makers = {POLICY: (config.model.path, of.policy)}
    makers |= {
        role: (teachers[name].model, of.teacher) for name, role in served_teachers(config).items()
    }
    if config.model.reference is not None:
        makers[REFERENCE] = config.model.reference, of.reference
    if config.eval.engines:
        makers[EVALUATION] = config.model.path, of.evaluation
    return makers


def engines_of(config: RolloutConfig) -> dict[str, EngineConfig]:
    """Engine settings by role."""
    return {role: make(model, "") for role, (model, make) in engine_makers(config).items()}


def turn_roles(config: CommonConfig) -> tuple[str, ...]:
    """Roles that take turns on the same GPUs; empty if none do."""
    if not isinstance(config, RolloutConfig) or config.train_from is not None:
        return ()
    turns = tuple(teacher_role(name) for name in config.teachers_by_turns)
    if config.policy_takes_turns:
        turns = (POLICY, *turns)
    return (LEARNER, *turns) if config.learner_takes_turns else turns


def colocated(config: CommonConfig) -> list[tuple[str, ...]]:
    """Sets of roles whose i-th actors share a place."""
    if not isinstance(config, RolloutConfig) or config.train_from is not None:
        return []
    turns = turn_roles(config)
    pair = config.cluster.colocate != "no" and not (config.only_keeps or LEARNER in turns)
    return [*([(LEARNER, POLICY)] if pair else []), *filter(None, [turns])]


def pool_bounds(config: CommonConfig) -> dict[str, tuple[int, int]]:
    """Smallest and largest size of each pool, by role; empty for a run without pools."""
    if not isinstance(config, RolloutConfig):
        return {}
    bounds: dict[str, tuple[int, int]] = {
        POLICY: config.policy.size,
        ROLLOUT: config.rollout.size,
    }
    bounds |= dict.fromkeys(served_teachers(config).values(), config.teacher.size)
    if config.eval.engines:
        bounds[EVALUATION] = (config.eval.engines, config.eval.engines)
    return bounds


def cpus_here(config: CommonConfig) -> int:
    """Number of CPUs to configure when the run starts Ray itself.

    At least the machine's, and enough to place all actors with every pool at its largest size, so
    that a machine with few cores can run them all.
    """
    return max(os.cpu_count() or 1, math.ceil(cpus_at_most(config)))


def cpus_at_most(config: CommonConfig) -> float:
    """Number of CPUs that a run requests with every pool at its largest size."""
    largest = {role: bounds[1] for role, bounds in pool_bounds(config).items()}
    return sum(
        largest.get(role.name, role.count) * role.bundles * role.resources.get("CPU", 0)
        for role in placed_roles(changed(config, device="cpu"))  # the plan for cuda imports torch
    )


def _workers_shared(config: RolloutConfig, engine: EngineConfig) -> int:
    """Number of learner workers whose GPUs one policy engine shares."""
    shares = engine.kind == "sglang" and config.shares_gpus
    return parallelism(engine.server_flags).gpus if shares else 1


def _engine_resources(config: CommonConfig, engine: EngineConfig) -> dict[str, float]:
    """Resources that an engine requests on each of its nodes.

    An external server requests none. A server with several GPUs requests whole GPUs.
    """
    if engine.external:
        return {}
    resources = _compute(config)
    spread = parallelism(engine.server_flags)
    if engine.kind == "sglang" and engine.device == "cuda" and spread.gpus > 1:
        resources["GPU"] = spread.gpus_a_node
    return resources


def _compute(config: CommonConfig) -> dict[str, float]:
    cluster = config.cluster
    return {"CPU": 1.0, "GPU": cluster.gpus_per_actor} if cluster.device == "cuda" else {"CPU": 1.0}


def model_paths(config: CommonConfig) -> dict[str, dict[str, str]]:
    """Checkpoints that each role loads, by role and setting."""
    if not isinstance(config, RolloutConfig):
        reference = config.model.reference if isinstance(config, DpoConfig) else None
        named = {
            "model": config.model.path,
            "reference": reference,
            "lora.adapter": config.lora.adapter,
        }
        return {LEARNER: {name: path for name, path in named.items() if path is not None}}
    student = {"student": config.model.path}
    adapter = {"lora.adapter": config.lora.adapter} if config.lora.adapter else {}
    models = config.teacher_models()
    teachers = {
        role: {teacher_setting(name): models[name].model}
        for name, role in served_teachers(config).items()
        if not is_url(models[name].model)
    }
    learner = student | adapter
    for held, place in ((config.copied_teachers, ""), (config.teacher_heads, ".head")):
        learner |= {teacher_setting(name) + place: path for name, path in held.items()}
    if config.train_from is not None:
        return {LEARNER: learner}
    reference = {REFERENCE: {"reference": config.model.reference}} if config.model.reference else {}
    reward = {REWARD: {"reward": config.reward_model}} if config.reward_model else {}
    evaluation = {EVALUATION: student} if config.eval.engines else {}
    trained = {} if config.only_keeps else {LEARNER: learner}
    return trained | {POLICY: student} | teachers | reference | reward | evaluation
