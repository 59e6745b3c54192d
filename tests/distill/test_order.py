"""The order of training depends on sizes, weights and seed, with each source's share."""

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
    """Slow reference: walk from the start, and count the occurrences of each source."""
    stream = MixedStream(parts, seed)
    alone = [PromptStream(part.size, seed, number) for number, part in enumerate(parts)]
    seen = [0] * len(parts)
    for position in range(60):
        source, row = part_of(parts, stream.index(position))
        assert source == stream.source(position)
        assert row == alone[source].index(seen[source])
        seen[source] += 1


@given(parts=PARTS, seed=SEEDS, positions=st.lists(st.integers(0, 10**9), min_size=1, max_size=9))
def test_indices_do_not_depend_on_earlier_calls(
    parts: list[MixedPart], seed: int, positions: list[int]
) -> None:
    """Workers ask out of order, and a resumed run begins midway."""
    used = MixedStream(parts, seed)
    for position in positions:
        assert used.index(position) == MixedStream(parts, seed).index(position)
        assert 0 <= used.index(position) < sum(part.size for part in parts)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5), share=st.floats(0, 1))
def test_things_are_dealt_out_by_size(sizes: list[int], share: float) -> None:
    total = int(share * sum(sizes))
    counts = shares(sizes, total)
    assert sum(counts) == total
    for size, count in zip(sizes, counts, strict=True):
        assert 0 <= count <= size
        assert abs(count - (size * total / sum(sizes) if total else 0)) < 1


def test_another_seed_or_epoch_is_another_order() -> None:
    for of in (lambda seed: PromptStream(30, seed).index, lambda seed: mixed(seed).source):
        assert [of(7)(i) for i in range(60)] != [of(8)(i) for i in range(60)]
    epochs = PromptStream(30, 7)
    assert [epochs.index(i) for i in range(30)] != [epochs.index(i) for i in range(30, 60)]


def mixed(seed: int) -> MixedStream:
    return MixedStream([MixedPart(size=4, weight=3), MixedPart(size=9, weight=2)], seed)
