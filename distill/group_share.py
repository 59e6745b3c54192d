"""A share of a run's groups: of each step's block as many as add up to it, chosen by a seed.

    group id   0 ... groups_per_step - 1 | the next block | ...
    chosen     some places of it         | others         | ...

A pure function of the id, so that every attempt at a group, on any worker and after any resume, is
the same kind of group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """Which groups are of a share.

    Attributes:
        share: in [0, 1]; over all blocks as near to it as whole groups add up to.
        groups_per_step: of a block.
        seed: chooses the places of each block; several numbers for a choice of its own.
        first: no earlier group is of it, and the blocks begin here.
    """

    share: float
    groups_per_step: int = 1
    seed: tuple[int, ...] = (0,)
    first: int = 0

    def __contains__(self, group_id: int) -> bool:
        block, place = divmod(group_id - self.first, self.groups_per_step)
        return block >= 0 and place in _chosen(block, self.groups_per_step, self.share, self.seed)


@lru_cache(maxsize=32)
def _chosen(block: int, size: int, share: float, seed: tuple[int, ...]) -> frozenset[int]:
    """The places of a block that are of the share; over all blocks they add up to it."""
    before, after = (floor(number * size * share + 1e-9) for number in (block, block + 1))
    order = np.random.default_rng((*seed, block)).permutation(size)
    return frozenset(order[: after - before].tolist())


EVERY_GROUP = GroupShare(share=1.0)
