"""Shares of a run's groups by id, with the given number in each step."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.group_share import EVERY_GROUP, NO_TEACHER_SAMPLES, GroupShare, TeacherSamples


@given(
    share=st.floats(0, 1),
    per_step=st.integers(1, 12),
    seed=st.integers(0, 9),
    first=st.integers(0, 9),
)
def test_every_step_has_its_share_and_all_of_them_add_up(
    share: float, per_step: int, seed: int, first: int
) -> None:
    chosen = GroupShare(share=share, groups_per_step=per_step, seed=(seed,), first=first)
    assert not any(i in chosen for i in range(first))
    counts = [
        sum(first + step * per_step + place in chosen for place in range(per_step))
        for step in range(20)
    ]
    for steps in range(1, 21):
        assert abs(sum(counts[:steps]) - share * per_step * steps) < 1 + 1e-6
    assert max(counts) - min(counts) <= 1
    again = pickle.loads(pickle.dumps(chosen))
    assert all((i in again) == (i in chosen) for i in range(40))


@pytest.mark.parametrize("other", [(4,), (3, 1)])
def test_another_seed_chooses_others(other: tuple[int, ...]) -> None:
    def ids(seed: tuple[int, ...]) -> set[int]:
        chosen = GroupShare(share=0.5, groups_per_step=8, seed=seed)
        return {i for i in range(800) if i in chosen}

    assert len(ids((3,))) == len(ids(other)) == 400
    assert 120 < len(ids((3,)) & ids(other)) < 280, "one choice says something of the other"


def test_every_group() -> None:
    assert all(i in EVERY_GROUP for i in range(99))


def test_teacher_samples_are_a_share_of_the_groups_after_the_warm_up() -> None:
    settings = {"groups_per_step": 8, "seed": 3, "vocab_size": 9}
    chosen = TeacherSamples(warmup_groups=5, share=0.5, **settings)
    again = pickle.loads(pickle.dumps(chosen))
    ids = {i for i in range(805) if i in chosen}
    assert ids >= {*range(5)} and {i for i in reversed(range(805)) if i in again} == ids
    for place in range(8):  # sources that take turns are sampled alike
        assert 25 < sum(i % 8 == place for i in ids if i >= 5) < 75
    assert not any(i in NO_TEACHER_SAMPLES for i in range(99))
