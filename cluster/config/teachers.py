"""Settings of the teachers of recipe=opd: who they are, and what they see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import chz

from distill.errors import ConfigError
from distill.settings import ESSENTIAL, Section

# The teacher that is the student itself, as it trains. A directory of that name is ./policy.
OWN = "policy"


@chz.chz
class TeacherConfig:
    """One of several teachers."""

    model: str = chz.field(doc="checkpoint, or http://host:port of a running SGLang server")
    weight: float = chz.field(default=1.0, doc="its kl_coef is multiplied by this")


@chz.chz
class TeacherSettings:
    """Whose distribution the student learns."""

    section: ClassVar[Section] = Section.MODEL

    teacher: str | None = chz.field(
        default=None,
        doc="teacher checkpoint, or http://host:port of a running SGLang server (its key in "
        "ISOTHERM_TEACHER_API_KEY); shares the student's tokenizer. policy: the student itself as "
        "it trains, which is shown more than it was (teacher_feedback, or teacher_prompt of rows)",
        metadata=ESSENTIAL,
    )
    teacher_feedback: str | None = chz.field(
        default=None,
        doc="what the teacher sees in place of the prompt, of each trajectory anew: a text with "
        "{prompt} and any of {answer}, {response}, {reward}, {outcome} (right or wrong, by "
        "right_from) and {feedback} (the environment's words). Of a chat it takes the place of "
        "what the user said last",
    )
    teachers: Mapping[str, TeacherConfig] = chz.field(
        default_factory=dict,
        doc="instead of teacher: several, teachers.NAME.model=... and teachers.NAME.weight=...; "
        "each prompt's `teacher` field names the one that scores it",
    )

    @chz.validate
    def _teachers_in_range(self) -> None:
        if (self.teacher is None) != bool(self.teachers):
            raise ConfigError(
                f"teacher={self.teacher} with {len(self.teachers)} teachers.NAME: give teacher=DIR "
                "for one, or teachers.NAME.model=DIR for several"
            )
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

    @property
    def teacher_moves(self) -> bool:
        return self.teacher == OWN
