"""Settings of the recipes that train on the student's own samples: opd (opd.py) and rl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import chz

from actors.config import PolicyEngineSettings
from actors.rollout.text_endpoint import EndpointAddress
from cluster.config.common import CommonConfig, ReferredModelSettings, RunLearnerSettings, Stage
from cluster.config.early_checks import RUN
from cluster.config.env import EnvSettings
from cluster.config.evaluation import EvalSettings, SamplingSettings
from cluster.config.pools import (
    PolicyClusterSettings,
    PolicyPoolSettings,
    QueueSettings,
    RolloutSettings,
    VerifySettings,
    WeightsSettings,
)
from cluster.config.rows import RowCheck, SftMixSettings, StepPromptSettings, by_source, check_read
from cluster.config.teachers import (
    TeacherConfig,
    TeacherSettings,
    hosted,
)
from distill.data.feedback import FeedbackTemplate
from distill.data.row_forms import check_example
from distill.data.row_reader import RowReader
from distill.errors import ConfigError
from distill.group_share import EVERY_GROUP, GroupShare, TeacherSamples
from distill.objective.settings import (
    ObjectiveConfig,
    RlObjective,
    is_own,
)
from distill.rules import not_with, setting
from distill.settings import MAY_CHANGE, Section, section_field
from distill.stops import StopTokens
from learner.config import LearnerConfig, ShadowRule, learner_section

if TYPE_CHECKING:  # imports torch, which --help does not need
    from learner.checkpoint import Checkpoint

# With estimator=full the teacher's engine scores this fraction of groups, and at least this number
# of groups per step. The seed makes their choice independent of the choice of the groups that the
# teacher samples.
METERED_SHARE, METERED_GROUPS, METERED_SEED = 0.25, 8, 1
# constant_groups=replace: largest number of skipped groups per step, in multiples of
# prompts_per_step.
MOST_REPLACED = 3

Keep = int | Literal["sample", "all", "none"]


@chz.chz
class PolicyLearnerSettings(RunLearnerSettings):
    """Settings of a policy's learner: AdamW, its computation, and its actors."""

    routing_replay: bool | None = chz.field(
        default=None,
        doc="train the tokens of a mixture-of-experts model through the experts to which the "
        "engine routed them (docs/models.md; metric train/routing_mismatch); default: if engine "
        "and learner can do this for the student",
        metadata=MAY_CHANGE,
    )


@chz.chz
class KeepSettings:
    """Rollouts that a run keeps, and runs that only sample or only train."""

    section: ClassVar[Section] = Section.OUTPUT

    keep: Keep = chz.field(
        default="sample",
        doc="rollouts that are kept. sample: the first group of the first, the last and every "
        "10th step, in out/groups for cluster.report, and the responses to the "
        "first 8 problems of evaluations, in out/evaluations.jsonl; all: all groups and all "
        "responses; none: nothing; a number N, at least checkpoint.every: as sample, and "
        "all groups of the newest N steps in out/groups, for cluster.replay and train_from=",
        metadata=MAY_CHANGE,
    )
    train_from: str | None = setting(
        not_with("rollout_only", why="it samples new groups, and train_from replaces sampling"),
        not_with("dry_run", "rehearse", why="a rehearsal starts every kind of actor"),
        default=None,
        doc="out= of another run that has kept its steps (keep=N): train on their groups, in "
        "order, without engines; to debug a learner or an objective",
        metadata=RUN,
    )
    rollout_only: bool = setting(
        not_with("dry_run", "rehearse", why="a rehearsal ends and resumes a learner"),
        default=False,
        doc="sample and score the groups of `steps` steps, and keep them in out/groups for "
        "train_from= of another run, without a learner; to debug an environment or a reward. "
        "The settings of the learner are those of the other run",
    )

    @property
    def only_keeps(self) -> bool:
        return self.rollout_only

    @property
    def whole_steps(self) -> int:
        """Number of newest steps of which all training data is kept; 0: none."""
        return self.keep if isinstance(self.keep, int) else 0


@chz.chz
class RolloutConfig(KeepSettings, EnvSettings, CommonConfig):
    """Settings of the recipes that train on the student's own samples."""

    section: ClassVar[Section] = Section.MODEL

    data: StepPromptSettings = section_field(StepPromptSettings)
    sft: SftMixSettings = section_field(SftMixSettings)
    model: ReferredModelSettings = section_field(ReferredModelSettings)
    learner: PolicyLearnerSettings = learner_section(PolicyLearnerSettings)
    objective: ObjectiveConfig = section_field(ObjectiveConfig)
    sampling: SamplingSettings = section_field(SamplingSettings)
    queue: QueueSettings = section_field(QueueSettings)
    cluster: PolicyClusterSettings = section_field(PolicyClusterSettings)
    engine: PolicyEngineSettings = section_field(PolicyEngineSettings)
    policy: PolicyPoolSettings = section_field(PolicyPoolSettings)
    weights: WeightsSettings = section_field(WeightsSettings)
    eval: EvalSettings = section_field(EvalSettings)
    rollout: RolloutSettings = section_field(RolloutSettings)
    verify: VerifySettings = section_field(VerifySettings)
    teacher: TeacherSettings = section_field(TeacherSettings)
    teachers: Mapping[str, TeacherConfig] = chz.field(
        default_factory=dict,
        # Their order in chz differs between processes.
        munger=lambda _, teachers: dict(sorted(teachers.items())),
        doc="several teachers, instead of teacher: teachers.NAME.model=... and "
        "teachers.NAME.weight=...; the `teacher` field of each prompt names the one that scores it",
    )

    @chz.validate
    def _in_range(self) -> None:
        self.data.check(self.env)
        self.require_work_for_all(
            self.data.batch_size * self.sampling.group_size,
            f"prompts_per_step={self.data.batch_size} x group_size={self.sampling.group_size}",
        )
        self.queue.check(self.data.batch_size)
        self._check_keep()
        self._check_env()
        self.objective.check_comparison(self.data.batch_size, self.sampling.group_size)
        self._check_reference()
        self.policy.check_place(self.cluster)
        self.rollout.size.check_place("rollout.workers", self.cluster)
        self.weights.check(self.policy, served=self.engine.kind != "embedded")
        if not self.only_keeps:
            self.policy.check_shared_gpus(self.cluster, self.learner.workers)
            self.cluster.check_sleep()

    def _check_reference(self) -> None:
        """Raise ConfigError if a reference model is missing or unused."""
        coefficient = self.objective.reference_kl_coef
        if coefficient > 0 and self.model.reference is None and not self.lora.trains_adapter:
            raise ConfigError(
                f"objective.reference_kl_coef={coefficient} needs a reference model; give "
                "reference=DIR, the student's own checkpoint for example, or train an adapter "
                "(lora.rank), whose base model is the reference"
            )
        asked = "reference" in self.env.queried_models
        if self.model.reference is not None and coefficient == 0 and not asked:
            raise ConfigError(
                f"model.reference={self.model.reference} changes nothing with reference_kl_coef=0; "
                "give a coefficient, or leave the reference out"
            )
        if self.model.reference is None and asked:
            raise ConfigError(
                f"model.reference= is missing: env={type(self.env).__name__} queries the run's "
                "reference model (games do with env.opponent=reference); give reference=DIR, the "
                "student's own checkpoint for example"
            )

    def _check_keep(self) -> None:
        if isinstance(self.keep, int) and self.keep < self.checkpoint.every:
            raise ConfigError(
                f"keep={self.keep} must be at least checkpoint.every={self.checkpoint.every}: "
                "after a failure, steps since the newest checkpoint are repeated"
            )
        if self.only_keeps and self.whole_steps:
            raise ConfigError(
                f"keep={self.keep} with rollout_only=True: every step is kept; leave keep out"
            )

    def _check_env(self) -> None:
        """Raise ConfigError for settings that the environment does not use."""
        self.env.check_group(self.sampling.group_size)
        check_read("eval.source", self.eval.source, self.env)

    def check_keep_best(self, *, judged: bool = True) -> None:
        """Check that evaluations measure `checkpoint.keep_best`.

        Args:
            judged: rewards are meaningful for at least one problem.

        Raises:
            ConfigError: evaluations do not measure this metric.
        """
        own = self.env.evaluation().metric_names
        names = {"eval/response_length", "eval/eos_share", "eval/turns"}
        names |= {f"eval/{name}" for name in own or ()}
        if judged:
            most = self.eval.samples
            names |= {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"}
            names.update(by_source(["eval/accuracy"], self.eval.source or self.data.source))
            names |= {f"eval/pass@{2**n}" for n in range(1, most.bit_length()) if 2**n <= most}
            names |= {f"eval/majority@{most}"} if most > 1 else set()
        if self.teacher_models():
            names |= {"eval/reverse_kl", "eval/reverse_kl_low", "eval/reverse_kl_high"}
        self.checkpoint.check_measured("eval/", names, own=own is None)

    def problems_title(self, prompts: str | None) -> str:
        """Environment, prompts and reward as `key=value` text."""
        title = f"env={type(self.env).__name__}"
        if self.env.reads_prompts:
            title += f" prompts={prompts}"
        return title + (f" reward={self.judge}" if self.env.judges else "")

    def row_readers(self) -> Mapping[str, tuple[RowReader, RowCheck]]:
        """Reader of rows, and check of a row's fields, for each setting that names rows."""
        checked = self.data.row_reader(self.env)
        examples = RowReader(), check_example
        return {"data.source": checked, "eval.source": checked, "sft.data": examples}

    @property
    def window(self) -> int:
        """Most groups in flight: leased, finished, or in weights that are not yet on engines."""
        return self.queue.window(self.data.batch_size)

    @property
    def steps_in_flight(self) -> int:
        """`window` in steps, rounded up."""
        return -(-self.window // self.data.batch_size)

    @property
    def pushes(self) -> bool:
        """True if the run has both engines and a learner, which pushes its weights to them."""
        return self.train_from is None and not self.only_keeps

    @property
    def adapter_versions(self) -> int:
        """Number of versions of an adapter that a server may hold.

        These are the versions of current samples, and the version that is being loaded.
        """
        return self.queue.max_staleness + 2

    @property
    def replayed_checkpoints(self) -> int:
        if not self.whole_steps:
            return 0
        # Replays of the oldest steps begin from a checkpoint before them.
        steps, rules = min(self.whole_steps, self.steps), self.checkpoint
        evaluated = steps // self.eval.every if rules.keep_best else 0
        return -(-steps // rules.every) + 1 + evaluated

    @property
    def teacher_rule(self) -> ShadowRule | None:
        return self.teacher.rule

    def replays_routing(self) -> bool:
        return bool(self.learner.routing_replay)

    def teacher_models(self) -> Mapping[str, TeacherConfig]:
        """Teachers by name; a single teacher has an empty name.

        For teacher=policy, the model is the student's checkpoint. rl has no teachers.
        """
        if self.teacher.model is None:
            return self.teachers
        return {
            "": TeacherConfig(
                model=self.model.path if self.teacher.moves else self.teacher.model,
                samples_from=self.teacher.samples_from,
                head=self.teacher.head,
            )
        }

    def teacher_sampled(self, vocab_size: int) -> TeacherSamples:
        """Groups that teachers sample, with tokens of a student vocabulary of `vocab_size`."""
        return TeacherSamples(
            warmup_groups=self.teacher.sft_steps * self.data.batch_size,
            share=self.teacher.sample_share,
            groups_per_step=self.data.batch_size,
            seed=self.seed,
            vocab_size=vocab_size,
        )

    def scored_by_teacher(self) -> GroupShare:
        """Policy-sampled groups that a teacher's engine scores, if there is one."""
        if self._scores_are_trained_on:
            return EVERY_GROUP
        return GroupShare(
            share=min(1.0, max(METERED_SHARE, METERED_GROUPS / self.data.batch_size)),
            groups_per_step=self.data.batch_size,
            seed=(self.seed, METERED_SEED),
        )

    @property
    def _scores_are_trained_on(self) -> bool:
        """True if the loss depends on the scores of the teacher's engine.

        With estimator=full the loss uses the learner's copy of the teacher, or, if the learner has
        only the head, the hidden states that the teacher's engine returns.
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
        """`name=value` of the setting that makes the loss read log q_T of sampled tokens; or ""."""
        for name in ("kl_clip", "baseline", "hint_bonus_coef", "loss"):
            value = getattr(self.objective, name)
            if is_own(value) if name in ("baseline", "loss") else value:
                return f"objective.{name}={value}" if self.teacher_models() else ""
        return ""

    def text_endpoints(self) -> Mapping[str, EndpointAddress]:
        """Endpoints that generate teacher samples, by teacher name."""
        return self.teacher.endpoints(self.teacher_models())

    @property
    def teachers_by_turns(self) -> Sequence[str]:
        """Names of the teachers whose engines take turns on the same GPUs."""
        return () if self.teacher.gpus == "own" else hosted(self.teacher_models())

    @property
    def policy_takes_turns(self) -> bool:
        """True if the policy's engines take turns with those of the teachers."""
        return self.teacher.gpus == "policy"

    def feedback_template(self) -> FeedbackTemplate | None:
        """Template of the prompts that teachers see; None to use the prompts of the rows."""
        return self.teacher.template(self.objective.correct_threshold)

    @property
    def most_replaced(self) -> int:
        """Largest number of groups of constant reward that a step skips."""
        replaces = self.objective.constant_groups == "replace"
        return MOST_REPLACED * self.data.batch_size if replaces else 0

    @property
    def scored_by_reference(self) -> bool:
        """True if reference engines score the rollouts. Otherwise see `base_is_reference`."""
        return self.model.reference is not None and self.objective.reference_kl_coef > 0

    @property
    def base_is_reference(self) -> bool:
        """True if the learner's model without its adapter is the reference policy."""
        referred = self.model.reference is None and self.objective.reference_kl_coef > 0
        return referred and not self.only_keeps

    @property
    def copied_teachers(self) -> Mapping[str, str]:
        """Checkpoints of the teachers that the learner holds whole, by name."""
        if not self._compares_all or self.teacher.moves:
            return {}
        return {n: each.model for n, each in self.teacher_models().items() if each.head is None}

    @property
    def teacher_heads(self) -> Mapping[str, str]:
        """Checkpoints of which the learner holds only the head, by name of the teacher.

        The teacher's engines return the hidden states (`distill.states`).
        """
        if not self._compares_all or self.teacher.moves:
            return {}
        return {n: each.head for n, each in self.teacher_models().items() if each.head is not None}

    def frozen_in_learner(self) -> int | None:
        if not self.copied_teachers and not self.teacher_heads:
            return 0
        from learner.memory import frozen_bytes, head_bytes  # imports torch

        dtype = self.engine.dtype_on(self.cluster.device)
        copies = frozen_bytes(self.copied_teachers.values(), dtype)
        heads = sum(head_bytes(path, dtype) for path in self.teacher_heads.values())
        # Workers of a replica share the copies, but each worker holds every head.
        return None if copies is None else copies + heads * self.learner.shards

    @property
    def learner_is_teacher(self) -> bool:
        """True if the learner's own model is the teacher of estimator=full."""
        return self._compares_all and self.teacher.moves

    @property
    def _compares_all(self) -> bool:
        return self.objective.estimator == "full" and not self.only_keeps

    def policy_learner(
        self, resume_from: Checkpoint | None, stops: StopTokens, longest_rows: int = 0
    ) -> LearnerConfig:
        """Settings of the student's learner, which starts from the model or from a checkpoint."""
        made = self.learner_config(
            resume_from=resume_from,
            updates_per_step=self.objective.num_substeps,
            stops=stops,
        )
        return chz.replace(made, shadow=self.teacher_rule, longest_rows=longest_rows)

    @property
    def engines_sleep(self) -> bool:
        """True if policy engines release their memory while the learner computes."""
        return self.cluster.colocate == "sleep" and not self.only_keeps

    @property
    def learner_takes_turns(self) -> bool:
        """True if the learner takes turns with the engines of policy and teachers on its GPUs."""
        return self.engines_sleep and self.policy_takes_turns

    @property
    def shares_gpus(self) -> bool:
        """`PolicyClusterSettings.shares_gpus`; False with rollout_only, which has no learner."""
        return self.cluster.shares_gpus and not self.only_keeps

    @property
    def pushes_overlap(self) -> bool:
        """True if a push by copy can overlap the learner's next step.

        With max_staleness=0, that step has no groups before the push has ended.
        """
        return self.queue.max_staleness > 0 and not self.engines_sleep


@chz.chz
class RlConfig(RolloutConfig):
    """recipe=rl: reinforcement learning. The student samples, a reward function judges (GRPO)."""

    recipe: ClassVar[str] = "rl"
    summary: ClassVar[str] = "reinforcement learning (GRPO): student samples, a reward judges"
    stage: ClassVar[Stage] = "rl"
    hidden: ClassVar[frozenset[str]] = frozenset({"teacher", "teachers"})

    objective: RlObjective = section_field(RlObjective)
