"""Settings of recipe=opd: a run with teachers, and checks of the teachers against the run."""

from __future__ import annotations

import re
from typing import ClassVar

import chz

from actors.sglang.address import is_url
from actors.sglang.parallelism import check_pushed, parallelism
from cluster.config.common import Stage
from cluster.config.early_checks import OWN
from cluster.config.on_policy import RolloutConfig
from cluster.config.teachers import TeacherSettings, hosted, teacher_setting
from distill.errors import ConfigError
from distill.objective.settings import AUTO, OpdObjective
from distill.rewards.model_reward import REWARD_MODEL
from distill.settings import section_field

# Names by which environments query the models of a run that are not teachers.
_OTHER_MODELS = (OWN, "reference", REWARD_MODEL)


@chz.chz
class OpdConfig(RolloutConfig):
    """recipe=opd: on-policy distillation. The student samples, the teacher scores, both at T."""

    recipe: ClassVar[str] = "opd"
    summary: ClassVar[str] = "on-policy distillation: student samples, teacher scores"
    stage: ClassVar[Stage] = "opd"

    objective: OpdObjective = section_field(OpdObjective)

    @chz.validate
    def _opd_in_range(self) -> None:
        _check_teachers(self)
        self.text_endpoints()
        self.teacher.check_place(self.cluster)
        _check_turns(self)
        _check_use(self)


def _check_teachers(run: OpdConfig) -> None:
    """Raise ConfigError unless there is one teacher, or several with valid names and weights."""
    if (run.teacher.model is None) != bool(run.teachers):
        names = ", ".join(run.teachers)
        raise ConfigError(
            (
                f"teacher={run.teacher.model} and teachers.NAME ({names}) are both given: "
                if run.teachers
                else "no teacher is given: "
            )
            + "give teacher=DIR for one, or teachers.NAME.model=DIR for several",
            field="teacher.model",
        )
    for name, each in run.teachers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # it names actors and log files
            raise ConfigError(
                f"teachers.{name}: a name has letters, digits, _ and - only", field="teachers"
            )
        if name in _OTHER_MODELS:
            raise ConfigError(
                f"teachers.{name}: environments query another model of the run by this name; give "
                "the teacher another one",
                field="teachers",
            )
        if each.model == OWN:
            raise ConfigError(
                f"teachers.{name}.model={OWN}: a teacher that follows the student must be the only "
                f"teacher; use teacher={OWN}, or give a checkpoint"
            )
        if not 0 < each.weight < float("inf"):
            raise ConfigError(f"teachers.{name}.weight={each.weight} must be above 0, and finite")


def _check_turns(run: OpdConfig) -> None:
    """Raise ConfigError for engines that cannot take turns on GPUs (`teacher.gpus`)."""
    teacher, engine = run.teacher, run.engine
    if teacher.gpus == "own":
        return
    several = teacher.gpus == "shared"
    setting, why = "teacher.gpus", ""
    if teacher.moves or len(hosted(run.teacher_models())) < 1 + several:
        of = "several teachers" if several else "teachers"
        why = (
            f"is for {of} whose servers the run starts, from checkpoints of their own "
            f"({'teachers.NAME.model' if several else 'teacher'}=DIR); leave it out"
        )
    elif engine.kind == "embedded":
        why = "needs engine=sglang: the embedded engine keeps its memory"
    elif run.cluster.local:
        why = "with local=True: engines that take turns are processes; leave one of them out"
    elif teacher.size.largest > teacher.size.smallest:
        setting = "teacher.engines"
        why = (
            f"with teacher.engines={teacher.engines}: engines that share GPUs are placed "
            f"together, at the start; use teacher.engines={teacher.size.smallest}"
        )
    elif (nodes := parallelism(teacher.server_flags).nodes) > 1:
        setting = "teacher.server_flags"
        why = (
            f"with teacher.server_flags={teacher.server_flags}: engines take turns on the GPUs "
            f"of one node, not of {nodes}; leave --nnodes or teacher.gpus out"
        )
    elif teacher.gpus == "policy" and engine.on_weight_update == "in_place":
        setting = "engine.on_weight_update"
        why = (
            "with on_weight_update=in_place: sleeping engines discard their cache; use "
            "on_weight_update=continue"
        )
    if why:
        raise ConfigError(f"teacher.gpus={teacher.gpus} {why}", field=setting)
    if teacher.gpus == "policy":
        _check_policy_turns(run)
        if run.cluster.colocate != "no" and not run.only_keeps:
            _check_learner_turns(run)


def _check_policy_turns(run: OpdConfig) -> None:
    """Raise ConfigError if policy engines cannot take turns with the teachers' engines."""
    teacher, policy = run.teacher, run.policy
    setting, why = "", ""
    gpus, needed = (parallelism(each.server_flags).gpus for each in (policy, teacher))
    if policy.size != teacher.size:
        setting = "teacher.engines"
        why = (
            f"with policy.engines={policy.engines} teacher.engines={teacher.engines}: each "
            "policy engine shares its GPUs with one teacher engine; use "
            f"policy.engines={teacher.size.smallest}"
        )
    elif gpus != needed:
        setting = "policy.server_flags"
        why = (
            f"with servers of {gpus} GPUs for the policy and {needed} for a teacher: they are "
            f"on the same GPUs; use --tp-size {needed} in policy.server_flags, too"
        )
    elif run.weights.transport == "adapter":
        setting = "weights.transport"
        why = "with weights=adapter: sleeping engines discard their adapters; use weights=auto"
    if why:
        raise ConfigError(f"teacher.gpus=policy {why}", field=setting)


def _check_learner_turns(run: OpdConfig) -> None:
    """Raise ConfigError if the learner cannot take turns with the engines on its GPUs."""
    cluster, policy, workers = run.cluster, run.policy, run.learner.workers
    setting, why = "cluster.colocate", ""
    engines, rest = divmod(workers, gpus := parallelism(policy.server_flags).gpus)
    if cluster.colocate == "share":
        why = "engines that take turns use whole GPUs; use colocate=sleep, or leave it out"
    elif cluster.device == "cuda" and cluster.gpus_per_actor != 0.5:
        setting = "cluster.gpus_per_actor"
        why = (
            f"gpus_per_actor={cluster.gpus_per_actor:g}: learner and engines take turns on "
            "whole GPUs; use gpus_per_actor=0.5"
        )
    elif rest or policy.size.smallest != engines:
        setting = "policy.engines"
        remedy = f"policy.engines={engines} teacher.engines={engines}"
        why = (
            f"learner.workers={workers} policy.engines={policy.engines}: each engine is on the "
            f"GPUs of {gpus} workers; use {f'a multiple of {gpus} workers' if rest else remedy}"
        )
    if why:
        how = f"teacher.gpus=policy colocate={cluster.colocate}"
        raise ConfigError(f"{how}: {why}", field=setting)


def _check_use(run: OpdConfig) -> None:
    """Raise ConfigError for settings of teachers that conflict with the objective or the run."""
    teacher, objective = run.teacher, run.objective
    template, threshold = run.feedback_template(), objective.correct_reward_threshold
    tells = template is not None and "outcome" in template.placeholders
    if threshold is not None and not (tells or objective.hint_bonus_coef):
        raise ConfigError(
            f"objective.correct_reward_threshold={threshold} changes nothing without {{outcome}} "
            "in teacher.feedback, or hint_bonus_coef; leave it out"
        )
    if teacher.sample_share and teacher.sft_steps == run.steps:
        raise ConfigError(
            f"teacher.sample_share={teacher.sample_share} changes nothing with "
            f"teacher.sft_steps=steps={run.steps}: no step follows; lower teacher.sft_steps, or "
            "leave it out"
        )
    if teacher.moves:
        _check_own(teacher)
    elif teacher.server_flags and not hosted(run.teacher_models()):
        raise ConfigError(
            f"teacher.server_flags={teacher.server_flags} changes nothing: every teacher is a "
            "running server; leave it out"
        )
    _check_heads(run)


def _check_own(teacher: TeacherSettings) -> None:
    """Raise ConfigError for settings that conflict with teacher=policy."""
    for name in ("sft_steps", "sample_share"):
        if (value := getattr(teacher, name)) and teacher.samples_from is None:
            raise ConfigError(
                f"teacher.{name}={value} with teacher={OWN}: the student would train on its own "
                "samples; leave one of them out, or let another model write the samples "
                "(teacher.samples_from=)"
            )
    if teacher.rule is not None:
        check_pushed("teacher.server_flags", teacher.server_flags)
        return
    for name in ("engines", "server_flags"):
        value = getattr(teacher, name)
        if value != chz.chz_fields(teacher)[name]._default:
            raise ConfigError(
                f"teacher.{name}={value} changes nothing: with teacher={OWN} the policy engines "
                "score; leave it out, and use policy.engines"
            )


def _check_heads(run: OpdConfig) -> None:
    """Raise ConfigError if a teacher's head is missing or unused."""
    models, estimator = run.teacher_models(), run.objective.estimator
    for name, each in models.items():
        setting = teacher_setting(name)
        if estimator == "full" and is_url(each.model) and each.head is None:
            raise ConfigError(
                f"estimator=full with {setting}={each.model}, a running server, needs its head in "
                f"the learner; give {setting}.head=DIR, the checkpoint that it serves, or use "
                "estimator=top_k",
                field=f"{setting}.head",
            )
    if run.teacher.head is not None and (run.teacher.model is None or run.teacher.moves):
        raise ConfigError(
            f"teacher.head={run.teacher.head} is for a single teacher with its own weights; give "
            "teachers.NAME.head for several teachers, and no head with teacher=policy"
        )
    heads = [each.head for each in models.values() if each.head is not None]
    if heads and (estimator not in ("full", AUTO) or not run.pushes):
        raise ConfigError(
            f"teacher.head={heads[0]} is for estimator=full and groups with hidden states from the "
            "teacher's engines: neither rollout_only=True nor train_from= has them; leave one of "
            "them out"
        )
