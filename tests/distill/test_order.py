"""The order of training depends on sizes, weights and seed, with each source's share."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from distill.data.held_out import choose_held_out, hold_out
from distill.data.order import MixedPart, MixedStream, PromptStream, part_of, shares
from tests.samples import training_row

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


_KEYS = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=30), min_size=1, max_size=3)


@given(_KEYS, st.integers(0, 10), st.integers(0, 99))
def test_no_prompt_is_on_both_sides(keys: list[list[int]], count: int, seed: int) -> None:
    sources = range(len(keys))
    chosen = choose_held_out(keys, [count] * len(keys), [[seed, i] for i in sources])
    held_out = {keys[i][p] for i in sources for p in chosen[i]}
    trained = {key for i in sources for p, key in enumerate(keys[i]) if p not in chosen[i]}
    assert not held_out & trained
    assert all(len(apart) <= count for apart in chosen)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 99))
def test_of_different_prompts_just_as_many_are_held_out(size: int, count: int, seed: int) -> None:
    [chosen] = choose_held_out([range(size)], [count], [[seed]])
    assert len(chosen) == min(count, size)
    assert [chosen] == choose_held_out([range(size)], [count], [[seed]])


def test_rows_of_one_prompt_in_two_sources_are_trained() -> None:
    shared, first, second = ([training_row(3, 2, seed=seed)] for seed in range(3))
    split = hold_out([[shared, first], [shared, second]], 0.5, seed=0)
    assert split == [([shared], [first]), ([shared], [second])]
    assert hold_out([[shared, first], [shared, second]], 2, seed=0) == split


def test_rows_of_a_conversation_are_known_by_its_first_prompt_in_any_order() -> None:
    first, second = training_row(3, 2), training_row(9, 2)
    other = training_row(4, 2, seed=1)
    split = hold_out([[[second, first], [first], [other]]], 1, seed=0)
    assert split == [([[second, first], [first]], [[other]])]
