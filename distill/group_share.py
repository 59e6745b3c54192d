"""A share of a run's groups, chosen by a seed within each step's block of groups.

    group id   0 ... groups_per_step - 1 | the next block | ...
    chosen     some of these             | others         | ...

The choice is a pure function of the id, so that every attempt at a group, on any worker and after
any resume, produces the same kind of group.

`TeacherSamples` are the groups that the teacher samples instead of the student: all groups of a
warm-up, and a share of the others. Their objective is
`distill.objective.objectives.teacher_cross_entropy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """Membership test for a share of the groups: `group_id in share`.

    Attributes:
        share: fraction of the groups, in [0, 1]; matched over all blocks as closely as whole
            groups allow.
        groups_per_step: number of groups in a block.
        seed: seeds the choice within each block; several numbers give an independent choice.
        first: id at which the blocks begin; no earlier group belongs to the share.
    """

    share: float
    groups_per_step: int = 1
    seed: tuple[int, ...] = (0,)
    first: int = 0

    def __contains__(self, group_id: int) -> bool:
        block, place = divmod(group_id - self.first, self.groups_per_step)
        if self.share in (0, 1):  # without the generator, the slowest part of this test
            return block >= 0 and self.share == 1
        return block >= 0 and place in _chosen(block, self.groups_per_step, self.share, self.seed)


@lru_cache(maxsize=32)
def _chosen(block: int, size: int, share: float, seed: tuple[int, ...]) -> frozenset[int]:
    """Positions in a block that belong to the share; their number over all blocks matches it."""
    before, after = (floor(number * size * share + 1e-9) for number in (block, block + 1))
    order = np.random.default_rng((*seed, block)).permutation(size)
    return frozenset(order[: after - before].tolist())


EVERY_GROUP = GroupShare(share=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSamples:
    """The groups that the teacher samples.

    Attributes:
        warmup_groups: number of first groups that the teacher samples without exception.
        share: fraction of the later groups; matched as closely as whole groups allow.
        groups_per_step: number of groups in a block.
        seed: seeds the choice within a block, independently of the order of the prompts' sources.
        vocab_size: size of the student's vocabulary, to which samples are limited.
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
