"""Settings of the teachers of recipe=opd: their models, their prompts, and their samples."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import chz

from actors.rollout.text_endpoint import EndpointAddress
from cluster.config.early_checks import OWN, model_field
from distill.errors import ConfigError
from distill.settings import ESSENTIAL, MAY_CHANGE, Section
from learner.config import ShadowRule


def check_stands_still(teacher: str) -> None:
    """Raises ConfigError for teacher=policy in a command that trains no student."""
    if teacher == OWN:
        raise ConfigError(
            f"teacher={OWN} is the student of a training run, as it moves, and nothing is trained "
            "here; give the student's checkpoint, as which such a teacher begins (a directory of "
            f"that name is ./{OWN})"
        )


@chz.chz
class TeacherConfig:
    """One of several teachers."""

    model: str = model_field(doc="checkpoint, or http://host:port of a running SGLang server")
    weight: float = chz.field(default=1.0, doc="factor of kl_coef for this teacher")
    samples_url: str | None = chz.field(
        default=None, doc="teacher_samples_url for the prompts of this teacher"
    )
    samples_name: str | None = chz.field(default=None, doc="teacher_samples_name for this teacher")


@chz.chz
class TeacherSettings:
    """Teachers whose distributions the student learns."""

    section: ClassVar[Section] = Section.MODEL

    teacher: str | None = model_field(
        default=None,
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); it shares the student's tokenizer. policy: the student itself "
        "as it trains, with more context than the sampler had (teacher_feedback, or teacher_prompt "
        "of rows)",
        metadata=ESSENTIAL,
    )
    teacher_lag: int = chz.field(
        default=0,
        doc="teacher=policy: steps between two copies of the student's weights to the teacher, "
        "which is 0 to teacher_lag - 1 steps older, on engines of its own; 0: the live student",
    )
    teacher_ema: float | None = chz.field(
        default=None,
        doc="teacher=policy: the teacher is a moving average of the student's weights, on engines "
        "of its own, and keeps this share of its weights at each step (for example 0.99)",
    )
    teacher_feedback: str | None = chz.field(
        default=None,
        doc="template of the text that the teacher sees in place of the prompt, filled in for each "
        "trajectory: {prompt} and any of {answer}, {response}, {reward}, {outcome} (right or "
        "wrong, by right_from) and {feedback} (the environment's words). In a chat it replaces the "
        "user's last message",
    )
    teachers: Mapping[str, TeacherConfig] = chz.field(
        default_factory=dict,
        doc="several teachers, instead of teacher: teachers.NAME.model=... and "
        "teachers.NAME.weight=...; the `teacher` field of each prompt names the one that scores it",
    )

    @chz.validate
    def _teachers_in_range(self) -> None:
        if (self.teacher is None) != bool(self.teachers):
            raise ConfigError(
                f"teacher={self.teacher} with {len(self.teachers)} teachers.NAME: give teacher=DIR "
                "for one, or teachers.NAME.model=DIR for several"
            )
        self._check_movement()
        for name, teacher in self.teachers.items():
            if teacher.model == OWN:
                raise ConfigError(
                    f"teachers.{name}.model={OWN}: a teacher that moves is the only one; use "
                    f"teacher={OWN}, or give a checkpoint"
                )
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # it names actors and log files
                raise ConfigError(f"teachers.{name}: a name has letters, digits, _ and - only")
            if not 0 < teacher.weight < float("inf"):
                raise ConfigError(
                    f"teachers.{name}.weight={teacher.weight} must be above 0, and finite"
                )

    def _check_movement(self) -> None:
        for name, default in (("teacher_lag", 0), ("teacher_ema", None)):
            value = getattr(self, name)
            if value != default and self.teacher != OWN:
                raise ConfigError(
                    f"{name}={value} with teacher={self.teacher}: weights that are not the "
                    f"student's do not follow it; use teacher={OWN}, or leave {name} out"
                )
        lag, ema = self.teacher_lag, self.teacher_ema
        if lag < 0 or lag == 1:
            raise ConfigError(
                f"teacher_lag={lag} must be at least 2; 0, the default, is the live student, which "
                "a teacher that is renewed at every step would be, too"
            )
        if ema is not None and not 0 < ema < 1:
            raise ConfigError(
                f"teacher_ema={ema} must lie between 0 and 1: at 0 it is the live student (leave "
                "it out), at 1 the student's first checkpoint (name that as the teacher)"
            )
        if lag and ema is not None:
            raise ConfigError(
                f"teacher_lag={lag} with teacher_ema={ema}: a teacher follows in one way; leave "
                "one of them out"
            )

    @property
    def teacher_moves(self) -> bool:
        return self.teacher == OWN

    @property
    def teacher_rule(self) -> ShadowRule | None:
        """Update rule of an EMA or lagged teacher; None for the live student or a fixed teacher."""
        if not self.teacher_lag and self.teacher_ema is None:
            return None
        return ShadowRule(every=self.teacher_lag, ema=self.teacher_ema)


@chz.chz
class TeacherSampleSettings:
    """Groups that the teacher samples instead of the student."""

    section: ClassVar[Section] = Section.SAMPLING

    warmup: int = chz.field(
        default=0,
        doc="steps at the start of the run in which the teacher samples the responses, and the "
        "student learns them by cross-entropy (SFT); for a student whose own samples teach little. "
        "The warm-up of the learning rate is warmup_steps",
    )
    teacher_samples: float = chz.field(
        default=0.0,
        doc="share of groups that the teacher samples in all later steps, learnt by cross-entropy "
        "too: 1 - lambda of GKD, whose lambda is the student's share; 0: on-policy",
    )

    teacher_samples_url: str | None = chz.field(
        default=None,
        doc="OpenAI-compatible endpoint that samples in place of the teacher: http://host:port/v1 "
        "receives chats, .../v1/completions continues plain prompts (its key in "
        "ISOTHERM_ENDPOINT_API_KEY). It returns text, and need not share the tokenizer; teacher= "
        "scores the student's samples",
        metadata=MAY_CHANGE,
    )
    teacher_samples_name: str | None = chz.field(
        default=None, doc="name of the model at teacher_samples_url"
    )

    def endpoints(self, teachers: Mapping[str, TeacherConfig]) -> dict[str, EndpointAddress]:
        """Endpoints that generate teacher samples, by teacher name.

        Raises:
            ConfigError: an endpoint lacks its address or its model name, has an invalid address, or
                would never be used.
        """
        for name in ("teacher_samples_url", "teacher_samples_name"):
            if any(teachers) and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)} beside teachers.NAME: whose it is must be said; "
                    f"give teachers.{min(teachers)}.{name.removeprefix('teacher_')}, say"
                )
        found: dict[str, EndpointAddress] = {}
        for name, teacher in teachers.items():
            url, model = teacher.samples_url, teacher.samples_name
            prefix = f"teachers.{name}." if name else "teacher_"
            if (url is None) != (model is None):
                raise ConfigError(
                    f"{prefix}samples_url={url} with {prefix}samples_name={model}: an endpoint has "
                    "an address, and a model has a name there; give both, or neither"
                )
            if url is None or model is None:
                continue
            if not self.warmup and not self.teacher_samples:
                raise ConfigError(
                    f"{prefix}samples_url={url} changes nothing: no group is the teacher's to "
                    "sample; give warmup= or teacher_samples=, or leave it out"
                )
            found[name] = EndpointAddress(
                url=url,
                name=model,
                url_setting=f"{prefix}samples_url",
                name_setting=f"{prefix}samples_name",
            )
        return found

    def check_teacher_samples(self, steps: int, rollouts: str | None) -> None:
        """Raises ConfigError if warmup or teacher_samples is out of range, or has no effect.

        Args:
            steps: optimizer steps of the run.
            rollouts: the run's setting of this name.
        """
        if not 0 <= self.warmup <= steps:
            raise ConfigError(
                f"warmup={self.warmup} must be in [0, steps={steps}]: steps at the run's start in "
                "which the teacher samples; raise steps, or lower it (the learning rate's is "
                "warmup_steps)"
            )
        if not 0 <= self.teacher_samples <= 1:
            raise ConfigError(
                f"teacher_samples={self.teacher_samples} must be in [0, 1]: the share of groups "
                "that the teacher samples"
            )
        if self.warmup and self.teacher_samples == 1:
            raise ConfigError(
                f"warmup={self.warmup} changes nothing with teacher_samples=1, by which the "
                "teacher samples every group; leave one of them out"
            )
        if self.teacher_samples and self.warmup == steps:
            raise ConfigError(
                f"teacher_samples={self.teacher_samples} changes nothing with warmup=steps="
                f"{steps}: no step follows; lower warmup, or leave it out"
            )
        for name in ("warmup", "teacher_samples"):
            if rollouts is not None and getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} changes nothing with rollouts={rollouts}: the "
                    "groups are there, and say who sampled them; leave it out"
                )
