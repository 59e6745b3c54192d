"""Settings of the recipes whose student samples what it is trained on: opd and rl."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import chz

from actors.config import DtypeChoice, EngineChoice, EngineConfig, choose_dtype, choose_engine
from actors.sglang.external import is_url
from actors.sglang.flags import parse_flags
from actors.sglang.weights import InFlight
from cluster.config.common import CommonConfig
from cluster.config.env import env_field
from distill.envs.base import EnvConfig
from distill.errors import ConfigError
from distill.objective.settings import (
    ObjectiveConfig,
    PolicyObjective,
    require_comparison,
    require_reward,
    require_teacher,
)
from distill.rewards.registry import DEFAULT_REWARD, REWARD_TIMEOUT_S, RewardFunction, load_reward
from distill.sampling import EvalSampling, TrainSampling

WeightsChoice = Literal["auto", "shared_memory", "object_store", "disk", "group"]


@chz.chz
class TeacherConfig:
    """One of several teachers."""

    model: str = chz.field(doc="checkpoint, or http://host:port of a running SGLang server")
    weight: float = chz.field(default=1.0, doc="its kl_coef is multiplied by this")


@chz.chz
class RolloutConfig(CommonConfig, ABC):
    """Settings of the recipes that train on the student's own samples."""

    student: str = chz.field(doc="student checkpoint: a Hugging Face directory (or hub name)")
    prompts: str | None = chz.field(
        default=None,
        doc="JSONL or parquet; each row has `prompt` (string) or `messages` (chat), optionally "
        "`answer`, `tag`, `teacher`, `teacher_prompt` or `teacher_messages`, `bonuses`: see "
        "docs/objectives.md. Environments that make their own problems take none",
    )
    env: EnvConfig = env_field()
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
        default=600.0,
        doc="longest an actor may take to start, seconds: an engine with its model, an SGLang "
        "server, a rollout worker",
    )
    require_handshake: bool = chz.field(
        default=True,
        doc="False trains although the parties disagree, on another objective than the one named: "
        "for experiments about just that",
    )
    dtype: DtypeChoice = chz.field(
        default="auto",
        doc="precision of the engines: auto is float32 on a CPU and bfloat16 on CUDA",
    )
    keep_rollouts_every: int = chz.field(
        default=10,
        doc="steps between two from which the first group is kept in out/rollouts.jsonl, for "
        "cluster.report; the first step's always is. 0 keeps none",
    )
    max_staleness: int = chz.field(
        default=1,
        doc="weight versions a rollout may be behind when trained; 0 is fully synchronous",
    )
    reward: str | None = chz.field(
        default=None,
        doc="what a response earns: exact_match (the default), last_number, math_equal or "
        "contains, against `answer`; unit_tests: the `answer` is tests of its program, run in a "
        "sandbox; matches, json_schema: the `answer` is a pattern or schema; or "
        "package.module:function of (response, answer)",
    )
    reward_timeout_s: float = chz.field(
        default=REWARD_TIMEOUT_S,
        doc="longest call of a reward=package.module:function; a later one fails its group",
    )
    reference: str | None = chz.field(
        default=None,
        doc="checkpoint that reference_kl_coef holds the policy near to; default with lora_rank: "
        "the student without its adapter, in the learner",
    )
    sft_data: str | None = chz.field(
        default=None, doc="supervised rows (as recipe=sft reads them) trained on in every update"
    )
    sft_batch_size: int | None = chz.field(
        default=None, doc="of those, rows per optimizer update; 8"
    )
    sft_coef: float | None = chz.field(default=None, doc="weight of their cross-entropy; 0.1")
    policy_engines: int = chz.field(default=1, doc="policy engines (actors)")
    policy_engines_max: int | None = chz.field(
        default=None,
        doc="the pool grows to so many when rollouts are too slow; default: it is fixed",
    )
    rollout_workers: int = chz.field(default=1, doc="rollout workers (actors)")
    rollout_workers_max: int | None = chz.field(
        default=None, doc="the same for rollout workers: environments and rewards that are too slow"
    )
    rollout_cpus: float = chz.field(
        default=0.0, doc="CPUs that each rollout worker takes; 0: it shares what there is"
    )
    colocate: bool = chz.field(
        default=False,
        doc="learner worker i and policy engine i in one place: they share GPUs "
        "(gpus_per_actor=0.5) and shared memory",
    )
    lease_s: float = chz.field(
        default=900.0,
        doc="longest a prompt group is without progress (its engine's work, its next turn) before "
        "another worker gets it, too, seconds",
    )
    max_group_failures: int = chz.field(
        default=3, doc="a prompt group that fails so often is set aside, with the reason"
    )
    max_set_aside: int = chz.field(default=100, doc="prompt groups set aside before the run fails")
    stall_after_s: float = chz.field(
        default=300.0,
        doc="when a group that is waited for makes no progress for so long, the run says who waits "
        "for whom, and acts, seconds",
    )
    scale_up_after_s: float = chz.field(
        default=30.0, doc="a pool grows once the learner has waited too much for so long, seconds"
    )
    scale_down_after_s: float = chz.field(
        default=120.0, doc="a pool shrinks once it was too large for so long, seconds"
    )
    eval_every: int = chz.field(default=0, doc="steps between evaluations; 0: start and end only")
    eval_prompts: str | None = chz.field(
        default=None, doc="JSONL of held-out prompts; default: eval_size problems held out"
    )
    eval_size: int = chz.field(
        default=64, doc="problems evaluated; without eval_prompts at most a tenth is held out"
    )
    eval_temperature: float = chz.field(
        default=0.0, doc="the serving decoder's temperature; 0 is greedy. Never touches training"
    )
    eval_top_p: float = chz.field(default=1.0, doc="the serving decoder's top-p; 1 is off")
    eval_top_k: int = chz.field(default=0, doc="the serving decoder's top-k; 0 is off")
    eval_samples: int = chz.field(
        default=1,
        doc="responses per prompt in evaluation; several give pass@k and a majority's vote, and "
        "need eval_temperature above 0",
    )
    eval_max_new_tokens: int | None = chz.field(
        default=None, doc="longest response in evaluation; default: max_new_tokens"
    )

    def _require_what_is_here(self) -> None:
        """Raises ConfigError for what a run without Ray cannot have."""
        for name in ("policy_engines_max", "teacher_engines_max", "rollout_workers_max"):
            if getattr(self, name, None) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)} with local=True: pools grow on a Ray cluster "
                    "only; leave one of them out"
                )
        if self.weights in ("object_store", "group"):
            raise ConfigError(
                f"weights={self.weights} with local=True: the engines are in the learner's own "
                "process; use weights=auto"
            )

    @chz.validate
    def _in_range(self) -> None:
        for name in (
            "prompts_per_step",
            "group_size",
            "policy_engines",
            "rollout_workers",
            "eval_size",
            "max_group_failures",
            "max_set_aside",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        self.require_bounds("policy_engines", "rollout_workers")
        if self.local:
            self._require_what_is_here()
        if not self.rollout_cpus >= 0:
            raise ConfigError(f"rollout_cpus={self.rollout_cpus} must not be negative")
        for name in ("lease_s", "stall_after_s", "scale_up_after_s", "scale_down_after_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        self.require_work_for_all(
            self.prompts_per_step * self.group_size,
            f"prompts_per_step={self.prompts_per_step} x group_size={self.group_size}",
        )
        if not self.start_deadline_s > 0:
            raise ConfigError(f"start_deadline_s={self.start_deadline_s} must be above 0")
        for name in ("sft_batch_size", "sft_coef"):
            value = getattr(self, name)
            if value is not None and self.sft_data is None:
                raise ConfigError(f"{name}={value} changes nothing without sft_data; leave it out")
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(
                    f"{name}={value} must be above 0, and finite; leave sft_data out to train on "
                    "rollouts alone"
                )
        parse_flags(self.policy_server_flags)
        self._check_env()
        if self.weights == "group" and choose_engine(self.engine) == "embedded":
            raise ConfigError(
                "weights=group needs engine=sglang: the embedded engine joins no weight group; use "
                "weights=auto"
            )
        for name in ("max_staleness", "eval_every", "probe_every", "keep_rollouts_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        self.train_sampling()
        self.eval_sampling()

    def _check_env(self) -> None:
        """Raises ConfigError for a setting that the environment does not read."""
        name = type(self.env).__name__
        self.reward_function()
        self.env.check_group(self.group_size)
        if self.reward is not None and not self.env.judges:
            raise ConfigError(
                f"reward={self.reward} changes nothing: env={name} has rewards of its own"
            )
        for field in self.env.token_rewards:
            if getattr(self.env, field) and self.objective().bonus_coef == 0:
                raise ConfigError(
                    f"env.{field}={getattr(self.env, field)} changes nothing with bonus_coef=0; "
                    "give a coefficient, or leave it out"
                )
        for field in ("prompts", "eval_prompts"):
            path = getattr(self, field)
            if path is not None and not self.env.reads_prompts:
                raise ConfigError(f"{field}={path} changes nothing: env={name} reads no file")
        if self.prompts is None and self.env.reads_prompts:
            raise ConfigError(f"env={name} reads a file of prompts; give prompts=FILE.jsonl")

    def reward_function(self) -> RewardFunction:
        return load_reward(self.reward or DEFAULT_REWARD, self.reward_timeout_s)

    @property
    def judge(self) -> str:
        """Name of the reward or environment that judges, for people to read."""
        return (self.reward or DEFAULT_REWARD) if self.env.judges else type(self.env).__name__

    def problems_title(self, prompts: str | None) -> str:
        """The environment, its file of prompts and its reward, as they were set."""
        title = f"env={type(self.env).__name__}"
        if self.env.reads_prompts:
            title += f" prompts={prompts}"
        return title + (f" reward={self.judge}" if self.env.judges else "")

    def require_bounds(self, *pools: str) -> None:
        """Raises ConfigError if a pool's largest size is below its smallest."""
        for name in pools:
            smallest, largest = getattr(self, name), getattr(self, f"{name}_max")
            if largest is not None and largest < smallest:
                raise ConfigError(
                    f"{name}_max={largest} is below {name}={smallest}, the pool's smallest size; "
                    "give a larger one, or leave it out"
                )

    def train_sampling(self) -> TrainSampling:
        return TrainSampling(temperature=self.temperature, max_new_tokens=self.max_new_tokens)

    def eval_sampling(self) -> EvalSampling:
        return EvalSampling(
            temperature=self.eval_temperature,
            max_new_tokens=self.longest_evaluation(),
            top_p=self.eval_top_p,
            top_k=self.eval_top_k,
            num_samples=self.eval_samples,
        )

    def longest_evaluation(self) -> int:
        if self.eval_max_new_tokens is None:
            return self.max_new_tokens
        return self.eval_max_new_tokens

    @property
    @abstractmethod
    def recipe(self) -> str:
        """The recipe's name on the command line."""

    @abstractmethod
    def objective(self) -> ObjectiveConfig:
        """The whole objective."""

    def teacher_models(self) -> Mapping[str, TeacherConfig]:
        """Teachers by name; the name of one that is alone is empty."""
        return {}

    @property
    def scored_by_reference(self) -> bool:
        """True if reference engines score the rollouts; the learner may hold one of its own."""
        return self.reference is not None and self.objective().reference_kl_coef > 0

    def reference_engine(self, device: str, log_path: str) -> EngineConfig:
        assert self.reference is not None
        return self.engine_of(self.reference, device, log_path, self.policy_server_flags)

    def policy_engine(self, model: str, device: str, log_path: str) -> EngineConfig:
        return self.engine_of(model, device, log_path, self.policy_server_flags)

    def engine_of(self, model: str, device: str, log_path: str, server_flags: str) -> EngineConfig:
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
class OpdConfig(RolloutConfig, ObjectiveConfig):
    """recipe=opd: on-policy distillation. The student samples, the teacher scores, both at T."""

    teacher: str | None = chz.field(
        default=None,
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); shares the student's tokenizer",
    )
    teachers: Mapping[str, TeacherConfig] = chz.field(
        default_factory=dict,
        doc="instead of teacher: several, teachers.NAME.model=... and teachers.NAME.weight=...; "
        "each prompt's `teacher` field names the one that scores it",
    )
    teacher_server_flags: str = chz.field(
        default="", doc="more of SGLang's own flags for teacher servers"
    )
    teacher_engines: int = chz.field(default=1, doc="engines (actors) of each teacher")
    teacher_engines_max: int | None = chz.field(
        default=None, doc="the pool of each teacher grows to so many; default: it is fixed"
    )

    @chz.validate
    def _opd_in_range(self) -> None:
        if (self.teacher is None) != bool(self.teachers):
            raise ConfigError(
                f"teacher={self.teacher} with {len(self.teachers)} teachers.NAME: give teacher=DIR "
                "for one, or teachers.NAME.model=DIR for several"
            )
        for name, teacher in self.teachers.items():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # it names actors and log files
                raise ConfigError(f"teachers.{name}: a name has letters, digits, _ and - only")
            if not 0 < teacher.weight < float("inf"):
                raise ConfigError(
                    f"teachers.{name}.weight={teacher.weight} must be above 0, and finite"
                )
        if self.teacher_engines < 1:
            raise ConfigError(f"teacher_engines={self.teacher_engines} must be at least 1")
        self.require_bounds("teacher_engines")
        parse_flags(self.teacher_server_flags)
        require_teacher(self)
        if self.reward_coef > 0:
            require_comparison(self, self.group_size)
        if self.estimator == "full":
            for teacher in self.teacher_models().values():
                if is_url(teacher.model):
                    raise ConfigError(
                        f"estimator=full needs the teacher in the learner, and {teacher.model} is "
                        "a running server; give a checkpoint, or use estimator=top_k"
                    )
        _check_reference(self, self)

    @property
    def recipe(self) -> str:
        return "opd"

    def objective(self) -> ObjectiveConfig:
        return ObjectiveConfig(**_fields_of(ObjectiveConfig, self))

    def teacher_models(self) -> Mapping[str, TeacherConfig]:
        if self.teacher is not None:
            return {"": TeacherConfig(model=self.teacher)}
        return self.teachers

    def teacher_engine(self, name: str, device: str, log_path: str) -> EngineConfig:
        model = self.teacher_models()[name].model
        return self.engine_of(model, device, log_path, self.teacher_server_flags)


@chz.chz
class RlConfig(RolloutConfig, PolicyObjective):
    """recipe=rl: reinforcement learning. The student samples, a reward function judges (GRPO)."""

    reward_coef: float = chz.field(default=1.0, doc="weight of the task reward's advantage")

    @chz.validate
    def _rl_in_range(self) -> None:
        require_reward(self, self.group_size)
        _check_reference(self, self)

    @property
    def recipe(self) -> str:
        return "rl"

    def objective(self) -> ObjectiveConfig:
        return ObjectiveConfig(kl_coef=0.0, **_fields_of(PolicyObjective, self))


def _fields_of(kind: type, config: RolloutConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in chz.chz_fields(kind)}


def _check_reference(config: RolloutConfig, objective: PolicyObjective) -> None:
    if objective.reference_kl_coef > 0 and config.reference is None and config.lora() is None:
        raise ConfigError(
            f"reference_kl_coef={objective.reference_kl_coef} needs a reference model; give "
            "reference=DIR, the student's own checkpoint for example, or train an adapter "
            "(lora_rank), whose base is a reference"
        )
    asked = "reference" in config.env.asks
    if config.reference is not None and objective.reference_kl_coef == 0 and not asked:
        raise ConfigError(
            f"reference={config.reference} changes nothing with reference_kl_coef=0; give a "
            "coefficient, or leave the reference out"
        )
    if config.reference is None and asked:
        raise ConfigError(
            "env.opponent=reference needs a reference model; give reference=DIR, the student's own "
            "checkpoint for example"
        )
