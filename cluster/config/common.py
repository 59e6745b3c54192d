"""Settings that commands and recipes share, as they stand on the command line."""

from __future__ import annotations

import os
from importlib.util import find_spec
from shutil import which
from typing import Literal

import chz
from chz.mungers import if_none

from actors.config import DtypeChoice, EngineChoice, EngineConfig, choose_dtype, choose_engine
from actors.sglang.flags import parse_flags
from distill.errors import ConfigError
from learner.checkpoint import Checkpoint
from learner.config import LearnerConfig, OptimizerConfig
from learner.lora import LoraSettings

Schedule = Literal["constant", "linear", "cosine"]


@chz.chz
class LocalEngineConfig:
    """Settings of a command that runs its engines in its own process."""

    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: a server of our own; embedded: transformers in this process; auto: sglang "
        "where it is installed",
    )
    server_flags: str = chz.field(default="", doc="more of SGLang's own flags")
    dtype: DtypeChoice = chz.field(
        default="auto", doc="engine precision; auto: float32 on a CPU, bfloat16 on CUDA"
    )
    device: Literal["auto", "cpu", "cuda"] = chz.field(default="auto", doc="where it runs")
    threads: int = chz.field(default=2, doc="torch threads on CPU")

    @chz.validate
    def _engine_in_range(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads={self.threads} must be at least 1")
        parse_flags(self.server_flags)

    def engine_config(self, model: str) -> EngineConfig:
        return EngineConfig(
            kind=choose_engine(self.engine),
            model=model,
            dtype=choose_dtype(self.dtype, self.device),
            device=self.device,
            threads=self.threads,
            server_flags=self.server_flags,
        )


# A step of AdamW moves every trained number by about lr. An adapter's change is a product of two
# small ones, of which engines in bfloat16 see nothing until it passes half a step of their grid.
FULL_LR, LORA_LR = 1e-5, 1e-4


@chz.chz
class CommonConfig:
    """Settings that every recipe has."""

    out: str = chz.field(doc="directory for everything the run writes; holds one run, resumable")
    steps: int = chz.field(default=100, doc="optimizer steps")
    lr: float = chz.field(
        default=None,
        munger=if_none(lambda config: LORA_LR if config.trains_adapter else FULL_LR),
        x_type=float | None,
        doc=f"peak learning rate (tiny models: 3e-4); default: {FULL_LR:g}, and {LORA_LR:g} for an "
        "adapter",
    )
    lr_schedule: Schedule = chz.field(default="constant", doc="rate after warm-up")
    warmup_steps: int = chz.field(default=0, doc="optimizer updates of linear warm-up")
    weight_decay: float = chz.field(default=0.0, doc="AdamW's decoupled weight decay")
    max_grad_norm: float = chz.field(default=1.0, doc="gradient norm is clipped to this")
    token_budget: int | None = chz.field(
        default=None,
        doc="padded tokens per micro-batch, over which gradients accumulate; "
        "default: 4096 on CPU, 16384 on GPU, or less where that would not fit into memory",
    )
    seed: int = chz.field(default=0, doc="seed of prompt order, sampling and torch")
    checkpoint_every: int = chz.field(default=10, doc="steps between checkpoints")
    keep_checkpoints: int = chz.field(default=2, doc="newest checkpoints kept")
    wandb: Literal["off", "offline", "online"] = chz.field(
        default="off", doc="Weights & Biases; offline needs no network"
    )
    device: Literal["auto", "cpu", "cuda"] = chz.field(
        default="auto", doc="auto: cuda if the Ray cluster has GPUs"
    )
    gpus_per_actor: float = chz.field(
        default=1.0,
        doc="GPUs each engine and the learner take on cuda; a share packs several on one",
    )
    threads: int = chz.field(
        default=1, doc="torch threads of each engine and of the learner on CPU"
    )
    deadline_s: float = chz.field(
        default=1800.0, doc="longest any part waits for another before the run fails, seconds"
    )
    hang_after_s: float = chz.field(
        default=60.0,
        doc="an actor that gives no sign of life for so long is ended, and restarted, seconds",
    )
    max_restarts: int = chz.field(
        default=10,
        doc="deaths of one actor within an hour that the run survives; a lost learner goes back to "
        "its last checkpoint",
    )
    placement: Literal["pack", "spread"] = chz.field(
        default="pack", doc="actors of a role on few nodes, or on as many as there are"
    )
    placement_deadline_s: float = chz.field(
        default=600.0, doc="longest the run waits for the cluster to have room for it, seconds"
    )
    learner_dtype: DtypeChoice = chz.field(
        default="auto",
        doc="what the learner computes in: auto is float32 on a CPU and bfloat16 on CUDA; its "
        "weights, gradients and moments are float32 in any case",
    )
    learner_workers: int = chz.field(
        default=1,
        doc="actors that share the learner's model, gradients and moments (FSDP), each with a GPU "
        "or CPU of its own; a run may be resumed with another number of them",
    )
    gradient_checkpointing: bool | None = chz.field(
        default=None,
        doc="recompute activations in the backward pass: less memory, more time; default: where "
        "they would not fit into memory",
    )
    compile: bool = chz.field(
        default=False,
        doc="torch.compile the learner's layers: slow at the start, then faster (docs/learner.md); "
        "on a CPU it needs a C++ compiler",
    )
    liger: bool = chz.field(
        default=False,
        doc="Liger's kernels for norms, rotary embedding and SwiGLU in the learner (cuda; pip "
        "install liger-kernel)",
    )
    offload_optimizer: bool = chz.field(
        default=False,
        doc="keep AdamW's moments in main memory, on the GPU during its own step only (cuda)",
    )
    trace_step: int | None = chz.field(
        default=None,
        doc="the learner's step of which out/trace.json is written, for https://ui.perfetto.dev",
    )
    lora_rank: int | None = chz.field(
        default=None, doc="train a low-rank adapter of this rank, and freeze the model; 16, say"
    )
    lora_alpha: float | None = chz.field(
        default=None, doc="its product is multiplied by alpha / rank; default: 2 * lora_rank"
    )
    lora_targets: str | None = chz.field(
        default=None,
        doc="Linears that are adapted, 'q_proj,v_proj' for example; default: all but the "
        "vocabulary projection",
    )
    lora_dropout: float | None = chz.field(
        default=None,
        doc="of the adapter's inputs in training; default: none. In opd, rl and dpo it is noise in "
        "the ratios too",
    )
    lora_adapter: str | None = chz.field(
        default=None, doc="instead of lora_rank: a peft adapter (safetensors) to start from"
    )
    local: bool = chz.field(
        default=False,
        doc="everything in this process, without Ray: for a notebook, a debugger, small models",
    )
    dry_run: bool = chz.field(default=False, doc="check everything, print the plan, start nothing")

    @chz.validate
    def _common_in_range(self) -> None:
        for name in ("steps", "checkpoint_every", "keep_checkpoints", "threads", "learner_workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.local and self.learner_workers > 1:
            raise ConfigError(
                f"local=True with learner_workers={self.learner_workers}: one process holds one "
                "learner; leave one of them out"
            )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts={self.max_restarts} must not be negative")
        for name in ("deadline_s", "gpus_per_actor", "hang_after_s", "placement_deadline_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.token_budget is not None and self.token_budget < 1:
            raise ConfigError(f"token_budget={self.token_budget} must be at least 1")
        if self.trace_step is not None and not 1 <= self.trace_step <= self.steps:
            raise ConfigError(f"trace_step={self.trace_step} must be a step, 1 to {self.steps}")
        if self.compile and self.device != "cuda" and which(os.environ.get("CXX", "g++")) is None:
            raise ConfigError("compile=True needs a C++ compiler on a CPU (g++, or CXX)")
        if self.liger and find_spec("liger_kernel") is None:
            raise ConfigError("liger=True needs the package: pip install liger-kernel")
        self.optimizer()
        self.lora()

    @property
    def trains_adapter(self) -> bool:
        return self.lora_rank is not None or self.lora_adapter is not None

    def lora(self) -> LoraSettings | None:
        """The adapter that is trained, if one is."""
        settings = {
            name: value
            for name in ("rank", "alpha", "targets", "dropout", "adapter")
            if (value := getattr(self, f"lora_{name}")) is not None
        }
        return LoraSettings(**settings) if settings else None

    def require_work_for_all(self, units: int, what: str) -> None:
        """Raises ConfigError if an optimizer step has less than one unit of work a worker."""
        if units < self.learner_workers:
            raise ConfigError(
                f"learner_workers={self.learner_workers} but an optimizer step has {units} "
                f"({what}): some workers would have nothing to do; use at most {units} workers, or "
                "larger steps"
            )

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def learner(
        self,
        start: str,
        device: str,
        *,
        resume_from: Checkpoint | None = None,
        updates_per_step: int = 1,
    ) -> LearnerConfig:
        """Learner settings from `start`, or from the last checkpoint. The base stays the base."""
        lora = self.lora()
        if resume_from is not None and lora is None:
            start = resume_from.model_dir
        elif resume_from is not None and lora is not None:
            lora = LoraSettings(adapter=resume_from.adapter_dir, dropout=lora.dropout)
        return LearnerConfig(
            model=start,
            lora=lora,
            optimizer=self.optimizer(),
            total_steps=self.steps * updates_per_step,
            token_budget=self.token_budget,
            seed=self.seed,
            device=device,
            threads=self.threads,
            dtype=choose_dtype(self.learner_dtype, device),
            gradient_checkpointing=self.gradient_checkpointing,
            compile=self.compile,
            liger=self.liger,
            offload_optimizer=self.offload_optimizer,
            dropout=self.with_dropout(),
        )

    def with_dropout(self) -> bool:
        """True if the model trains with the dropout of its config; policies never do."""
        return False
