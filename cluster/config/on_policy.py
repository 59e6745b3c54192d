"""Settings of the recipes that train on the student's own samples: opd and rl."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import chz

from actors.config import EngineConfig
from actors.rollout.text_endpoint import EndpointAddress
from actors.sglang.address import is_url
from actors.sglang.flags import adapter_flags
from actors.sglang.parallelism import check_pushed, parallelism
from cluster.config.common import CommonConfig, RunLearnerSettings
from cluster.config.early_checks import OWN, model_field
from cluster.config.env import EnvSettings
from cluster.config.evaluation import EvalSettings, SamplingSettings
from cluster.config.pools import (
    PoolSettings,
    QueueSettings,
    RolloutSettings,
    VerifySettings,
)
from cluster.config.rows import ROWS
from cluster.config.teachers import (
    TeacherConfig,
    TeachersSettings,
)
from distill.chat.template_choice import ChatTemplateSettings
from distill.data.columns import PromptColumns
from distill.data.feedback import FeedbackTemplate
from distill.data.sources import parse_sources
from distill.errors import ConfigError
from distill.gpu import DTYPE_BYTES
from distill.group_share import EVERY_GROUP, GroupShare
from distill.objective.settings import (
    AUTO,
    ObjectiveConfig,
    OpdObjective,
    RlObjective,
    is_own,
    require_comparison,
)
from distill.rewards.length import LengthRules
from distill.rules import ABSENT, above, at_least, get, needs, not_with, setting
from distill.settings import ESSENTIAL, MAY_CHANGE, Section, section_field
from distill.stops import StopSettings, StopTokens
from distill.teacher_samples import NO_TEACHER_SAMPLES, TeacherSamples
from learner.config import LearnerConfig, learner_section

if TYPE_CHECKING:  # imports torch, which --help does not need
    from learner.checkpoint import Checkpoint

# With estimator=full the teacher's engine scores this share of groups, and at least so many a step.
# The seed makes their choice independent of the choice of the groups that the teacher samples.
METERED_SHARE, METERED_GROUPS, METERED_SEED = 0.25, 8, 1
# constant_groups=replace: most groups that a step passes over, in multiples of prompts_per_step.
MOST_REPLACED = 3

Keep = int | Literal["sample", "all", "none"]


@chz.chz
class DataSettings(PromptColumns, EnvSettings, ChatTemplateSettings, StopSettings):
    """The student and its training data."""

    section: ClassVar[Section] = Section.MODEL

    student: str = model_field(
        doc="student checkpoint: a Hugging Face directory (or hub name), or a run's directory "
        "(for its final/), RUN:STEP or RUN:best",
        metadata=ESSENTIAL,
    )
    prompts: str | None = chz.field(
        default=None,
        doc="prompts: a JSONL, JSON, CSV, parquet or Arrow file, saved or hub data set, or "
        "module:function; several with weights: a.jsonl:3,b.parquet:1. Each row has `prompt` "
        "(string) or `messages` (chat), optionally `answer` and more (docs/data.md). Environments "
        "that make their own problems take none",
        metadata=ESSENTIAL | ROWS,
    )
    reference: str | None = model_field(
        default=None,
        doc="checkpoint of the reference model, to which reference_kl_coef keeps the policy near; "
        "default with lora.rank: the student without its adapter, in the learner",
    )
    sft_data: str | None = chz.field(
        default=None,
        doc="supervised rows, in the format of recipe=sft, that every update trains on too",
        metadata=ROWS,
    )
    sft_coef: float | None = setting(
        needs("sft_data"),
        above(0, "leave sft_data out to train on rollouts alone"),
        default=None,
        doc="weight of the cross-entropy of sft_data, of which an update has 8 rows; default: 0.1",
    )

    @chz.validate
    def _data_in_range(self) -> None:
        if self.prompts is not None and not self.env.reads_prompts:
            name = type(self.env).__name__
            raise ConfigError(f"prompts={self.prompts} changes nothing: env={name} reads no file")
        if self.prompts is None and self.env.reads_prompts:
            name = type(self.env).__name__
            raise ConfigError(f"env={name} reads a file of prompts; give prompts=FILE.jsonl")
        if self.prompts is not None:
            parse_sources("prompts", self.prompts)
        if self.sft_data is not None:
            parse_sources("sft_data", self.sft_data)
        for name in chz.chz_fields(PromptColumns):
            if getattr(self, name) and not self.env.reads_prompts:
                raise ConfigError(
                    f"{name}={getattr(self, name)} changes nothing: env="
                    f"{type(self.env).__name__} reads no file"
                )

    def problems_title(self, prompts: str | None) -> str:
        """Settings of the environment, its file of prompts and its reward, as text."""
        title = f"env={type(self.env).__name__}"
        if self.env.reads_prompts:
            title += f" prompts={prompts}"
        return title + (f" reward={self.judge}" if self.env.judges else "")


@chz.chz
class StepSettings:
    """A step's prompts, and how many are under way."""

    section: ClassVar[Section] = Section.SAMPLING

    sampling: SamplingSettings = section_field(SamplingSettings)
    prompts_per_step: int = setting(
        at_least(1), default=32, doc="prompts (groups) per optimizer step", metadata=ESSENTIAL
    )
    queue: QueueSettings = section_field(QueueSettings)

    @chz.validate
    def _check_window(self) -> None:
        queue, most = self.queue, self.prompts_per_step * (self.queue.max_staleness + 1)
        given = queue.groups_in_flight
        if given is not None and given > most:
            raise ConfigError(
                f"queue.groups_in_flight={given} must be at most {most}, (queue.max_staleness + 1) "
                "* prompts_per_step: more could not all be trained in time; raise max_staleness",
                field="queue.groups_in_flight",
            )
        if queue.on_stale != "wait" and self.window == self.prompts_per_step:
            name = "groups_in_flight" if queue.max_staleness else "max_staleness"
            raise ConfigError(
                f"queue.on_stale={queue.on_stale} changes nothing with queue.{name}="
                f"{getattr(queue, name)}: the next step takes all groups that are under way, and "
                "waits for each; raise it, or leave on_stale out",
                field="queue.on_stale",
            )

    @property
    def window(self) -> int:
        """Groups in flight: leased, finished, or in weights that are not yet on the engines."""
        queue = self.queue
        return queue.groups_in_flight or self.prompts_per_step * min(queue.max_staleness + 1, 2)

    @property
    def steps_in_flight(self) -> int:
        """`window` in steps, rounded up."""
        return -(-self.window // self.prompts_per_step)


@chz.chz
class PolicyLearnerSettings(RunLearnerSettings):
    """The learner of a policy: AdamW, how it computes, and its actors."""

    section: ClassVar[Section] = Section.OPTIMIZER

    routing_replay: bool | None = chz.field(
        default=None,
        doc="train the tokens of a mixture-of-experts model through the experts to which the "
        "engine routed them (docs/models.md; metric train/routing_mismatch); default: if engine "
        "and learner can do this for the student",
        metadata=MAY_CHANGE,
    )


@chz.chz
class RolloutConfig(
    DataSettings,
    StepSettings,
    PoolSettings,
    CommonConfig,
    ABC,
):
    """Settings of the recipes that train on the student's own samples."""

    section: ClassVar[Section] = Section.OUTPUT

    learner: PolicyLearnerSettings = learner_section(PolicyLearnerSettings)
    objective: ObjectiveConfig = section_field(ObjectiveConfig)
    eval: EvalSettings = section_field(EvalSettings)
    rollout: RolloutSettings = section_field(RolloutSettings)
    verify: VerifySettings = section_field(VerifySettings)
    keep: Keep = chz.field(
        default="sample",
        doc="rollouts that are kept. sample: the first group of every 10th step, of the first and "
        "of the last, in out/rollouts.jsonl for cluster.report, and the responses of evaluations "
        "to their first 8 problems, in out/evaluations.jsonl; all: all groups of all steps, and "
        "all responses; none: nothing; a number N, at least checkpoint.every: as sample, and in "
        "out/groups all that the newest N steps trained on, for cluster.replay and train_from=",
        metadata=MAY_CHANGE,
    )
    train_from: str | None = setting(
        not_with("rollout_only", why="it samples groups, and those are there; train on them"),
        not_with("dry_run", "rehearse", why="a rehearsal starts every kind of actor"),
        default=None,
        doc="out= of another run that has kept its steps (keep=N): train on their groups, in "
        "order, without engines; to debug a learner or an objective",
    )
    rollout_only: bool = setting(
        not_with("dry_run", "rehearse", why="a rehearsal ends and resumes a learner"),
        default=False,
        doc="sample and score the groups of `steps` steps, and keep them in out/groups for "
        "train_from= of another run, without a learner; to debug an environment or a reward. "
        "Settings of the learner are left to the other run",
    )

    def _require_what_is_here(self) -> None:
        """Raises ConfigError for settings that need Ray, in a run with local=True."""
        pools = {"policy.engines": self.policy.size, "rollout.workers": self.rollout.size}
        if isinstance(self, OpdConfig):
            pools["teacher.engines"] = self.teacher.size
        for name, size in pools.items():
            if size.largest > size.smallest:
                raise ConfigError(
                    f"{name}={get(self, name)} with local=True: pools grow on a Ray cluster "
                    f"only; use {name}={size.smallest}",
                    field=name,
                )
        if self.weights == "group":
            raise ConfigError(
                "weights=group with local=True: the engines are in the learner's own "
                "process; use weights=auto"
            )

    @chz.validate
    def _in_range(self) -> None:
        if self.cluster.local:
            self._require_what_is_here()
        self.require_work_for_all(
            self.prompts_per_step * self.sampling.group_size,
            f"prompts_per_step={self.prompts_per_step} x group_size={self.sampling.group_size}",
        )
        self._check_whole_steps()
        self._check_keeping()
        self._check_env()
        require_comparison(self.objective, self.sampling.group_size)
        self._check_reference()
        if (
            self.objective.baseline == "global"
            and self.prompts_per_step * self.sampling.group_size < 2
        ):
            raise ConfigError(
                "baseline=global with prompts_per_step=1 and group_size=1: a reward less the mean "
                "of a step of one sample is zero, and so is the gradient; raise one of them"
            )
        self._check_nodes()
        self._check_shared_gpus()
        self._check_sleep()

    def _check_reference(self) -> None:
        """Raises ConfigError for a reference model that is missing, or that nothing uses."""
        coefficient = self.objective.reference_kl_coef
        if coefficient > 0 and self.reference is None and not self.lora.trains_adapter:
            raise ConfigError(
                f"reference_kl_coef={coefficient} needs a reference model; give "
                "reference=DIR, the student's own checkpoint for example, or train an adapter "
                "(lora.rank), whose base is a reference",
                field="objective.reference_kl_coef",
            )
        asked = "reference" in self.env.asks
        if self.reference is not None and coefficient == 0 and not asked:
            raise ConfigError(
                f"reference={self.reference} changes nothing with reference_kl_coef=0; give a "
                "coefficient, or leave the reference out",
                field="reference",
            )
        if self.reference is None and asked:
            raise ConfigError(
                "env.opponent=reference needs a reference model; give reference=DIR, the student's "
                "own checkpoint for example",
                field="env.opponent",
            )

    def _check_nodes(self) -> None:
        """Raises ConfigError for servers over several nodes that cannot be placed."""
        for name in ("policy.server_flags", "teacher.server_flags"):
            flags = get(self, name)
            if flags is ABSENT:
                continue
            nodes = parallelism(flags).nodes
            if nodes > 1 and self.cluster.local:
                raise ConfigError(
                    f"{name}={flags} with local=True: this process is on one node; leave --nnodes "
                    "or local out"
                )
            if nodes > 1 and self.cluster.colocate != "no" and name == "policy.server_flags":
                raise ConfigError(
                    f"{name}={flags} with colocate={self.cluster.colocate}: an engine over {nodes} "
                    "nodes has no place beside a learner worker; leave colocate out"
                )

    def _check_shared_gpus(self) -> None:
        """Raises ConfigError if engines of several GPUs do not match the GPUs of the workers."""
        gpus, workers = parallelism(self.policy.server_flags).gpus, self.learner.workers
        if gpus == 1 or not self.shares_gpus("cpu" if self.cluster.device == "cpu" else "cuda"):
            return
        if workers % gpus:
            raise ConfigError(
                f"learner.workers={workers} with colocate={self.cluster.colocate} "
                f"policy.server_flags={self.policy.server_flags}: each engine shares the GPUs of "
                f"{gpus} workers; use a multiple of {gpus}",
                field="learner.workers",
            )
        engines = workers // gpus
        if (self.cluster.gpus_per_actor, *self.policy.size) != (0.5, engines, engines):
            raise ConfigError(
                f"policy.server_flags={self.policy.server_flags} with "
                f"colocate={self.cluster.colocate} learner.workers={workers}: each engine shares "
                f"the GPUs of {gpus} workers; use gpus_per_actor=0.5 policy.engines={engines}"
            )

    def _check_sleep(self) -> None:
        """Raises ConfigError if engines are set to sleep and cannot."""
        if not self.engines_sleep:
            return
        if self.engine.kind == "embedded":
            raise ConfigError(
                "colocate=sleep needs engine=sglang: the embedded engine keeps its memory; use "
                "colocate=share",
                field="cluster.colocate",
            )
        if self.cluster.device == "cuda" and self.cluster.gpus_per_actor >= 1:
            raise ConfigError(
                f"colocate=sleep with gpus_per_actor={self.cluster.gpus_per_actor:g}: engines and "
                "learner have GPUs of their own, so sleep frees no memory for the other; use "
                "gpus_per_actor=0.5, or colocate=share to place them on one node",
                field="cluster.colocate",
            )
        if self.engine.on_weight_update == "in_place":
            raise ConfigError(
                "on_weight_update=in_place with colocate=sleep: samples under way would need the "
                "cache that sleep releases; use on_weight_update=continue",
                field="engine.on_weight_update",
            )

    def _check_whole_steps(self) -> None:
        if isinstance(self.keep, int) and self.keep < self.checkpoint.every:
            raise ConfigError(
                f"keep={self.keep} must be at least checkpoint.every={self.checkpoint.every}: a "
                "step is done again from the checkpoint before it",
                field="keep",
            )

    def _check_keeping(self) -> None:
        if self.only_keeps and self.whole_steps:
            raise ConfigError(
                f"keep={self.keep} with rollout_only=True: every step is kept; leave keep out",
                field="keep",
            )

    def _check_env(self) -> None:
        """Raises ConfigError for settings that the environment does not use."""
        self.env.check_group(self.sampling.group_size)
        for field in self.env.token_rewards:
            if getattr(self.env, field) and self.objective.bonus_coef == 0:
                raise ConfigError(
                    f"env.{field}={getattr(self.env, field)} changes nothing with bonus_coef=0; "
                    "give a coefficient, or leave it out"
                )
        if self.eval.source is not None and not self.env.reads_prompts:
            name = type(self.env).__name__
            raise ConfigError(
                f"eval.source={self.eval.source} changes nothing: env={name} reads no file"
            )

    @property
    def only_keeps(self) -> bool:
        return self.rollout_only

    @property
    def pushes(self) -> bool:
        """True if the run has engines and a learner, whose weights they get."""
        return self.train_from is None and not self.only_keeps

    @property
    def adapter_versions(self) -> int:
        """Versions of an adapter that a server may hold: those that samples may be of, and the one
        that is being loaded."""
        return self.queue.max_staleness + 2

    @property
    def whole_steps(self) -> int:
        """Newest steps of which all training data are kept; 0: none."""
        return self.keep if isinstance(self.keep, int) else 0

    def replays_routing(self) -> bool:
        return bool(self.learner.routing_replay)

    @property
    @abstractmethod
    def recipe(self) -> str:
        """The recipe's name on the command line."""

    def length_rules(self) -> LengthRules | None:
        """Rules by which the length of a response changes its reward; None without any."""
        objective = self.objective
        if not objective.mask_truncated and not objective.overlong_buffer:
            return None
        return LengthRules(
            max_new_tokens=self.sampling.max_new_tokens,
            mask_truncated=objective.mask_truncated,
            overlong_buffer=objective.overlong_buffer,
        )

    def teacher_models(self) -> Mapping[str, TeacherConfig]:
        """Teachers by name; a single teacher has an empty name."""
        return {}

    def teacher_sampled(self, vocab_size: int) -> TeacherSamples:
        """Groups that teachers sample, with tokens of a student vocabulary of `vocab_size`."""
        return NO_TEACHER_SAMPLES

    def scored_by_teacher(self) -> GroupShare:
        """Policy-sampled groups that a teacher's engine scores, if there is one."""
        return EVERY_GROUP

    def text_endpoints(self) -> Mapping[str, EndpointAddress]:
        """Endpoints that generate teacher samples, by teacher name."""
        return {}

    @property
    def teacher_moves(self) -> bool:
        """True if the teacher is the student itself, as it trains."""
        return False

    @property
    def teacher_nodes(self) -> int:
        """Nodes of each engine of a teacher."""
        return 1

    @property
    def needs_teacher_logprobs(self) -> str:
        """Setting that reads log q_T of sampled tokens; "" without one or without a teacher."""
        return ""

    def feedback_template(self) -> FeedbackTemplate | None:
        """Template of the prompts that teachers see; None to use the prompts of the rows."""
        return None

    @property
    def most_replaced(self) -> int:
        """Largest number of groups of constant reward that a step skips."""
        return 0

    @property
    def scored_by_reference(self) -> bool:
        """True if reference engines score the rollouts. Otherwise see `base_is_reference`."""
        return self.reference is not None and self.objective.reference_kl_coef > 0

    @property
    def base_is_reference(self) -> bool:
        """True if the learner's model without its adapter is the reference policy."""
        referred = self.reference is None and self.objective.reference_kl_coef > 0
        return referred and not self.only_keeps

    @property
    def copied_teachers(self) -> Mapping[str, str]:
        """Checkpoints of the teachers that the learner holds whole, by name."""
        if not self._compares_all or self.teacher_moves:
            return {}
        return {n: each.model for n, each in self.teacher_models().items() if each.head is None}

    @property
    def teacher_heads(self) -> Mapping[str, str]:
        """Checkpoints whose head alone the learner holds, by name of the teacher.

        The teacher's engines give the hidden states (`distill.states`).
        """
        if not self._compares_all or self.teacher_moves:
            return {}
        return {n: each.head for n, each in self.teacher_models().items() if each.head is not None}

    def frozen_in_learner(self, device: str) -> int | None:
        if not self.copied_teachers and not self.teacher_heads:
            return 0
        from learner.memory import frozen_bytes, head_bytes  # imports torch

        dtype = self.engine.dtype_on(device)
        copies = frozen_bytes(self.copied_teachers.values(), dtype)
        heads = sum(head_bytes(path, dtype) for path in self.teacher_heads.values())
        # Workers share the copies, and each has every head.
        return None if copies is None else copies + heads * self.learner.workers

    @property
    def teaches_itself(self) -> bool:
        """True if the learner's own model is the teacher of estimator=full."""
        return self._compares_all and self.teacher_moves

    @property
    def _compares_all(self) -> bool:
        return self.objective.estimator == "full" and not self.only_keeps

    def reference_engine(
        self, device: str, log_path: str, stops: StopTokens | None = None
    ) -> EngineConfig:
        assert self.reference is not None
        return self.engine_of(self.reference, device, log_path, self.policy.server_flags, stops)

    def policy_engine(
        self, model: str, device: str, log_path: str, stops: StopTokens | None = None
    ) -> EngineConfig:
        engine = self.evaluation_engine(model, device, log_path, stops)
        engine = chz.replace(engine, routed_experts=self.replays_routing())
        if self.shares_gpus(device):
            engine = chz.replace(engine, gpu_share=self.cluster.gpus_per_actor)
        if not self.engines_sleep:
            return engine
        beside = 0
        if device.startswith("cuda"):
            lent = self.lent_bytes(device) if self.lends_weights(device) else 0
            beside = self._learner_resting(device) + lent
        return chz.replace(engine, sleeps=True, gpu_share=1.0, gpu_beside=beside)

    def evaluation_engine(
        self, model: str, device: str, log_path: str, stops: StopTokens | None = None
    ) -> EngineConfig:
        """Settings of a policy engine on GPUs that it does not share with the learner."""
        engine = self.engine_of(model, device, log_path, self.policy.server_flags, stops)
        if self.weights != "adapter":
            return engine
        from learner.lora import served_adapter  # imports torch

        form, versions = served_adapter(self.lora, self.student), self.adapter_versions
        flags = f"{adapter_flags(form, versions, device)} {engine.server_flags}"
        beside = versions * form.parameters * DTYPE_BYTES[engine.dtype] if engine.shares_gpu else 0
        return chz.replace(engine, server_flags=flags, gpu_beside=beside)

    def policy_learner(
        self, device: str, resume_from: Checkpoint | None, stops: StopTokens
    ) -> LearnerConfig:
        """Settings of the student's learner, from the start of the run or from a checkpoint."""
        made = self.learner_config(
            self.student,
            device,
            resume_from=resume_from,
            updates_per_step=self.objective.num_substeps,
            stops=stops,
        )
        return chz.replace(made, shadow=self.teacher_rule)

    @property
    def engines_sleep(self) -> bool:
        """True if policy engines release their memory while the learner computes."""
        return self.cluster.colocate == "sleep" and not self.only_keeps

    def shares_gpus(self, device: str) -> bool:
        """True if policy engines are on the GPUs of the learner's workers."""
        shares = (
            self.cluster.colocate != "no"
            and not self.only_keeps
            and self.cluster.gpus_per_actor < 1
        )
        return shares and device.startswith("cuda")

    def lends_weights(self, device: str) -> bool:
        """True if policy engines will read weights from the memory of the learner's workers.

        With weights=auto this is a forecast from the settings: each engine shares a worker's GPU.
        """
        if self.weights != "auto":
            return self.weights == "ipc"
        gpus = self.policy.size.smallest * parallelism(self.policy.server_flags).gpus
        shares = self.shares_gpus(device) and gpus <= self.learner.workers
        return shares and self.engine.kind_on(device) == "sglang"

    def lent_bytes(self, device: str) -> int:
        """Bytes of the largest bucket of a push by ipc: its additional memory on each GPU."""
        import torch  # here, since settings alone do not need it

        from learner.memory import largest_bucket

        dtype = getattr(torch, self.engine.dtype_on(device))
        return largest_bucket(self.student, dtype)

    @property
    def pushes_overlap(self) -> bool:
        """True if a push by copy can overlap the learner's next step.

        With max_staleness=0, that step has no groups before the push has ended.
        """
        return self.queue.max_staleness > 0 and not self.engines_sleep

    def _learner_resting(self, device: str) -> int:
        """Bytes that a learner worker holds on its GPU while engines generate."""
        from learner.memory import WorkerMemory, estimate_memory  # imports torch

        estimate, frozen = estimate_memory(self.student), self.frozen_in_learner(device)
        if estimate is None or frozen is None:
            missing = self.student if estimate is None else "a teacher's copy in the learner"
            raise ConfigError(
                f"{missing} with colocate={self.cluster.colocate}: its files are not on this "
                "machine, so it cannot be worked out what the engines leave to the learner; give a "
                "directory"
            )
        holding, workers = self.learner_holding, self.learner.workers
        memory = WorkerMemory.of(
            estimate.parameters, holding, workers=workers, offloads=True, frozen=frozen
        )
        return memory.resting

    def engine_of(
        self,
        model: str,
        device: str,
        log_path: str,
        server_flags: str,
        stops: StopTokens | None,
    ) -> EngineConfig:
        gpus = parallelism(server_flags).gpus  # an engine with several has whole ones
        return self.engine.config(
            model,
            device,
            threads=self.cluster.threads,
            server_flags=server_flags,
            on_weight_update=self.engine.on_weight_update,
            gpu_share=min(1.0, self.cluster.gpus_per_actor) if gpus == 1 else 1.0,
            log_path=log_path,
            start_deadline_s=self.cluster.start_deadline_s,
            request_deadline_s=self.cluster.no_progress_s,
            stops=stops,
        )


@chz.chz
class OpdConfig(TeachersSettings, RolloutConfig):
    """recipe=opd: on-policy distillation. The student samples, the teacher scores, both at T."""

    section: ClassVar[Section] = Section.ENGINES

    objective: OpdObjective = section_field(OpdObjective)

    @chz.validate
    def _opd_in_range(self) -> None:
        self.teacher.check_share(self.steps)
        self.text_endpoints()
        self._check_feedback()
        if self.teacher_moves:
            self._check_own_teacher()
        self._check_heads()

    @property
    def recipe(self) -> str:
        return "opd"

    def teacher_models(self) -> Mapping[str, TeacherConfig]:
        """As `RolloutConfig.teacher_models`; for teacher=policy, the student's checkpoint."""
        if self.teacher.model is None:
            return self.teachers
        return {
            "": TeacherConfig(
                model=self.student if self.teacher_moves else self.teacher.model,
                samples_from=self.teacher.samples_from,
                head=self.teacher.head,
            )
        }

    def text_endpoints(self) -> Mapping[str, EndpointAddress]:
        return self.teacher.endpoints(self.teacher_models())

    def feedback_template(self) -> FeedbackTemplate | None:
        if self.teacher.feedback is None:
            return None
        return FeedbackTemplate(
            text=self.teacher.feedback, correct_reward_threshold=self.objective.correct_threshold
        )

    def _check_feedback(self) -> None:
        template = self.feedback_template()
        tells = template is not None and "outcome" in template.placeholders
        threshold = self.objective.correct_reward_threshold
        if threshold is not None and not (tells or self.objective.hint_bonus_coef):
            raise ConfigError(
                f"correct_reward_threshold={threshold} changes nothing without "
                "{outcome} in teacher.feedback, or hint_bonus_coef; leave it out",
                field="objective.correct_reward_threshold",
            )

    def _check_heads(self) -> None:
        """Raises ConfigError for a teacher without the head that it needs, or a useless one."""
        for name, teacher in self.teacher_models().items():
            setting = f"teachers.{name}" if name else "teacher"
            if (
                self.objective.estimator == "full"
                and is_url(teacher.model)
                and teacher.head is None
            ):
                raise ConfigError(
                    f"estimator=full with {setting}={teacher.model}, a running server, needs its "
                    f"head in the learner; give {setting}.head=DIR, the checkpoint that it serves, "
                    "or use estimator=top_k",
                    field=f"{setting}.head",
                )
        if self.teacher.head is not None and (self.teachers or self.teacher_moves):
            raise ConfigError(
                f"teacher.head={self.teacher.head} is of one teacher with weights of its own; give "
                "teachers.NAME.head for several, and none with teacher=policy",
                field="teacher.head",
            )
        heads = [each.head for each in self.teacher_models().values() if each.head is not None]
        full = self.objective.estimator in ("full", AUTO)
        if heads and (not full or self.only_keeps or self.train_from is not None):
            raise ConfigError(
                f"teacher.head={heads[0]} is for estimator=full, of groups whose hidden states "
                "the teacher's engines give: neither rollout_only=True nor train_from= has them; "
                "leave one of them out",
                field="teacher.head",
            )

    def _check_own_teacher(self) -> None:
        """Raises ConfigError for settings that conflict with teacher=policy."""
        for name in ("sft_steps", "sample_share"):
            if (value := getattr(self.teacher, name)) and self.teacher.samples_from is None:
                raise ConfigError(
                    f"teacher.{name}={value} with teacher={OWN}: the student would learn to "
                    "say what it says; leave one of them out, or have another model write the "
                    "samples (teacher.samples_from=)",
                    field=f"teacher.{name}",
                )
        if self.teacher_rule is not None and self.only_keeps:
            raise ConfigError(
                f"teacher.lag={self.teacher.lag} teacher.ema={self.teacher.ema} with "
                "rollout_only=True: weights that stay are followed by none that move; leave the "
                "teacher's setting out"
            )
        if self.teacher_rule is not None:
            check_pushed("teacher.server_flags", self.teacher.server_flags)
            return
        for name in ("engines", "server_flags"):
            value = getattr(self.teacher, name)
            default = chz.chz_fields(self.teacher)[name]._default
            if value != default:
                raise ConfigError(
                    f"teacher.{name}={value} changes nothing: with teacher={OWN} the policy "
                    "engines score; leave it out, and use policy.engines",
                    field=f"teacher.{name}",
                )

    @property
    def teacher_nodes(self) -> int:
        return parallelism(self.teacher.server_flags).nodes

    def scored_by_teacher(self) -> GroupShare:
        if self._scores_are_trained_on:
            return EVERY_GROUP
        return GroupShare(
            share=min(1.0, max(METERED_SHARE, METERED_GROUPS / self.prompts_per_step)),
            groups_per_step=self.prompts_per_step,
            seed=(self.seed, METERED_SEED),
        )

    @property
    def _scores_are_trained_on(self) -> bool:
        """True if the loss depends on the scores of the teacher's engine.

        With estimator=full alone the loss uses the learner's copy of the teacher, but its engine's
        hidden states where the learner has its head.
        """
        return bool(
            self.objective.estimator != "full"
            or self.teacher_heads
            or self.only_keeps
            or self.train_from is not None
            or self.needs_teacher_logprobs
        )

    @property
    def needs_teacher_logprobs(self) -> str:
        """The setting, with its value, by which the loss reads log q_T of the sampled tokens; ""
        without one."""
        for name in ("kl_clip", "advantage", "hint_bonus_coef", "loss"):
            value = getattr(self.objective, name)
            if is_own(value) if name == "loss" else value:
                return f"objective.{name}={value}"
        return ""

    def teacher_sampled(self, vocab_size: int) -> TeacherSamples:
        return TeacherSamples(
            warmup_groups=self.teacher.sft_steps * self.prompts_per_step,
            share=self.teacher.sample_share,
            groups_per_step=self.prompts_per_step,
            seed=self.seed,
            vocab_size=vocab_size,
        )

    def teacher_engine(
        self, name: str, device: str, log_path: str, stops: StopTokens | None = None
    ) -> EngineConfig:
        model = self.teacher_models()[name].model
        return self.engine_of(model, device, log_path, self.teacher.server_flags, stops)


@chz.chz
class RlConfig(RolloutConfig):
    """recipe=rl: reinforcement learning. The student samples, a reward function judges (GRPO)."""

    objective: RlObjective = section_field(RlObjective)

    @property
    def recipe(self) -> str:
        return "rl"

    @property
    def most_replaced(self) -> int:
        replaces = self.objective.constant_groups == "replace"
        return MOST_REPLACED * self.prompts_per_step if replaces else 0
