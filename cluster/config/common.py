"""Settings that commands and recipes share, with the names of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import chz

from actors.config import (
    START_S,
    DtypeChoice,
    EngineConfig,
    EngineSettings,
    choose_dtype,
    start_deadline,
)
from actors.sglang.installed import require_sglang
from actors.sglang.parallelism import parallelism
from cluster.config.early_checks import RUN, model_field
from cluster.config.output import OutputSettings
from distill.chat.template_choice import ChatTemplateSettings
from distill.errors import ConfigError
from distill.libraries import require_library
from distill.pace import LOADED_A_S
from distill.rules import (
    WithSections,
    above,
    at_least,
    at_most,
    multiple_of,
    not_with,
    setting,
)
from distill.settings import (
    ESSENTIAL,
    MAY_CHANGE,
    Section,
    section_field,
    with_default,
)
from distill.stops import StopSettings, StopTokens
from learner.config import (
    LearnerConfig,
    LearnerSettings,
    LoraSettings,
    ShadowRule,
    learner_section,
)

# Recipes whose published learning rates `lr=auto` scales; variants are of the stage of their base.
Stage = Literal["sft", "opd", "rl", "dpo", "reward_model"]

if TYPE_CHECKING:
    from learner.checkpoint import Checkpoint
    from learner.memory import BytesPerParameter, LearnerMemory


@chz.chz
class ModelSettings(ChatTemplateSettings, StopSettings):
    """The model that is trained: checkpoint, chat template and stop tokens."""

    main: ClassVar[str] = "path"

    path: str = model_field(
        doc="checkpoint of the model, in opd and rl the student: a Hugging Face directory (or hub "
        "name), or a run's directory (for its final/), RUN:STEP or RUN:best",
        metadata=ESSENTIAL,
    )


@chz.chz
class ReferredModelSettings(ModelSettings):
    """The model that is trained, and its reference."""

    reference: str | None = model_field(
        default=None,
        doc="checkpoint of the reference model. opd, rl: reference_kl_coef keeps the policy near "
        "it; default with lora.rank: the model without its adapter, in the learner. dpo: default: "
        "the model itself",
    )


@chz.chz
class MachineSettings:
    """Device on which the models run, and its CPU threads."""

    section: ClassVar[Section] = Section.ENGINES
    within: ClassVar[str] = "cluster."

    device: Literal["auto", "cpu", "cuda"] = chz.field(
        default="auto",
        doc="device of the models; auto: cuda if the machine (for a run: the Ray cluster) has GPUs",
        metadata=MAY_CHANGE,
    )
    threads: int = setting(
        at_least(1),
        at_most(4096, "more threads than cores do not help"),
        default=1,
        doc="torch threads of each engine and of the learner on a CPU",
        metadata=MAY_CHANGE,
    )


@chz.chz
class ClusterSettings(MachineSettings):
    """Placement of a run's actors on the cluster, their resources, and their deadlines."""

    gpus_per_actor: float = setting(
        above(0),
        default=1.0,
        doc="GPUs of each engine and each learner worker on cuda; a fraction puts several on one "
        "GPU",
        metadata=MAY_CHANGE,
    )
    gpu_memory_gib: float | None = setting(
        above(0),
        default=None,
        doc="memory of one GPU in GiB, for the plan of dry_run=True on a machine without one",
        metadata=MAY_CHANGE,
    )
    local: bool = chz.field(
        default=False,
        doc="run everything in this process, without Ray: for a notebook, a debugger, small models",
        metadata=MAY_CHANGE,
    )
    start_deadline_s: float | None = setting(
        above(0),
        default=None,
        doc="seconds that the run waits for free resources in the cluster, and that an actor may "
        "take to start: an engine with its model, an SGLang server, a rollout worker; default: "
        f"{START_S:.0f}, and one more for each {LOADED_A_S // 10**6} MB of the model's checkpoint",
        metadata=MAY_CHANGE,
    )
    no_progress_s: float = setting(
        above(0),
        default=1800.0,
        doc="seconds without progress after which a wait between parts fails the run",
        metadata=MAY_CHANGE,
    )

    def start_deadline_of(self, model: str | None) -> float:
        """Deadline in seconds for the start of an actor that loads `model` (None: no model)."""
        return start_deadline(self.start_deadline_s, model)


@chz.chz
class ServerSettings:
    """SGLang servers of the policy's or the teachers' engines."""

    section: ClassVar[Section] = Section.ENGINES
    within: ClassVar[str] = "policy."

    server_flags: str = chz.field(
        default="",
        doc="further flags of SGLang for its servers, for example '--tp-size 2'",
        metadata=MAY_CHANGE,
    )

    @chz.validate
    def _flags_are_flags(self) -> None:
        parallelism(self.server_flags, f"{self.within}server_flags")


@chz.chz
class LocalEngineSettings(EngineSettings):
    """Kind and precision of a command's engines."""

    @chz.validate
    def _engine_is_installed(self) -> None:
        if self.kind == "sglang":
            require_sglang()


@chz.chz
class LocalMachineSettings(MachineSettings):
    """Device on which a command's models run, and its CPU threads."""

    threads: int = with_default(MachineSettings, "threads", 2)


@chz.chz
class LocalEngineConfig(WithSections):
    """Settings of a command that runs its engines in its own process."""

    engine: LocalEngineSettings = section_field(LocalEngineSettings)
    cluster: LocalMachineSettings = section_field(LocalMachineSettings)
    policy: ServerSettings = section_field(ServerSettings)

    def engine_config(
        self, model: str, stops: StopTokens | None = None, server_flags: str | None = None
    ) -> EngineConfig:
        """Settings of an engine. `server_flags` are by default those of the policy."""
        return self.engine.config(
            model,
            self.cluster.device,
            threads=self.cluster.threads,
            server_flags=self.policy.server_flags if server_flags is None else server_flags,
            start_deadline_s=start_deadline(None, model),
            stops=stops,
        )


@chz.chz
class ForkSettings:
    """Start from the weights of another run."""

    section: ClassVar[Section] = Section.MODEL

    fork_from: str | None = setting(
        not_with(
            "rollout_only",
            why="it does not start from a checkpoint; give student=DIR/model, the model of one",
        ),
        default=None,
        doc="start with the weights of another run: RUN (its newest checkpoint), RUN:STEP or "
        "RUN:best (one that it keeps); with its AdamW moments if the recipe is the same. Counters, "
        "data and schedule start anew (docs/outputs.md)",
        metadata=RUN,
    )


@chz.chz
class RunLearnerSettings(LearnerSettings):
    """Settings of the learner: AdamW, its computation, and its actors."""

    replicas: int = setting(
        at_least(1),
        default=1,
        doc="replicas of the model (hybrid sharding, HSDP): each is shared by learner.workers / "
        "learner.replicas workers of one node, and only gradients are summed over the replicas, "
        "once per update; a resumed run may have a different number of replicas",
        metadata=MAY_CHANGE,
    )
    workers: int = setting(
        at_least(1),
        not_with("cluster.local", why="one process holds one learner"),
        multiple_of("learner.replicas", why="all replicas have the same number of workers"),
        default=1,
        doc="actors that share the learner's model, gradients and moments (FSDP), each with its "
        "own GPU or CPU; a resumed run may have a different number of workers",
        metadata=MAY_CHANGE,
    )
    dtype: DtypeChoice = chz.field(
        default="auto",
        doc="precision of the learner's computation; auto: float32 on a CPU, bfloat16 on CUDA. "
        "Weights, gradients and moments are float32 in any case",
    )
    trace_step: int | None = setting(
        at_least(1),
        at_most("steps"),
        not_with("rollout_only", why="there is no learner to trace"),
        default=None,
        doc="step of the learner whose trace is written to out/trace.json, for "
        "https://ui.perfetto.dev",
        metadata=MAY_CHANGE,
    )

    @property
    def shards(self) -> int:
        """Number of workers that share one replica of the model."""
        return self.workers // self.replicas


@chz.chz
class CommonConfig(
    ForkSettings,
    OutputSettings,
    WithSections,
):
    """Settings that every recipe has."""

    section: ClassVar[Section] = Section.OPTIMIZER
    recipe: ClassVar[str]  # its name on the command line
    summary: ClassVar[str]  # for the list of recipes
    stage: ClassVar[Stage]

    model: ModelSettings = section_field(ModelSettings)
    cluster: ClusterSettings = section_field(ClusterSettings)
    lora: LoraSettings = section_field(LoraSettings)
    learner: RunLearnerSettings = learner_section(RunLearnerSettings)
    seed: int = setting(
        at_least(0),
        at_most(2**63 - 1, "torch accepts no larger seed"),
        default=0,
        doc="seed of the prompt order, sampling and torch",
    )
    steps: int = setting(
        at_least(1), default=100, doc="optimizer steps", metadata=ESSENTIAL | MAY_CHANGE
    )

    @chz.validate
    def _libraries_are_here(self) -> None:
        if self.learner.liger:
            require_library("liger_kernel", "liger=True", "liger-kernel", "learner.liger")

    def require_work_for_all(self, units: int, what: str) -> None:
        """Raise ConfigError if an optimizer step has less than one unit of work per worker.

        Args:
            units: units of work in an optimizer step.
            what: the settings that determine `units`, for the error.
        """
        if units < self.learner.workers:
            raise ConfigError(
                f"learner.workers={self.learner.workers} but an optimizer step has {units} "
                f"({what}): some workers would be idle; use at most {units} workers, or larger "
                "steps"
            )

    @property
    def teacher_rule(self) -> ShadowRule | None:
        """Update rule of an EMA or lagged teacher (`learner.teachers`); None without one."""
        return None

    @property
    def learner_holding(self) -> BytesPerParameter:
        """Bytes per parameter of the learner."""
        from learner.memory import holding_of  # imports torch

        return holding_of(adapter=self.lora.trains_adapter, followed=self.teacher_rule is not None)

    def frozen_in_learner(self) -> int | None:
        """Bytes of the copies of teachers that the learner's workers share during training.

        None if the size of a teacher is unknown.
        """
        return 0

    def learner_memory(self) -> LearnerMemory | None:
        """Memory of the learner with its copies of teachers; None if a size is unknown.

        The device must already be chosen.
        """
        from learner.memory import LearnerMemory  # imports torch
        from learner.pass_memory import ModelSize

        frozen, size = self.frozen_in_learner(), ModelSize.of(self.model.path)
        if frozen is None or size is None:
            return None
        return LearnerMemory(
            model=size,
            dtype=choose_dtype(self.learner.dtype, self.cluster.device),
            device=self.cluster.device,
            holding=self.learner_holding,
            frozen=frozen,
            workers=self.learner.workers,
            replicas=self.learner.replicas,
            offloads=self.learner.offload_optimizer,
        )

    def learner_config(
        self,
        *,
        resume_from: Checkpoint | None = None,
        updates_per_step: int = 1,
        stops: StopTokens | None = None,
    ) -> LearnerConfig:
        """Settings of a learner that starts from the model, or from `resume_from`."""
        config = LearnerConfig(
            learner=self.learner,
            lora=self.lora,
            seed=self.seed,
            threads=self.cluster.threads,
            model=self.model.path,
            total_steps=self.steps * updates_per_step,
            device=self.cluster.device,
            dtype=choose_dtype(self.learner.dtype, self.cluster.device),
            replays_routing=self.replays_routing(),
            stops=stops,
            gpu_part=min(1.0, self.cluster.gpus_per_actor),
        )
        return config if resume_from is None else config.resumed(resume_from)

    def replays_routing(self) -> bool:
        """True if training rows include the routed experts of their tokens; only for policies."""
        return False
