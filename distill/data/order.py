"""Orders of training: which problem or row stands at each place of a run's endless sequence.

All are pure functions of sizes, weights and seed, so the cursor of a resumed run is one integer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from distill.errors import ConfigError

# Word of the seed that tells the order of sources from that of a source's rows.
_SOURCES = 1
# Places of a mixed order that are dealt at a time, in whole blocks: a generator costs 20 us.
_STRETCH = 256


class PromptStream:
    """Endless order of one source: position -> index, a fresh seeded shuffle every epoch.

    Args:
        source: which of several sources with one seed it is.
    """

    def __init__(self, num_prompts: int, seed: int, source: int = 0) -> None:
        if num_prompts < 1:
            raise ConfigError("there are no prompts to train on", field="num_prompts")
        self._num_prompts = num_prompts
        self._seed, self._source = seed, source
        self._epoch = -1
        self._order_P: Sequence[int] = ()

    def index(self, position: int) -> int:
        """Index of the prompt at `position` (0-based; epochs follow one another)."""
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
        name: the source's; empty where it is the only one.
        size: number of its rows, or of what else is drawn.
        weight: of `sum of weights` places in a row it has so many.
    """

    name: str = ""
    size: int
    weight: int = 1


class MixedStream:
    """Endless order of several sources: position -> source, and index of all rows in a row.

    A block of `sum of weights` places has each source as often as its weight says, in an order of
    its own; the rows of each source follow as in `PromptStream`, whatever the others do.
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
        """Number of the source at `position`."""
        return self._place(position)[0]

    def index(self, position: int) -> int:
        """Index of what is at `position`, where the sources' rows are one after another."""
        source, row = self._place(position)
        return self._offsets[source] + self._streams[source].index(row)

    def _place(self, position: int) -> tuple[int, int]:
        """The source at `position`, and how often it was there before."""
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
    """The part that holds the `index`-th of all rows, and its index there."""
    ends = list(accumulate(part.size for part in parts))
    number = bisect_right(ends, index)
    return number, index - (ends[number] - parts[number].size)


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """`total` things dealt out in proportion to `sizes`, by largest remainders; at most the size.

    `total` is at most the sum of the sizes.
    """
    if not total:
        return [0] * len(sizes)
    whole = sum(sizes)
    counts = [size * total // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(sizes[i] * total % whole))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
