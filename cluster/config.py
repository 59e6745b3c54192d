"""The recipes' settings, as they stand on the command line. One place, one name a setting."""

from __future__ import annotations

from typing import Literal

import chz

from actors.config import DtypeChoice, EngineChoice, EngineConfig, choose_dtype, choose_engine
from actors.sglang_flags import parse_flags
from actors.sglang_weights import InFlight
from distill.errors import ConfigError
from distill.sampling import EvalSampling, TrainSampling
from learner.config import LearnerConfig, OptimizerConfig
from learner.loop import ObjectiveConfig

WeightsChoice = Literal["auto", "shared_memory", "object_store", "disk", "group"]
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


@chz.chz
class CommonConfig:
    """Settings that every recipe has."""

    out: str = chz.field(doc="directory for everything the run writes; holds one run, resumable")
    steps: int = chz.field(default=100, doc="optimizer steps")
    lr: float = chz.field(default=1e-5, doc="peak learning rate (tiny models: 3e-4)")
    lr_schedule: Schedule = chz.field(default="constant", doc="rate after warm-up")
    warmup_steps: int = chz.field(default=0, doc="steps of linear warm-up")
    weight_decay: float = chz.field(default=0.0, doc="AdamW's decoupled weight decay")
    max_grad_norm: float = chz.field(default=1.0, doc="gradient norm is clipped to this")
    token_budget: int | None = chz.field(
        default=None,
        doc="padded tokens per micro-batch, over which gradients accumulate; "
        "default: 4096 on CPU, 16384 on GPU",
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
    dry_run: bool = chz.field(default=False, doc="check everything, print the plan, start nothing")

    @chz.validate
    def _common_in_range(self) -> None:
        for name in ("steps", "checkpoint_every", "keep_checkpoints", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must not be negative")
        for name in ("deadline_s", "gpus_per_actor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        if self.token_budget is not None and self.token_budget < 1:
            raise ConfigError(f"token_budget={self.token_budget} must be at least 1")
        self.optimizer()

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr,
            schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )

    def learner(self, model: str, device: str) -> LearnerConfig:
        return LearnerConfig(
            model=model,
            optimizer=self.optimizer(),
            total_steps=self.steps,
            token_budget=self.token_budget,
            seed=self.seed,
            device=device,
            threads=self.threads,
        )


@chz.chz
class OpdConfig(CommonConfig):
    """recipe=opd: on-policy distillation. The student samples, the teacher scores, both at T."""

    student: str = chz.field(doc="student checkpoint: a Hugging Face directory (or hub name)")
    teacher: str = chz.field(
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); shares the student's tokenizer"
    )
    prompts: str = chz.field(
        doc="JSONL; each line has `prompt` (string) or `messages` (chat), optionally `answer`"
    )
    temperature: float = chz.field(
        doc="rollout temperature T > 0: of sampling, teacher, learner and loss alike"
    )
    prompts_per_step: int = chz.field(default=32, doc="prompts (groups) per optimizer step")
    group_size: int = chz.field(default=4, doc="samples per prompt")
    max_new_tokens: int = chz.field(default=256, doc="longest response, tokens")
    engine: EngineChoice = chz.field(
        default="auto",
        doc="sglang: servers of our own; embedded: transformers in the actor's process; auto: "
        "sglang where it is installed",
    )
    policy_server_flags: str = chz.field(
        default="", doc="more of SGLang's own flags for policy servers, '--tp-size 2' for example"
    )
    teacher_server_flags: str = chz.field(
        default="", doc="more of SGLang's own flags for teacher servers"
    )
    in_flight: InFlight = chz.field(
        default="continue",
        doc="samples under way when weights are pushed to an SGLang server: continue under the new "
        "ones (each token's version is recorded), restart, or finish first",
    )
    weights: WeightsChoice = chz.field(
        default="auto",
        doc="how new weights reach the policy engines. shared_memory: engines on the learner's "
        "node; group: SGLang engines on other nodes, by torch.distributed (NCCL or gloo); "
        "object_store: any engine anywhere, by Ray; disk: a directory in out/ that every node "
        "shares; auto: each engine by its place",
    )
    probe_every: int = chz.field(
        default=1,
        doc="weight versions between two that are probed: do the policy engines hold what the "
        "learner sent? 0 trusts them",
    )
    start_deadline_s: float = chz.field(
        default=600.0, doc="longest an SGLang server may take to start, seconds"
    )
    require_handshake: bool = chz.field(
        default=True,
        doc="False trains although the parties disagree, on another objective than the one named: "
        "for experiments about just that",
    )
    dtype: DtypeChoice = chz.field(
        default="auto",
        doc="precision of the engines: auto is float32 on a CPU and bfloat16 on CUDA; the learner "
        "keeps float32 weights",
    )
    max_staleness: int = chz.field(
        default=1,
        doc="weight versions a rollout may be behind when trained; 0 is fully synchronous",
    )
    kl_coef: float = chz.field(default=1.0, doc="weight of the OPD term, -(log p_T - log q_T)")
    kl_discount_factor: float = chz.field(
        default=0.0, doc="discount of future OPD terms; 0: the immediate one only"
    )
    reward_coef: float = chz.field(
        default=0.0, doc="weight of the group-centred task reward (exact match with `answer`)"
    )
    policy_engines: int = chz.field(default=1, doc="policy engines (actors)")
    teacher_engines: int = chz.field(default=1, doc="teacher engines (actors)")
    rollout_workers: int = chz.field(default=1, doc="rollout workers (actors)")
    eval_every: int = chz.field(default=0, doc="steps between evaluations; 0: start and end only")
    eval_prompts: str | None = chz.field(
        default=None, doc="JSONL of held-out prompts; default: eval_size prompts held out"
    )
    eval_size: int = chz.field(
        default=64, doc="prompts evaluated; without eval_prompts at most a tenth is held out"
    )
    eval_temperature: float = chz.field(
        default=0.0, doc="the serving decoder's temperature; 0 is greedy. Never touches training"
    )
    eval_top_p: float = chz.field(default=1.0, doc="the serving decoder's top-p; 1 is off")
    eval_top_k: int = chz.field(default=0, doc="the serving decoder's top-k; 0 is off")
    eval_max_new_tokens: int | None = chz.field(
        default=None, doc="longest response in evaluation; default: max_new_tokens"
    )

    @chz.validate
    def _in_range(self) -> None:
        for name in (
            "prompts_per_step",
            "group_size",
            "policy_engines",
            "teacher_engines",
            "rollout_workers",
            "eval_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.start_deadline_s > 0:
            raise ConfigError(f"start_deadline_s={self.start_deadline_s} must be above 0")
        parse_flags(self.policy_server_flags)
        parse_flags(self.teacher_server_flags)
        if self.weights == "group" and choose_engine(self.engine) == "embedded":
            raise ConfigError(
                "weights=group needs engine=sglang: the embedded engine joins no weight group; use "
                "weights=auto"
            )
        for name in ("max_staleness", "eval_every", "probe_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        self.train_sampling()
        self.eval_sampling()
        self.objective()

    def train_sampling(self) -> TrainSampling:
        return TrainSampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def eval_sampling(self) -> EvalSampling:
        return EvalSampling(
            temperature=self.eval_temperature,
            max_new_tokens=self.longest_evaluation(),
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
        )

    def longest_evaluation(self) -> int:
        if self.eval_max_new_tokens is None:
            return self.max_new_tokens
        return self.eval_max_new_tokens

    def objective(self) -> ObjectiveConfig:
        return ObjectiveConfig(
            kl_coef=self.kl_coef,
            kl_discount_factor=self.kl_discount_factor,
            reward_coef=self.reward_coef,
        )

    def policy_engine(self, model: str, device: str, log_path: str) -> EngineConfig:
        return self._engine(model, device, log_path, self.policy_server_flags)

    def teacher_engine(self, device: str, log_path: str) -> EngineConfig:
        return self._engine(self.teacher, device, log_path, self.teacher_server_flags)

    def _engine(self, model: str, device: str, log_path: str, server_flags: str) -> EngineConfig:
        return EngineConfig(
            kind=choose_engine(self.engine),
            model=model,
            dtype=choose_dtype(self.dtype, device),
            device=device,
            threads=self.threads,
            server_flags=server_flags,
            in_flight=self.in_flight,
            gpu_share=min(1.0, self.gpus_per_actor),
            log_path=log_path,
            start_deadline_s=self.start_deadline_s,
            request_deadline_s=self.deadline_s,
        )


@chz.chz
class SftConfig(CommonConfig):
    """recipe=sft: supervised fine-tuning, loss on completions only."""

    model: str = chz.field(doc="checkpoint to start from: a Hugging Face directory (or hub name)")
    data: str = chz.field(doc="JSONL; each line has `prompt` and `completion`; EOS is appended")
    batch_size: int = chz.field(default=32, doc="rows per optimizer step")
    max_length: int | None = chz.field(
        default=None, doc="longest row, tokens; default: the model's context"
    )

    @chz.validate
    def _in_range(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size} must be at least 1")
