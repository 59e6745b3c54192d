"""Engine settings of an opd or rl run, and the GPU memory that engines and learner share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import chz

from actors.config import EngineConfig
from actors.sglang.flags import adapter_flags
from actors.sglang.parallelism import parallelism
from cluster.config.common import CommonConfig
from cluster.config.on_policy import RolloutConfig
from distill.errors import ConfigError
from distill.gpu import DTYPE_BYTES
from distill.stops import StopTokens
from learner.config import LearnerConfig


@dataclass(frozen=True, slots=True)
class RunEngines:
    """Settings of each engine of a run.

    Attributes:
        config: settings of the run; the device must already be chosen.
        stops: tokens at which samples end; None: those of the checkpoints.
    """

    config: RolloutConfig
    stops: StopTokens | None = None

    def reference(self, model: str, log_path: str) -> EngineConfig:
        return self._engine(model, log_path, self.config.policy.server_flags)

    def teacher(self, model: str, log_path: str) -> EngineConfig:
        """Settings of a teacher's engine, which may take turns on its GPUs with other engines.

        Raises: as `policy`.
        """
        engine = self._engine(model, log_path, self.config.teacher.server_flags)
        taken = self.config.teachers_by_turns and not engine.external
        return self._by_turns(engine) if taken else engine

    def _by_turns(self, engine: EngineConfig) -> EngineConfig:
        """Settings of an engine that takes turns.

        It uses whole GPUs, except for the memory that others keep there outside of their turns.
        """
        reserved, config = 0, self.config
        if config.cluster.device == "cuda":
            from actors.sglang.memory import ASLEEP_BYTES  # imports torch

            others = len(config.teachers_by_turns) - (not config.policy_takes_turns)
            reserved = others * ASLEEP_BYTES
            if config.learner_takes_turns:
                reserved += _learner_gpu_bytes(config)
        return chz.replace(engine, sleeps=True, gpu_share=1.0, gpu_reserved=reserved)

    def policy(self, model: str, log_path: str) -> EngineConfig:
        """Settings of a policy engine, which may share GPUs with the learner or with teachers.

        Raises:
            ConfigError: engines sleep, and the size of the learner on their GPUs is unknown.
        """
        config = self.config
        engine = chz.replace(
            self.evaluation(model, log_path), routed_experts=config.replays_routing()
        )
        if config.policy_takes_turns:
            return self._by_turns(engine)
        if config.shares_gpus:
            engine = chz.replace(engine, gpu_share=config.cluster.gpus_per_actor)
        if not config.engines_sleep:
            return engine
        reserved = 0
        if config.cluster.device == "cuda":
            reserved = _learner_gpu_bytes(config)
        share = config.cluster.pair_share
        return chz.replace(engine, sleeps=True, gpu_share=share, gpu_reserved=reserved)

    def evaluation(self, model: str, log_path: str) -> EngineConfig:
        """Settings of a policy engine that shares no GPUs with the learner."""
        config = self.config
        engine = self._engine(model, log_path, config.policy.server_flags)
        if config.weights.transport != "adapter":
            return engine
        from learner.lora import served_adapter  # imports torch

        form, versions = served_adapter(config.lora, config.model.path), config.adapter_versions
        flags = f"{adapter_flags(form, versions, config.cluster.device)} {engine.server_flags}"
        reserved = (
            versions * form.parameters * DTYPE_BYTES[engine.dtype] if engine.shares_gpu else 0
        )
        return chz.replace(engine, server_flags=flags, gpu_reserved=reserved)

    def _engine(self, model: str, log_path: str, server_flags: str) -> EngineConfig:
        engine, cluster = self.config.engine, self.config.cluster
        gpus = parallelism(server_flags).gpus  # an engine with several GPUs has whole GPUs
        return engine.config(
            model,
            cluster.device,
            threads=cluster.threads,
            server_flags=server_flags,
            on_weight_update=engine.on_weight_update,
            gpu_share=min(1.0, cluster.gpus_per_actor) if gpus == 1 else 1.0,
            log_path=log_path,
            request_deadline_s=cluster.no_progress_s,
            stops=self.stops,
        )


def by_turns(learner: LearnerConfig, config: RolloutConfig) -> LearnerConfig:
    """Settings of a learner that uses its part of each GPU in turn with engines that sleep."""
    settings = chz.replace(learner.learner, offload_optimizer=True)
    share, taken = learner_part(config)
    return chz.replace(learner, learner=settings, gpu_part=share, gpu_taken=taken)


def learner_part(config: CommonConfig) -> tuple[float, int]:
    """Fraction of its GPU that a learner worker may fill, and bytes that sleeping engines keep."""
    if not (isinstance(config, RolloutConfig) and config.engines_sleep):
        return min(1.0, config.cluster.gpus_per_actor), 0
    from actors.sglang.memory import ASLEEP_BYTES  # imports torch

    asleep = 1 + config.learner_takes_turns * len(config.teachers_by_turns)
    return config.cluster.pair_share, asleep * ASLEEP_BYTES


def lends_weights(config: RolloutConfig) -> bool:
    """True if policy engines will read weights from the memory of the learner's workers.

    With weights=auto this is a forecast from the settings: each engine shares a worker's GPU.
    """
    if config.weights.transport != "auto":
        return config.weights.transport == "ipc"
    gpus = config.policy.size.smallest * parallelism(config.policy.server_flags).gpus
    shares = config.shares_gpus and gpus <= config.learner.workers
    return shares and config.engine.kind_on(config.cluster.device) == "sglang"


def lent_bytes(config: RolloutConfig) -> int:
    """Bytes of the largest bucket of a push by ipc: its additional memory on each GPU.

    A full bucket if the checkpoint has no files on this machine.
    """
    import torch  # not at module level: settings do not need it

    from distill.models.loading import tensor_layouts, weight_files
    from distill.weights.model_weights import BUCKET_BYTES, plan_buckets
    from distill.weights.shared_memory import block_bytes

    if not weight_files(config.model.path):
        return BUCKET_BYTES
    dtype = getattr(torch, config.engine.dtype_on(config.cluster.device))
    layouts = tensor_layouts(config.model.path).values()
    return max(map(block_bytes, plan_buckets([layout.rounded_to(dtype) for layout in layouts])))


def _learner_gpu_bytes(config: RolloutConfig) -> int:
    """Most bytes that a learner worker uses of its GPU while engines are awake there."""
    return learner_bytes_between_steps(config) + (
        lent_bytes(config) if lends_weights(config) else 0
    )


def learner_bytes_between_steps(config: RolloutConfig) -> int:
    """Bytes that a learner worker holds on its GPU while engines generate.

    Raises:
        ConfigError: the size of the model, or of a teacher's copy, is unknown.
    """
    if (memory := config.learner_memory()) is None:
        unknown = config.frozen_in_learner() is None
        missing = "a teacher's copy in the learner" if unknown else config.model.path
        raise ConfigError(
            f"{missing} with colocate={config.cluster.colocate}: its files are not on this "
            "machine, so the memory that the engines leave to the learner is unknown; give a "
            "directory",
            field="teacher.model" if unknown else "model.path",
        )
    return replace(memory, offloads=True).between_steps
