"""Settings of the teachers of recipe=opd: their models, their prompts, and their samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import chz

from actors.rollout.text_endpoint import EndpointAddress
from actors.sglang.address import is_url
from cluster.config.common import ServerSettings
from cluster.config.early_checks import HEAD, OWN, model_field
from cluster.config.pools import EnginePoolSettings
from distill.data.feedback import FeedbackTemplate
from distill.errors import ConfigError
from distill.rules import above, at_least, at_most, below, needs, never, not_with, setting
from distill.settings import ESSENTIAL, MAY_CHANGE, Section, may_change_but
from learner.config import ShadowRule

TeacherGpus = Literal["own", "shared", "policy"]

_NOT_KEPT = not_with(
    "train_from", why="the kept groups were already sampled, by the student or the teacher"
)
_NOT_ALONE = not_with(
    "rollout_only", why="the student's weights never change, so the teacher's would not either"
)


def teacher_setting(name: str) -> str:
    """Setting of a teacher. The name of a single teacher is empty."""
    return f"teachers.{name}" if name else "teacher"


@chz.chz
class LocalTeacherSettings(ServerSettings):
    """The teacher of a command, which trains no student."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "teacher."
    main: ClassVar[str] = "model"

    model: str | None = model_field(default=None, doc="teacher checkpoint", metadata=ESSENTIAL)

    @chz.validate
    def _model_stands_still(self) -> None:
        if self.model == OWN:
            raise ConfigError(
                f"teacher={OWN} follows the student of a training run, but this command does not "
                "train; give the student's checkpoint, from which such a teacher starts (for a "
                f"directory of that name give ./{OWN})",
                field="teacher.model",
            )
        if self.server_flags and (self.model is None or is_url(self.model)):
            raise ConfigError(
                f"teacher.server_flags={self.server_flags} changes nothing with "
                f"teacher={self.model}, for which no server is started; leave it out"
            )

    def require_checkpoint(self, what: str) -> None:
        """Raise ConfigError for a running server: the command `what` does not check its scores."""
        if self.model is not None and is_url(self.model):
            raise ConfigError(
                f"teacher={self.model} must be a checkpoint here: {what} does not verify that a "
                "running server scores at T; cluster.calibrate does",
                field="teacher.model",
            )


@chz.chz
class TeacherConfig:
    """One of several teachers."""

    section: ClassVar[Section] = Section.MODEL

    model: str = model_field(doc="checkpoint, or http://host:port of a running SGLang server")
    weight: float = chz.field(default=1.0, doc="factor of kl_coef for this teacher")
    samples_from: str | None = chz.field(
        default=None, doc="teacher.samples_from for the prompts of this teacher"
    )
    head: str | None = model_field(default=None, doc="teacher.head of this teacher", metadata=HEAD)


def hosted(teachers: Mapping[str, TeacherConfig]) -> list[str]:
    """Names of the teachers whose servers the run starts, sorted."""
    return sorted(name for name, teacher in teachers.items() if not is_url(teacher.model))


@chz.chz
class TeacherSettings(EnginePoolSettings):
    """The teacher, whose distributions the student learns, and the groups that it samples."""

    section: ClassVar[Section] = Section.MODEL
    within: ClassVar[str] = "teacher."
    main: ClassVar[str] = "model"

    model: str | None = model_field(
        default=None,
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); it shares the student's tokenizer. policy: the student itself "
        "as it trains, with more context than the sampler had (teacher.feedback, or teacher_prompt "
        "of rows)",
        metadata=ESSENTIAL,
    )
    gpus: TeacherGpus = chz.field(
        default="own",
        doc="GPUs of the teachers' engines. own: separate GPUs for each teacher; shared: one "
        "set for several teachers, which take turns: all SGLang servers except one sleep, with "
        "their weights in main memory; policy: the GPUs of the policy's engines, in turns with "
        "these engines, and with colocate=sleep also with the learner",
        metadata=MAY_CHANGE,
    )
    lag: int = setting(
        at_least(0),
        never(
            1,
            "must be at least 2: a teacher that is updated at every step is the live student, "
            "as with 0",
        ),
        needs("teacher.model", OWN),
        not_with("teacher.ema", why="a teacher is either lagged or a moving average"),
        _NOT_ALONE,
        default=0,
        doc="teacher=policy: steps between two copies of the student's weights to the teacher, "
        "which is 0 to teacher.lag - 1 steps older, on engines of its own; 0: the live student",
    )
    ema: float | None = setting(
        above(0, "at 0 the teacher is the live student; leave it out"),
        below(1, "at 1 the teacher is the student's first checkpoint; give that as the teacher"),
        needs("teacher.model", OWN),
        _NOT_ALONE,
        default=None,
        doc="teacher=policy: the teacher is a moving average of the student's weights, on engines "
        "of its own, and keeps this share of its weights at each step (for example 0.99)",
    )
    feedback: str | None = setting(
        never(
            "{prompt}",
            "changes nothing: the teacher already receives the prompt; add text, for example "
            "{answer} or {feedback}, or leave it out",
        ),
        default=None,
        doc="template of the text that the teacher receives in place of the prompt, filled in "
        "for each trajectory: {prompt} and any of {answer}, {response}, {reward}, {outcome} "
        "(right or wrong, by correct_reward_threshold) and {feedback} (the environment's "
        "words). In a chat it replaces the user's last message",
    )
    sft_steps: int = setting(
        at_least(0),
        at_most("steps", "it counts steps at the start of the run"),
        not_with("teacher.sample_share", 1, why="with it the teacher samples every group"),
        _NOT_KEPT,
        default=0,
        doc="steps at the start of the run in which the teacher samples the responses, and the "
        "student learns them by cross-entropy (SFT); for a student whose own samples teach little",
    )
    sample_share: float = setting(
        at_least(0),
        at_most(1),
        _NOT_KEPT,
        default=0.0,
        doc="share of groups that the teacher samples in all later steps, also trained by "
        "cross-entropy: 1 - lambda of GKD; 0: on-policy",
    )

    samples_from: str | None = chz.field(
        default=None,
        doc="OpenAI-compatible endpoint that samples in place of the teacher, NAME@URL: the name "
        "of the model there, and http://host:port/v1, which receives chats, or .../v1/completions, "
        "which continues plain prompts (its key in ISOTHERM_ENDPOINT_API_KEY). It returns text, "
        "and need not share the tokenizer; teacher= scores the student's samples",
        metadata=may_change_but(lambda value: value and value.partition("@http")[0]),
    )

    head: str | None = model_field(
        default=None,
        doc="checkpoint with the teacher's head (lm_head, or the embedding it is tied to): "
        "teacher= itself, if it is a checkpoint. estimator=full then takes the teacher's "
        "distributions from its engines, which give a hidden state for each trained token, and "
        "the learner loads only this head, not the teacher. A running server without isotherm's "
        "plugin is started with --enable-return-hidden-states",
        metadata=HEAD,
    )

    @property
    def moves(self) -> bool:
        """True if the teacher is the student itself, as it trains (teacher=policy)."""
        return self.model == OWN

    @property
    def rule(self) -> ShadowRule | None:
        """Update rule of an EMA or lagged teacher; None for the live student or a fixed teacher."""
        if not self.lag and self.ema is None:
            return None
        return ShadowRule(every=self.lag, ema=self.ema)

    def endpoints(self, teachers: Mapping[str, TeacherConfig]) -> dict[str, EndpointAddress]:
        """Endpoints that generate teacher samples, by teacher name.

        Raises:
            ConfigError: an endpoint is not NAME@URL, has an invalid address, or would never be
                used.
        """
        if any(teachers) and self.samples_from is not None:
            raise ConfigError(
                f"teacher.samples_from={self.samples_from} with teachers.NAME does not name a "
                f"teacher; give for example teachers.{min(teachers)}.samples_from"
            )
        found: dict[str, EndpointAddress] = {}
        for name, teacher in teachers.items():
            if teacher.samples_from is None:
                continue
            setting = f"{teacher_setting(name)}.samples_from"
            found[name] = EndpointAddress.of(setting, teacher.samples_from)
            if not self.sft_steps and not self.sample_share:
                raise ConfigError(
                    f"{setting}={teacher.samples_from} changes nothing: the teacher samples no "
                    "groups; give teacher.sft_steps= or teacher.sample_share=, or leave it out"
                )
        return found

    def template(self, correct_threshold: float) -> FeedbackTemplate | None:
        """Template of the prompts that the teacher sees; None to use the prompts of the rows."""
        if self.feedback is None:
            return None
        return FeedbackTemplate(text=self.feedback, correct_reward_threshold=correct_threshold)
