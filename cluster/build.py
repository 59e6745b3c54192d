"""From checked settings to Ray actors: where `ray.remote` meets the plain classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ray
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from actors.config import EngineConfig, choose_engine
from actors.evaluate import Evaluator
from actors.sglang_flags import tensor_parallel_size
from actors.worker import RolloutWorker
from cluster.checks import OpdInputs, SftInputs
from cluster.config import CommonConfig, OpdConfig, SftConfig
from cluster.handles import EnginePool
from cluster.ledger import Ledger
from cluster.outputs import RunDirectory
from cluster.queue import GroupQueue, WorkerEnd
from cluster.weights import Publisher, PushSettings
from distill.batching import TrainingRow
from distill.delivery import TrainedGroups
from distill.envs.single_turn import PromptDataset
from distill.errors import ConfigError
from distill.types import FloatArray
from learner.checkpoint import Checkpoint, CheckpointStore
from learner.config import LearnerConfig
from learner.learner import Learner
from learner.loop import PolicyLoop
from learner.sft import SftLoop


class TrainingLoop(Protocol):
    """What the learner's actor hosts."""

    learner: Learner

    def step(self) -> dict[str, float]: ...

    def save(self) -> Checkpoint: ...


class LearnerActor:
    """Hosts a training loop in an actor of its own; the loop is built there, by `build`."""

    def __init__(self, build: Callable[[], TrainingLoop]) -> None:
        self._loop = build()

    def step(self) -> dict[str, float]:
        return self._loop.step()

    def save(self) -> Checkpoint:
        return self._loop.save()

    def publish(self) -> str:
        """Returns how weights reach which engine."""
        publisher = self._publisher()
        assert isinstance(self._loop, PolicyLoop)
        self._loop.publish()
        return publisher.describe()

    def settle(self) -> float | None:
        """The last weight probe's gap."""
        return self._publisher().settle()

    def _publisher(self) -> Publisher:
        assert isinstance(self._loop, PolicyLoop)
        assert isinstance(self._loop.publisher, Publisher)
        return self._loop.publisher

    def logprobs(self, rows_D: Sequence[TrainingRow]) -> list[FloatArray]:
        return self._loop.learner.logprobs(rows_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdActors:
    """Every actor of an OPD run. `all` names each of them, for when one dies."""

    queue: GroupQueue
    policies: list[Any]
    teachers: list[Any]
    workers: list[Any]
    learner: Any
    evaluator: Any

    @property
    def policy(self) -> EnginePool:
        return EnginePool(self.policies)

    @property
    def teacher(self) -> EnginePool:
        return EnginePool(self.teachers)

    @property
    def all(self) -> dict[str, Any]:
        return {
            "queue": self.queue.actor,
            "learner": self.learner,
            "evaluator": self.evaluator,
            **_named("policy", self.policies),
            **_named("teacher", self.teachers),
            **{f"rollout worker {i}": actor for i, actor in enumerate(self.workers)},
        }


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
    return "cuda" if gpus and config.device != "cpu" else "cpu"


def cpu_actors(config: CommonConfig) -> int:
    """How many actors take a CPU of their own."""
    if isinstance(config, OpdConfig):
        return config.policy_engines + config.teacher_engines + 1
    return 1


def build_opd(
    config: OpdConfig,
    inputs: OpdInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    device: str,
) -> OpdActors:
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
    teachers = [
        _engine(
            config,
            config.teacher_engine(device, directory.log(f"teacher-{i}")),
            directory.actor_name(f"teacher-{i}"),
        )
        for i in range(config.teacher_engines)
    ]
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
    build = partial(
        _build_policy_loop,
        config=config,
        learner_config=config.learner(student, device),
        tokenizer=inputs.tokenizer,
        queue=queue,
        policies=_named("policy", policies),
        push=PushSettings(
            choice=config.weights,
            served=choose_engine(config.engine) == "sglang",
            device=device,
            directory=str(directory.path / "weights"),
            model=config.student,
            temperature=config.temperature,
            probe_every=config.probe_every,
            timeout_s=config.deadline_s,
        ),
        store=directory.store,
        resume_from=resume_from,
        dump_dir=str(directory.path / "failed"),
    )
    dataset = PromptDataset(
        inputs.train_prompts_P, inputs.tokenizer, group_size=config.group_size, seed=config.seed
    )
    worker_class = ray.remote(RolloutWorker)
    workers = [
        worker_class.options(num_cpus=0, name=directory.actor_name(f"rollout-{i}")).remote(
            policy=EnginePool(policies),
            teacher=EnginePool(teachers),
            sink=WorkerEnd(queue),
            dataset=dataset,
            sampling=config.train_sampling(),
            seed=config.seed,
            max_groups=-(-window // config.rollout_workers),
        )
        for i in range(config.rollout_workers)
    ]
    evaluator = ray.remote(Evaluator).options(num_cpus=0, name=directory.actor_name("evaluator"))
    return OpdActors(
        queue=queue,
        policies=policies,
        teachers=teachers,
        workers=workers,
        learner=_learner(config, device, build, directory),
        evaluator=evaluator.remote(inputs.eval_prompts_P, inputs.tokenizer),
    )


def build_sft(
    config: SftConfig,
    inputs: SftInputs,
    directory: RunDirectory,
    resume_from: Checkpoint | None,
    device: str,
) -> Any:
    """The one actor of an SFT run."""
    model = resume_from.model_dir if resume_from else config.model
    build = partial(
        _build_sft_loop,
        config=config,
        learner_config=config.learner(model, device),
        inputs=inputs,
        store=directory.store,
        resume_from=resume_from,
        dump_dir=str(directory.path / "failed"),
    )
    return _learner(config, device, build, directory)


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


def _learner(
    config: CommonConfig, device: str, build: Callable[[], TrainingLoop], directory: RunDirectory
) -> Any:
    return (
        ray.remote(LearnerActor)
        .options(**_compute(config, device), name=directory.actor_name("learner"))
        .remote(build)
    )


def kill(actors: Iterable[Any]) -> None:
    """Ends actors at once; whatever they were to write has been written."""
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _compute(config: CommonConfig, device: str) -> dict[str, float]:
    return {"num_cpus": 1, "num_gpus": config.gpus_per_actor if device == "cuda" else 0}


def _build_policy_loop(
    *,
    config: OpdConfig,
    learner_config: LearnerConfig,
    tokenizer: PreTrainedTokenizerBase,
    queue: GroupQueue,
    policies: Mapping[str, Any],
    push: PushSettings,
    store: CheckpointStore,
    resume_from: Checkpoint | None,
    dump_dir: str,
) -> PolicyLoop:
    learner = Learner(learner_config, dump_dir)
    return PolicyLoop(
        learner=learner,
        tokenizer=tokenizer,
        source=queue,
        publish=Publisher(policies, queue, config.prompts_per_step, push, learner.logprobs),
        store=store,
        objective=config.objective(),
        groups_per_step=config.prompts_per_step,
        resume_from=resume_from,
    )


def _build_sft_loop(
    *,
    config: SftConfig,
    learner_config: LearnerConfig,
    inputs: SftInputs,
    store: CheckpointStore,
    resume_from: Checkpoint | None,
    dump_dir: str,
) -> SftLoop:
    return SftLoop(
        learner=Learner(learner_config, dump_dir),
        tokenizer=inputs.tokenizer,
        rows_D=inputs.rows_D,
        batch_size=config.batch_size,
        seed=config.seed,
        store=store,
        resume_from=resume_from,
    )
