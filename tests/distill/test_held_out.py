"""Held-out problems share no prompt with trained ones."""

from hypothesis import given
from hypothesis import strategies as st

from distill.data.held_out import choose_held_out, hold_out
from tests.samples import training_row

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
