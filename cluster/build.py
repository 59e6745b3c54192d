"""From checked settings to Ray actors: where `ray.remote` meets the plain classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public

from actors.config import EngineConfig, choose_dtype, choose_engine
from actors.evaluate import Evaluator
from actors.sglang_flags import tensor_parallel_size
from actors.worker import RolloutWorker
from cluster.checks import RolloutInputs, SupervisedInputs
from cluster.config import CommonConfig
from cluster.config_on_policy import OpdConfig, RolloutConfig
from cluster.config_supervised import SupervisedConfig
from cluster.handles import EnginePool
from cluster.learner_actor import (
    LearnerActor,
    LearnerFollower,
    TrainingLoop,
    build_policy_loop,
    build_supervised_loop,
    policy_losses,
    supervised_losses,
)
from cluster.ledger import Ledger
from cluster.outputs import RunDirectory
from cluster.queue import GroupQueue, WorkerEnd
from cluster.weights import PushSettings
from cluster.weights_group import own_address
from distill.delivery import TrainedGroups
from distill.envs.single_turn import PromptDataset
from distill.errors import ConfigError
from distill.rewards import load_reward
from learner.checkpoint import Checkpoint
from learner.config import LearnerConfig
from learner.group import Membership, open_store
from learner.worker import LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerActors:
    """The learner's workers. The leader is asked for everything; the others `serve` it.

    `meeting_point` is where they find one another; it lasts as long as this object.
    """

    leader: Any
    followers: list[Any]
    meeting_point: TCPStore | None

    @property
    def all(self) -> dict[str, Any]:
        return {"learner": self.leader} | self.named_followers

    @property
    def named_followers(self) -> dict[str, Any]:
        return {f"learner worker {i}": actor for i, actor in enumerate(self.followers, start=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutActors:
    """Every actor of an opd or rl run. `all` names each of them, for when one dies.

    `teachers` are the engines of each teacher by its name, `references` at most one engine.
    """

    queue: GroupQueue
    policies: list[Any]
    teachers: Mapping[str, list[Any]]
    references: list[Any]
    workers: list[Any]
    learners: LearnerActors
    evaluator: Any

    @property
    def learner(self) -> Any:
        return self.learners.leader

    @property
    def policy(self) -> EnginePool:
        return EnginePool(self.policies)

    @property
    def teacher_pools(self) -> dict[str, EnginePool]:
        return {name: EnginePool(engines) for name, engines in self.teachers.items()}

    @property
    def first_engines(self) -> dict[str, str]:
        """What messages call the first engine of each teacher, by the teacher's name."""
        return {name: f"{_role(name)} engine 0" for name in self.teachers}

    @property
    def scorers(self) -> dict[str, Any]:
        """Every engine that scores what another sampled, by its name in messages."""
        named = {}
        for name, engines in self.teachers.items():
            named |= _named(_role(name), engines)
        return named | _named("reference", self.references)

    @property
    def all(self) -> dict[str, Any]:
        return {
            "queue": self.queue.actor,
            **self.learners.all,
            "evaluator": self.evaluator,
            **_named("policy", self.policies),
            **self.scorers,
            **{f"rollout worker {i}": actor for i, actor in enumerate(self.workers)},
        }


def _role(teacher: str) -> str:
    return f"teacher {teacher}" if teacher else "teacher"


def _named(role: str, engines: Sequence[Any]) -> dict[str, Any]:
    return {f"{role} engine {i}": actor for i, actor in enumerate(engines)}


def resolve_device(config: CommonConfig) -> str:
    """cpu or cuda, by what the connected Ray cluster has.

    Raises:
        ConfigError: cuda was asked for and the cluster has no GPU.
    """
    gpus = ray.cluster_resources().get("GPU", 0)
    if config.device == "cuda" and not gpus:
        raise ConfigError("device=cuda but the Ray cluster has no GPU; use device=cpu or add one")
    if not gpus or config.device == "cpu":
        for name in ("offload_optimizer", "liger"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}=True is for CUDA, and the learner is on a CPU; leave it out"
                )
        return "cpu"
    if config.learner_workers > 1 and config.gpus_per_actor < 1:
        raise ConfigError(
            f"gpus_per_actor={config.gpus_per_actor} with learner_workers="
            f"{config.learner_workers}: NCCL needs a whole GPU a worker; use gpus_per_actor=1"
        )
    if (needed := config.learner_workers * config.gpus_per_actor) > gpus:
        raise ConfigError(
            f"learner_workers={config.learner_workers} need {needed:g} GPUs (gpus_per_actor="
            f"{config.gpus_per_actor:g}) and the Ray cluster has {gpus:g}; use fewer, or add some"
        )
    return "cuda"


def cpu_actors(config: CommonConfig) -> int:
    """How many actors take a CPU of their own."""
    if not isinstance(config, RolloutConfig):
        return config.learner_workers
    engines = config.policy_engines + (config.reference is not None)
    if isinstance(config, OpdConfig):
        engines += config.teacher_engines * len(config.teacher_models())
    return engines + config.learner_workers


def build_rollout(
    config: RolloutConfig,
    inputs: RolloutInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    device: str,
) -> RolloutActors:
    """Creates the actors; none has been waited for yet."""
    student = resume_from.model_dir if resume_from else config.student
    policies = [
        _engine(
            config,
            config.policy_engine(student, device, directory.log(f"policy-{i}")),
            directory.actor_name(f"policy-{i}"),
        )
        for i in range(config.policy_engines)
    ]
    teachers = _teachers(config, directory, device)
    references = []
    if config.reference is not None:
        engine = config.reference_engine(device, directory.log("reference-0"))
        references = [_engine(config, engine, directory.actor_name("reference-0"))]
    trained = TrainedGroups.from_json(resume_from.delivery) if resume_from else TrainedGroups()
    window = config.prompts_per_step * (config.max_staleness + 1)
    queue = GroupQueue(
        Ledger(
            trained=trained,
            groups_per_step=config.prompts_per_step,
            max_staleness=config.max_staleness,
            total_groups=config.steps * config.prompts_per_step,
        ),
        maxsize=window,
        timeout_s=config.deadline_s,
        actor_options={"num_cpus": 0, "name": directory.actor_name("queue")},
    )
    learner_config = config.learner(
        config.student,
        device,
        resume_from=resume_from,
        updates_per_step=config.objective().num_substeps,
    )
    build = partial(
        build_policy_loop,
        config=config,
        learner_config=learner_config,
        inputs=inputs,
        queue=queue,
        policies=_named("policy", policies),
        push=PushSettings(
            choice=config.weights,
            served=choose_engine(config.engine) == "sglang",
            device=device,
            directory=str(directory.path / "weights"),
            model=config.student,
            temperature=config.temperature,
            learner_dtype=choose_dtype(config.learner_dtype, device),
            probe_every=config.probe_every,
            timeout_s=config.deadline_s,
        ),
        store=directory.store,
        resume_from=resume_from,
        dump_dir=str(directory.path / "failed"),
        trace_path=directory.trace,
    )
    reward = load_reward(config.reward)
    dataset = PromptDataset(
        inputs.train_prompts_P,
        inputs.tokenizer,
        group_size=config.group_size,
        seed=config.seed,
        reward=reward,
    )
    worker_class = ray.remote(RolloutWorker)
    workers = [
        worker_class.options(num_cpus=0, name=directory.actor_name(f"rollout-{i}")).remote(
            policy=EnginePool(policies),
            teachers={name: EnginePool(engines) for name, engines in teachers.items()},
            reference=EnginePool(references) if references else None,
            top_k=config.objective().asked_of_teacher,
            sink=WorkerEnd(queue),
            dataset=dataset,
            sampling=config.train_sampling(),
            seed=config.seed,
            max_groups=-(-window // config.rollout_workers),
        )
        for i in range(config.rollout_workers)
    ]
    evaluator = ray.remote(Evaluator).options(num_cpus=0, name=directory.actor_name("evaluator"))
    return RolloutActors(
        queue=queue,
        policies=policies,
        teachers=teachers,
        references=references,
        workers=workers,
        learners=_learners(
            config, learner_config, build, partial(policy_losses, config, device), directory
        ),
        evaluator=evaluator.remote(inputs.eval_prompts_P, inputs.tokenizer, reward),
    )


def _teachers(config: RolloutConfig, directory: RunDirectory, device: str) -> dict[str, list[Any]]:
    if not isinstance(config, OpdConfig):
        return {}
    made: dict[str, list[Any]] = {}
    for name in config.teacher_models():
        made[name] = []
        for i in range(config.teacher_engines):
            role = f"{_role(name).replace(' ', '-')}-{i}"
            engine = config.teacher_engine(name, device, directory.log(role))
            made[name].append(_engine(config, engine, directory.actor_name(role)))
    return made


def build_supervised(
    config: SupervisedConfig,
    inputs: SupervisedInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    device: str,
) -> LearnerActors:
    """The actors of an sft or dpo run."""
    learner_config = config.learner(config.model, device, resume_from=resume_from)
    build = partial(
        build_supervised_loop,
        config=config,
        learner_config=learner_config,
        inputs=inputs,
        directory=directory,
        resume_from=resume_from,
    )
    return _learners(config, learner_config, build, partial(supervised_losses, config), directory)


def _engine(config: CommonConfig, engine: EngineConfig, name: str) -> Any:
    actor_class = ray.remote(engine.engine_class)
    options = _engine_resources(config, engine)
    return actor_class.options(**options, name=name).remote(**engine.arguments())


def _engine_resources(config: CommonConfig, engine: EngineConfig) -> dict[str, float]:
    """A server somewhere else takes nothing here; a tensor-parallel one takes whole GPUs."""
    if engine.external:
        return {"num_cpus": 0, "num_gpus": 0}
    resources = _compute(config, engine.device)
    ranks = tensor_parallel_size(engine.server_flags)
    if engine.kind == "sglang" and engine.device == "cuda" and ranks > 1:
        resources["num_gpus"] = ranks
    return resources


def _learners(
    config: CommonConfig,
    learner_config: LearnerConfig,
    build: Callable[..., TrainingLoop],
    losses: Callable[[], Sequence[LossFunction]],
    directory: RunDirectory,
) -> LearnerActors:
    """The leader, whose loop `build` makes of its membership, and the workers beside it."""
    resources = _compute(config, learner_config.device)
    workers = config.learner_workers
    meeting_point, memberships = None, [None] * workers
    if workers > 1:
        address = own_address(len(ray.nodes()) == 1)
        meeting_point = open_store(address, config.deadline_s)
        memberships = [
            Membership(
                address=address,
                port=meeting_point.port,
                rank=rank,
                size=workers,
                timeout_s=config.deadline_s,
            )
            for rank in range(workers)
        ]
    leader = ray.remote(LearnerActor).options(**resources, name=directory.actor_name("learner"))
    follower = ray.remote(LearnerFollower)
    return LearnerActors(
        leader=leader.remote(partial(build, membership=memberships[0])),
        followers=[
            follower.options(**resources, name=directory.actor_name(f"learner-{rank}")).remote(
                learner_config, losses, memberships[rank]
            )
            for rank in range(1, workers)
        ],
        meeting_point=meeting_point,
    )


def kill(actors: Iterable[Any]) -> None:
    """Ends actors at once; whatever they were to write has been written."""
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _compute(config: CommonConfig, device: str) -> dict[str, float]:
    return {"num_cpus": 1, "num_gpus": config.gpus_per_actor if device == "cuda" else 0}
