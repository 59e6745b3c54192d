"""Roles of a run: their names, the number of actors of each, and the resources of one."""

from __future__ import annotations

import ray
import torch

from actors.config import EngineConfig, choose_dtype
from actors.sglang.address import is_url
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import OpdConfig, RolloutConfig
from cluster.config.supervised import DpoConfig, SupervisedConfig
from cluster.placement.gpu_plan import GpuPlan, trained_model
from cluster.placement.push_plan import describe_push, require_lenders
from cluster.placement.resource_plan import (
    Layout,
    RolePlan,
    engine_memory,
    learner_memory,
    render,
)
from cluster.placement.resources import ResourceDemand
from cluster.placement.starts_here import joins_cluster
from distill.errors import ConfigError
from distill.models.loading import resolve_device as device_here
from learner.config import TOKEN_BUDGET
from learner.memory import estimate_memory, estimate_pass, holding_of

POLICY, REFERENCE, ROLLOUT, REWARD = "policy", "reference", "rollout", "reward model"
LEARNER, EVALUATOR, QUEUE = "learner", "evaluator", "queue"
KEEPER = "keeper"  # in the learner's place, where groups are kept and not trained
EVALUATION = "evaluation"  # policy engines that evaluations have to themselves


def teacher_role(teacher: str) -> str:
    """The role, and the pool, of a teacher by its name."""
    return f"teacher {teacher}" if teacher else "teacher"


def teacher_roles(config: RolloutConfig) -> dict[str, str]:
    """The role of each teacher, by its name; of one that is the live policy, the policy's."""
    if config.teacher_moves and config.teacher_rule is None:
        return {"": POLICY}
    return {name: teacher_role(name) for name in config.teacher_models()}


def served_teachers(config: RolloutConfig) -> dict[str, str]:
    """The roles of teachers with engines of their own, by name."""
    return {name: role for name, role in teacher_roles(config).items() if role != POLICY}


def following_role(config: RolloutConfig) -> str | None:
    """The role of the engines whose teacher follows the policy; None: there are none."""
    return None if config.teacher_rule is None else teacher_role("")


def learner_title(index: int) -> str:
    return f"learner worker {index}" if index else "learner"


def worker_title(index: int) -> str:
    return f"rollout worker {index}"


def placed_roles(config: CommonConfig, device: str) -> list[ResourceDemand]:
    """Resource demands of every role of the run, at its smallest size."""
    compute = _compute(config, device)
    roles = [ResourceDemand(name=LEARNER, count=config.learner_workers, resources=compute)]
    if not isinstance(config, RolloutConfig) or config.rollouts is not None:
        return roles
    if config.only_keeps:
        roles = []  # what keeps groups takes nothing
    bounds = pool_bounds(config)
    for role, engine in _engines(config, device).items():
        count = bounds[role][0] if role in bounds else 1
        resources = _engine_resources(config, engine)
        roles.append(
            ResourceDemand(name=role, count=count, resources=resources, nodes=engine.nodes)
        )
    if config.reward_model is not None:
        roles.append(ResourceDemand(name=REWARD, count=1, resources=compute))
    if config.rollout_cpus:
        resources = {"CPU": config.rollout_cpus}
        roles.append(
            ResourceDemand(name=ROLLOUT, count=config.rollout_workers, resources=resources)
        )
    return roles


def _engines(config: RolloutConfig, device: str) -> dict[str, EngineConfig]:
    """Engine settings by role."""
    engines = {POLICY: config.policy_engine(config.student, device, "")}
    if isinstance(config, OpdConfig):
        for name, role in served_teachers(config).items():
            engines[role] = config.teacher_engine(name, device, "")
    if config.reference is not None:
        engines[REFERENCE] = config.reference_engine(device, "")
    if config.eval_engines:
        engines[EVALUATION] = config.evaluation_engine(config.student, device, "")
    return engines


def colocated(config: CommonConfig) -> tuple[str, ...]:
    """The roles whose members share places one by one."""
    shares = isinstance(config, RolloutConfig) and config.colocate and not config.only_keeps
    return (LEARNER, POLICY) if shares else ()


def pool_bounds(config: RolloutConfig) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size of each pool, by its role."""
    bounds = {
        POLICY: (config.policy_engines, config.policy_engines_max or config.policy_engines),
        ROLLOUT: (config.rollout_workers, config.rollout_workers_max or config.rollout_workers),
    }
    if isinstance(config, OpdConfig):
        largest = config.teacher_engines_max or config.teacher_engines
        for role in served_teachers(config).values():
            bounds[role] = (config.teacher_engines, largest)
    if config.eval_engines:
        bounds[EVALUATION] = (config.eval_engines, config.eval_engines)
    return bounds


def cpus_at_most(config: CommonConfig) -> float:
    """The CPUs that a run takes when every pool is as large as it may be."""
    largest = {role: bounds[1] for role, bounds in _bounds_of(config).items()}
    return sum(
        largest.get(role.name, role.count) * role.nodes * role.resources.get("CPU", 0)
        for role in placed_roles(config, "cpu")
    )


def _bounds_of(config: CommonConfig) -> dict[str, tuple[int, int]]:
    return pool_bounds(config) if isinstance(config, RolloutConfig) else {}


def resolve_device(config: CommonConfig) -> str:
    """cpu or cuda, by what the connected Ray cluster, or this process, has.

    Raises:
        ConfigError: cuda was asked for and the cluster has no GPU.
    """
    gpus = torch.cuda.device_count() if config.local else ray.cluster_resources().get("GPU", 0)
    _require_gpu(config, gpus, "this machine" if config.local else "the Ray cluster")
    if not gpus or config.device == "cpu":
        for name in ("offload_optimizer", "liger"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}=True is for CUDA, and the learner is on a CPU; leave it out"
                )
        return "cpu"
    _require_gpus_of_their_own(config)
    if isinstance(config, RolloutConfig):
        require_lenders(config)
    return "cuda"


def _require_gpu(config: CommonConfig, gpus: float, where: str) -> None:
    if config.device == "cuda" and not gpus:
        raise ConfigError(f"device=cuda but {where} has no GPU; use device=cpu or add one")


def _require_gpus_of_their_own(config: CommonConfig) -> None:
    """Raises ConfigError if two learner workers could meet on one GPU: NCCL would refuse.

    Halves of GPUs are safe where each worker's bundle is a whole one, with a policy engine in it.
    """
    workers, share = config.learner_workers, config.gpus_per_actor
    if workers == 1 or share >= 1 or config.only_keeps:
        return
    if isinstance(config, RolloutConfig) and config.colocate:
        if share == 0.5 and config.policy_engines == workers:
            return
        raise ConfigError(
            f"colocate=True gpus_per_actor={share} learner_workers={workers} policy_engines="
            f"{config.policy_engines}: two workers could meet on one GPU, which NCCL refuses; use "
            f"gpus_per_actor=0.5 and policy_engines={workers}"
        )
    raise ConfigError(
        f"gpus_per_actor={share} with learner_workers={workers}: NCCL needs a GPU of its own for "
        "each worker; use gpus_per_actor=1, or colocate=True with as many policy engines"
    )


def _engine_resources(config: CommonConfig, engine: EngineConfig) -> dict[str, float]:
    """What an engine takes of each of its nodes.

    A server somewhere else takes nothing here; one of several GPUs takes them whole.
    """
    if engine.external:
        return {}
    resources = _compute(config, engine.device)
    spread = parallelism(engine.server_flags)
    if engine.kind == "sglang" and engine.device == "cuda" and spread.gpus > 1:
        resources["GPU"] = spread.gpus_a_node
    return resources


def _compute(config: CommonConfig, device: str) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": config.gpus_per_actor} if device == "cuda" else {"CPU": 1.0}


def describe_layout(config: CommonConfig) -> str:
    """The plan that `dry_run` prints: who takes what, and what a push moves. Starts nothing.

    Raises:
        ConfigError: cuda was asked for, and this machine, where the run would start, has no GPU;
            or a role does not fit onto its part of a GPU.
    """
    if not joins_cluster(local=config.local) and config.gpu_memory_gib is None:
        _require_gpu(config, torch.cuda.device_count(), "this machine")
    device = device_here(config.device)
    if isinstance(config, RolloutConfig) and device.startswith("cuda"):
        require_lenders(config)
    largest = {role: bounds[1] for role, bounds in _bounds_of(config).items()}
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
                memory=memory,
                note=note,
            )
        )
    push = ""
    if isinstance(config, RolloutConfig) and config.rollouts is None and config.train:
        push = describe_push(config, device)
    plan = render(
        Layout(roles=plans, strategy=config.placement, colocate=colocated(config), push=push)
    )
    if not device.startswith("cuda"):
        return plan
    engines = _engines(config, device) if isinstance(config, RolloutConfig) else {}
    here = {role: engine for role, engine in engines.items() if not engine.external}
    return "\n".join([plan, *GpuPlan(config, device, here).lines()])


def model_paths(config: CommonConfig) -> dict[str, dict[str, str]]:
    """The checkpoints that each role loads, by the setting that names them."""
    if not isinstance(config, RolloutConfig):
        assert isinstance(config, SupervisedConfig)
        reference = config.reference if isinstance(config, DpoConfig) else None
        named = {"model": config.model, "reference": reference, "lora_adapter": config.lora_adapter}
        return {LEARNER: {name: path for name, path in named.items() if path is not None}}
    student = {"student": config.student}
    adapter = {"lora_adapter": config.lora_adapter} if config.lora_adapter else {}
    models = config.teacher_models()
    teachers = {
        role: {f"teachers.{name}" if name else "teacher": models[name].model}
        for name, role in served_teachers(config).items()
        if not is_url(models[name].model)
    }
    learner = student | adapter
    if config.copies_teachers:
        learner |= {name: path for paths in teachers.values() for name, path in paths.items()}
    if config.rollouts is not None:
        return {LEARNER: learner}
    reference = {REFERENCE: {"reference": config.reference}} if config.reference else {}
    reward = {REWARD: {"reward": config.reward_model}} if config.reward_model else {}
    evaluation = {EVALUATION: student} if config.eval_engines else {}
    trained = {} if config.only_keeps else {LEARNER: learner}
    return trained | {POLICY: student} | teachers | reference | reward | evaluation


def _memory(config: CommonConfig, role: str, device: str) -> tuple[int | None, str]:
    """Bytes of one member, as far as they are known before it starts, and of what."""
    if role == LEARNER:
        model, workers = trained_model(config), config.learner_workers
        followed = config.teacher_rule is not None
        holding = holding_of(adapter=config.trains_adapter, followed=followed)
        estimate = estimate_memory(model, holding)
        dtype = choose_dtype(config.learner_dtype, device)
        passes = estimate_pass(model, dtype=dtype, device=device, workers=workers)
        budget = config.token_budget or TOKEN_BUDGET[device]
        note = passes and passes.describe(budget, config.gradient_checkpointing)
        return learner_memory(estimate, workers), f"and {note or 'activations'}"
    if role == REWARD and isinstance(config, RolloutConfig) and config.reward_model is not None:
        dtype = choose_dtype(config.dtype, device)
        return engine_memory(estimate_memory(config.reward_model), dtype), "and activations"
    engine = _engines(config, device).get(role) if isinstance(config, RolloutConfig) else None
    if engine is None:
        return 0, ""
    if engine.external:
        return 0, "a server that runs elsewhere"
    ranks = parallelism(engine.server_flags).split if device == "cuda" else 1
    return engine_memory(estimate_memory(engine.model), engine.dtype, ranks), "and caches"
