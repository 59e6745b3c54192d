"""Orders of training: the problem or row at each position of a run's endless sequence.

Orders are pure functions of sizes, weights and seed, so the state of a resumed run is one integer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from distill.errors import ConfigError

# Last word of the seed, which distinguishes the order of sources from the order of a source's rows.
_SOURCES = 1
# Positions of a mixed order that are computed together, in whole blocks, because creating a random
# generator takes 20 us.
_STRETCH = 256


class PromptStream:
    """Endless order of one source: position -> index, with a new seeded shuffle in every epoch.

    Args:
        source: index of the source among several sources with the same seed.
    """

    def __init__(self, num_prompts: int, seed: int, source: int = 0) -> None:
        if num_prompts < 1:
            raise ConfigError("the data has no prompts to train on", field="num_prompts")
        self._num_prompts = num_prompts
        self._seed, self._source = seed, source
        self._epoch = -1
        self._order_P: Sequence[int] = ()

    def index(self, position: int) -> int:
        """Index of the prompt at `position`, which is counted from 0 over all epochs."""
        epoch, offset = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch, self._source])
            self._order_P = rng.permutation(self._num_prompts).tolist()
            self._epoch = epoch
        return self._order_P[offset]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPart:
    """Rows of one source among several that are mixed.

    Attributes:
        name: name of the source; empty if there is only one source.
        size: number of rows (or other items) of the source.
        weight: number of positions of the source in each block of `sum of weights` positions.
    """

    name: str = ""
    size: int
    weight: int = 1


class MixedStream:
    """Endless order of several sources: position -> source, and index in the concatenated rows.

    Each block of `sum of weights` positions has each source `weight` times, in an order that is
    shuffled per block. The rows of each source are in the order of its `PromptStream`, independent
    of the other sources.
    """

    def __init__(self, parts: Sequence[MixedPart], seed: int) -> None:
        self._seed = seed
        self._weights = [part.weight for part in parts]
        self._offsets = [0, *accumulate(part.size for part in parts)]
        self._streams = [PromptStream(part.size, seed, i) for i, part in enumerate(parts)]
        self._block_size = sum(self._weights)
        self._blocks = max(1, _STRETCH // self._block_size)
        self._stretch = -1
        self._sources: Sequence[int] = ()
        self._ranks: Sequence[int] = ()

    def source(self, position: int) -> int:
        """Index of the source at `position`."""
        return self._place(position)[0]

    def index(self, position: int) -> int:
        """Index of the row at `position` in the concatenation of all sources' rows."""
        source, row = self._place(position)
        return self._offsets[source] + self._streams[source].index(row)

    def _place(self, position: int) -> tuple[int, int]:
        """Source at `position`, and the number of its earlier positions."""
        if len(self._streams) == 1:
            return 0, position
        stretch, offset = divmod(position, self._blocks * self._block_size)
        if stretch != self._stretch:
            self._deal(stretch)
        source = self._sources[offset]
        return source, stretch * self._blocks * self._weights[source] + self._ranks[offset]

    def _deal(self, stretch: int) -> None:
        rng = np.random.default_rng([self._seed, stretch, 0, _SOURCES])
        block = np.repeat(np.arange(len(self._weights)), self._weights)
        self._sources = rng.permuted(np.tile(block, (self._blocks, 1)), axis=1).ravel().tolist()
        seen = [0] * len(self._weights)
        ranks = []
        for source in self._sources:
            ranks.append(seen[source])
            seen[source] += 1
        self._ranks = ranks
        self._stretch = stretch


def part_of(parts: Sequence[MixedPart], index: int) -> tuple[int, int]:
    """Find row `index` of the concatenated parts: the index of its part, and its index there."""
    ends = list(accumulate(part.size for part in parts))
    number = bisect_right(ends, index)
    return number, index - (ends[number] - parts[number].size)


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Distribute `total` in proportion to `sizes`, by largest remainders.

    `total` is at most the sum of the sizes, so no share exceeds its size.
    """
    if not total:
        return [0] * len(sizes)
    whole = sum(sizes)
    counts = [size * total // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(sizes[i] * total % whole))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
