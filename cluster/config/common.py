"""Settings that commands and recipes share, with the names of the command line."""

from __future__ import annotations

import os
from shutil import which
from typing import TYPE_CHECKING, ClassVar, Literal

import chz

from actors.config import (
    DtypeChoice,
    EngineChoices,
    EngineConfig,
    ServerFlags,
    StartSettings,
    choose_dtype,
    choose_engine,
)
from actors.sglang.installed import require_sglang
from cluster.config.early_checks import WRITTEN_DIRECTORY
from distill.errors import ConfigError
from distill.libraries import require_library
from distill.lookup import known_names
from distill.rules import (
    WithSections,
    above,
    at_least,
    at_most,
    multiple_of,
    needs,
    not_with,
    setting,
)
from distill.settings import (
    ESSENTIAL,
    MAY_CHANGE,
    Section,
    ThreadSettings,
    section_field,
    values_of,
    with_default,
)
from distill.stops import StopTokens
from learner.config import LearnerConfig, LearnerSettings, ShadowRule

if TYPE_CHECKING:
    from learner.checkpoint import Checkpoint
    from learner.memory import Holding


# Trackers for track=; each is an extra of the package with the same name.
TRACKERS = ("wandb", "tensorboard", "mlflow")
WandbMode = Literal["off", "offline", "online"]


@chz.chz
class DeviceSettings:
    """Device on which the models run."""

    section: ClassVar[Section] = Section.ENGINES

    device: Literal["auto", "cpu", "cuda"] = chz.field(
        default="auto",
        doc="device of the models; auto: cuda if there are GPUs (for a run: in the Ray cluster)",
        metadata=MAY_CHANGE,
    )


@chz.chz
class LocalEngineConfig(EngineChoices, ServerFlags, DeviceSettings, ThreadSettings):
    """Settings of a command that runs its engines in its own process."""

    threads: int = with_default(ThreadSettings, "threads", 2)

    @chz.validate
    def _engine_is_installed(self) -> None:
        if self.engine == "sglang":
            require_sglang()

    def engine_config(self, model: str, stops: StopTokens | None = None) -> EngineConfig:
        return EngineConfig(
            kind=choose_engine(self.engine, self.device),
            model=model,
            dtype=choose_dtype(self.dtype, self.device),
            device=self.device,
            threads=self.threads,
            server_flags=self.server_flags,
            stops=stops,
        )


@chz.chz
class PlacementSettings(DeviceSettings, StartSettings):
    """Placement of a run's actors on the cluster, and their resources."""

    section: ClassVar[Section] = Section.ENGINES

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
    learner_workers: int = setting(
        at_least(1),
        not_with("local", why="one process holds one learner"),
        default=1,
        doc="actors that share the learner's model, gradients and moments (FSDP), each with a GPU "
        "or CPU of its own; a resumed run may have another number of them",
        metadata=MAY_CHANGE,
    )
    local: bool = chz.field(
        default=False,
        doc="run everything in this process, without Ray: for a notebook, a debugger, small models",
        metadata=MAY_CHANGE,
    )


@chz.chz
class SupervisionSettings:
    """Deadline of every wait."""

    section: ClassVar[Section] = Section.SUPERVISION

    no_progress_s: float = setting(
        above(0),
        default=1800.0,
        doc="seconds without progress that any part waits for another before the run fails",
        metadata=MAY_CHANGE,
    )


@chz.chz
class CheckpointSettings:
    """Checkpoints of a run, and which of them are kept."""

    section: ClassVar[Section] = Section.OUTPUT
    within: ClassVar[str] = "checkpoint."

    every: int = setting(
        at_least(1), default=10, doc="steps between checkpoints", metadata=MAY_CHANGE
    )
    keep_last: int = setting(
        at_least(1),
        default=2,
        doc="number of newest checkpoints that are kept",
        metadata=MAY_CHANGE,
    )
    keep_every: int = setting(
        at_least(0),
        multiple_of("checkpoint.every", "no other steps have checkpoints"),
        default=0,
        doc="also keep the checkpoints of steps that are multiples of this, itself a multiple of "
        "checkpoint.every; 0: none",
        metadata=MAY_CHANGE,
    )
    keep_best: str | None = setting(
        needs("eval_every", remedy="give eval_every="),
        default=None,
        doc="also keep the checkpoint of the best evaluation (eval_every=) by this metric, for "
        "example eval/accuracy; it is saved at that step. Smaller is better for kl, nll and loss, "
        "larger for all others",
        metadata=MAY_CHANGE,
    )


@chz.chz
class OutputSettings:
    """Output of a run: files and tracking."""

    section: ClassVar[Section] = Section.OUTPUT

    out: str = chz.field(
        doc="directory for everything that the run writes; it holds one run, which the same "
        "command resumes",
        metadata=ESSENTIAL | MAY_CHANGE | WRITTEN_DIRECTORY,
    )
    checkpoint: CheckpointSettings = section_field(CheckpointSettings)
    track: str = chz.field(
        default="",
        doc=f"trackers that receive the metrics too: {', '.join(TRACKERS)}, separated by commas "
        "(docs/tracking.md)",
        metadata=MAY_CHANGE,
    )
    wandb: WandbMode = chz.field(
        default="off",
        doc="Weights & Biases, as track=wandb, and its mode; offline needs no network",
        metadata=MAY_CHANGE,
    )
    notify: str | None = chz.field(
        default=None,
        doc="receiver of the run's findings, and of the news of its end: a URL that receives JSON "
        "by POST, or package.module:function, called with the same content as a dict",
        metadata=MAY_CHANGE,
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
    dry_run: bool | Literal["rehearse"] = chz.field(
        default=False,
        doc="check everything and print the plan, but start nothing; rehearse (opd, rl): run in "
        "small, with random twins of the models, a death of every kind of actor, a resume and an "
        "evaluation, and report what works and what to expect at full size (docs/forecast.md)",
        metadata=ESSENTIAL | MAY_CHANGE,
    )

    @chz.validate
    def _trackers_are_known(self) -> None:
        for name in self.trackers:
            if name not in TRACKERS:
                raise ConfigError(f"track={self.track}: {known_names(name, TRACKERS)}")

    @property
    def only_plans(self) -> bool:
        """True if the run checks everything, prints its plan, and starts nothing."""
        return self.dry_run is True

    @property
    def rehearses(self) -> bool:
        """True if a small version of the run is run in its place."""
        return self.dry_run == "rehearse"

    @property
    def only_keeps(self) -> bool:
        """True if the run only samples and stores groups, without training (rollout_only=True)."""
        return False

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers, without duplicates."""
        named = [name.strip() for name in self.track.split(",")] if self.track else []
        return list(dict.fromkeys(named + ["wandb"] * (self.wandb != "off")))

    @property
    def wandb_mode(self) -> str:
        """Mode of W&B as a tracker: wandb=, or without that WANDB_MODE, by default online."""
        return self.wandb if self.wandb != "off" else os.environ.get("WANDB_MODE", "online")


@chz.chz
class ForkSettings:
    """Start from the weights of another run."""

    section: ClassVar[Section] = Section.MODEL

    fork_from: str | None = setting(
        not_with(
            "rollout_only", why="it begins from no checkpoint; give student=DIR/model, that of one"
        ),
        default=None,
        doc="start with the weights of another run: RUN (its newest checkpoint), RUN:STEP or "
        "RUN:best (one that it keeps); with its AdamW moments if the recipe is the same. Counters, "
        "data and schedule start anew (docs/outputs.md)",
    )


@chz.chz
class CommonConfig(
    ForkSettings,
    LearnerSettings,
    PlacementSettings,
    SupervisionSettings,
    OutputSettings,
    WithSections,
):
    """Settings that every recipe has."""

    section: ClassVar[Section] = Section.OPTIMIZER

    steps: int = setting(
        at_least(1), default=100, doc="optimizer steps", metadata=ESSENTIAL | MAY_CHANGE
    )
    learner_dtype: DtypeChoice = chz.field(
        default="auto",
        doc="precision of the learner's computation; auto: float32 on a CPU, bfloat16 on CUDA. "
        "Weights, gradients and moments are float32 in any case",
    )

    @chz.validate
    def _libraries_are_here(self) -> None:
        if self.compile and self.device != "cuda" and which(os.environ.get("CXX", "g++")) is None:
            raise ConfigError("compile=True needs a C++ compiler on a CPU (g++, or CXX)")
        if self.liger:
            require_library("liger_kernel", "liger=True", "liger-kernel")

    def require_work_for_all(self, units: int, what: str) -> None:
        """Raises ConfigError if an optimizer step has less than one unit of work per worker.

        Args:
            units: units of work in an optimizer step.
            what: the settings that determine `units`, for the error.
        """
        if units < self.learner_workers:
            raise ConfigError(
                f"learner_workers={self.learner_workers} but an optimizer step has {units} "
                f"({what}): some workers would have nothing to do; use at most {units} workers, or "
                "larger steps"
            )

    @property
    def teacher_rule(self) -> ShadowRule | None:
        """Update rule of an EMA or lagged teacher (`learner.shadow`); None without one."""
        return None

    @property
    def learner_holding(self) -> Holding:
        """Bytes per parameter of the learner."""
        from learner.memory import holding_of  # imports torch

        return holding_of(adapter=self.trains_adapter, followed=self.teacher_rule is not None)

    def learner(
        self,
        start: str,
        device: str,
        *,
        resume_from: Checkpoint | None = None,
        updates_per_step: int = 1,
        stops: StopTokens | None = None,
    ) -> LearnerConfig:
        """Settings of a learner that starts from the model `start`, or from `resume_from`."""
        learner = LearnerConfig(
            model=start,
            total_steps=self.steps * updates_per_step,
            device=device,
            dtype=choose_dtype(self.learner_dtype, device),
            replays_routing=self.replays_routing(),
            stops=stops,
            **values_of(LearnerSettings, self),
        )
        return learner if resume_from is None else learner.resumed(resume_from)

    def replays_routing(self) -> bool:
        """True if training rows include the routed experts of their tokens; only for policies."""
        return False
