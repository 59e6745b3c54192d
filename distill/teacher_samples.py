"""Groups that the teacher samples in the student's place: a warm-up, and a share of the rest.

    group id   0 ... warmup_groups | the blocks of the following steps
    sampled    all by the teacher  | of each block a share, chosen by the seed

A pure function of the id, so that every attempt at a group, on any worker and after any resume, has
the same sampler. What is trained of such groups:
`distill.objective.objectives.teacher_cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill.group_share import GroupShare


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSamples:
    """The groups that the teacher samples.

    Attributes:
        warmup_groups: all of the first so many.
        share: of each later block of `groups_per_step`, as near to it as whole groups add up to.
        seed: chooses them within a block; the order of the prompts' sources has no part in it.
        vocab_size: the student's, which no sample may leave.
    """

    warmup_groups: int
    share: float
    groups_per_step: int
    seed: int
    vocab_size: int

    def __contains__(self, group_id: int) -> bool:
        if group_id < self.warmup_groups:
            return True
        return group_id in GroupShare(
            share=self.share,
            groups_per_step=self.groups_per_step,
            seed=(self.seed,),
            first=self.warmup_groups,
        )


NO_TEACHER_SAMPLES = TeacherSamples(
    warmup_groups=0, share=0.0, groups_per_step=1, seed=0, vocab_size=0
)
