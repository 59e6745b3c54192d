"""A share of a run's groups, chosen by a seed within each step's block of groups.

    group id   0 ... groups_per_step - 1 | the next block | ...
    chosen     some of these             | others         | ...

The choice is a pure function of the id, so that every attempt at a group, on any worker and after
any resume, gives the same kind of group.

`TeacherSamples` are the groups that the teacher samples in the student's place: all of a warm-up,
and a share of the rest. What is trained of such groups:
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
        share: fraction of the groups, in [0, 1]; met over all blocks as closely as whole groups
            allow.
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
        if self.share in (0, 1):  # no choice, whose generator takes longer than all else here
            return block >= 0 and self.share == 1
        return block >= 0 and place in _chosen(block, self.groups_per_step, self.share, self.seed)


@lru_cache(maxsize=32)
def _chosen(block: int, size: int, share: float, seed: tuple[int, ...]) -> frozenset[int]:
    """Positions in a block that belong to the share; over all blocks their number adds up to it."""
    before, after = (floor(number * size * share + 1e-9) for number in (block, block + 1))
    order = np.random.default_rng((*seed, block)).permutation(size)
    return frozenset(order[: after - before].tolist())


EVERY_GROUP = GroupShare(share=1.0)


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
