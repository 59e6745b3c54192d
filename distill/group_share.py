"""A share of a run's groups, chosen by a seed within each step's block of groups.

    group id   0 ... groups_per_step - 1 | the next block | ...
    chosen     some of these             | others         | ...

The choice is a pure function of the id, so that every attempt at a group, on any worker and after
any resume, gives the same kind of group.
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
        return block >= 0 and place in _chosen(block, self.groups_per_step, self.share, self.seed)


@lru_cache(maxsize=32)
def _chosen(block: int, size: int, share: float, seed: tuple[int, ...]) -> frozenset[int]:
    """Positions in a block that belong to the share; over all blocks their number adds up to it."""
    before, after = (floor(number * size * share + 1e-9) for number in (block, block + 1))
    order = np.random.default_rng((*seed, block)).permutation(size)
    return frozenset(order[: after - before].tolist())


EVERY_GROUP = GroupShare(share=1.0)
