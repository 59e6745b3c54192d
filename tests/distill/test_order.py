"""The order of training is a pure function of sizes, weights and seed, with each source's share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from distill.data.order import MixedPart, MixedStream, PromptStream, part_of, shares

PARTS = st.lists(
    st.builds(MixedPart, size=st.integers(1, 9), weight=st.integers(1, 7)), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**40)


@given(parts=PARTS, seed=SEEDS)
def test_every_block_has_every_source_as_often_as_its_weight(
    parts: list[MixedPart], seed: int
) -> None:
    stream, block = MixedStream(parts, seed), sum(part.weight for part in parts)
    for first in range(0, 5 * block, block):
        drawn = Counter(stream.source(position) for position in range(first, first + block))
        assert drawn == {number: part.weight for number, part in enumerate(parts)}


@given(parts=PARTS, seed=SEEDS)
def test_every_source_is_walked_as_if_it_were_alone(parts: list[MixedPart], seed: int) -> None:
    """The slow way: go from the start, and count how often each source came."""
    stream = MixedStream(parts, seed)
    alone = [PromptStream(part.size, seed, number) for number, part in enumerate(parts)]
    seen = [0] * len(parts)
    for position in range(60):
        source, row = part_of(parts, stream.index(position))
        assert source == stream.source(position)
        assert row == alone[source].index(seen[source])
        seen[source] += 1


@given(parts=PARTS, seed=SEEDS, positions=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_it_does_not_matter_what_was_asked_before(
    parts: list[MixedPart], seed: int, positions: list[int]
) -> None:
    """Workers ask out of order, and a resumed run begins in the middle."""
    used = MixedStream(parts, seed)
    for position in positions:
        assert used.index(position) == MixedStream(parts, seed).index(position)
        assert 0 <= used.index(position) < sum(part.size for part in parts)


@given(size=st.integers(1, 30), seed=SEEDS, weight=st.just(1))
def test_one_source_has_the_order_that_it_always_had(size: int, seed: int, weight: int) -> None:
    mixed, alone = MixedStream([MixedPart(size=size)], seed), PromptStream(size, seed)
    assert [mixed.index(i) for i in range(70)] == [alone.index(i) for i in range(70)]


def test_shares_over_many_groups() -> None:
    """3 : 1 of files of 4 and 100 rows: the small one comes round 75 times in 400 groups."""
    stream = MixedStream([MixedPart(size=4, weight=3), MixedPart(size=100, weight=1)], seed=7)
    rows = Counter(stream.index(group_id) for group_id in range(400))
    assert sum(count for row, count in rows.items() if row < 4) == 300
    assert {rows[row] for row in range(4)} == {75}
    assert {rows[row] for row in range(4, 104)} == {1}
    first = [stream.source(group_id) for group_id in range(400)]
    assert first != [MixedStream([MixedPart(size=1, weight=3), MixedPart(size=1)], 8).source(i)
                     for i in range(400)]  # fmt: skip


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5), share=st.floats(0, 1))
def test_things_are_dealt_out_by_size(sizes: list[int], share: float) -> None:
    total = int(share * sum(sizes))
    counts = shares(sizes, total)
    assert sum(counts) == total
    for size, count in zip(sizes, counts, strict=True):
        assert 0 <= count <= size
        assert abs(count - (size * total / sum(sizes) if total else 0)) < 1
