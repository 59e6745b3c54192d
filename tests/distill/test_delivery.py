"""The set of trained groups is a set, however it is stored."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.delivery import TrainedGroups
from distill.errors import CheckpointError


@given(order=st.permutations(range(12)), count=st.integers(0, 12))
def test_it_remembers_what_a_set_remembers(order: list[int], count: int) -> None:
    trained, plain = TrainedGroups(), set()
    for group_id in order[:count]:
        assert group_id not in trained
        trained.add(group_id)
        plain.add(group_id)
        trained = TrainedGroups.from_json(json.loads(json.dumps(trained.to_json())))
        assert {i for i in range(14) if i in trained} == plain
        assert len(trained) == len(plain)
        gap = next(i for i in range(14) if i not in plain)
        assert trained.to_json() == {
            "watermark": gap,
            "beyond": sorted(i for i in plain if i > gap),
        }


@given(order=st.permutations(range(6)), again=st.integers(0, 5))
def test_a_group_is_never_trained_twice(order: list[int], again: int) -> None:
    trained = TrainedGroups()
    for group_id in order:
        trained.add(group_id)
    with pytest.raises(AssertionError, match=f"group {again} would be trained twice"):
        trained.add(again)


def test_in_order_it_stays_small() -> None:
    trained = TrainedGroups()
    for group_id in range(1000):
        trained.add(group_id)
    assert trained.to_json() == {"watermark": 1000, "beyond": []}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"watermark": 3},
        {"watermark": "three", "beyond": []},
        {"watermark": 3, "beyond": None},
        {"watermark": 3, "beyond": ["x"]},
        {"num_rows": 8},
        {"watermark": 3, "beyond": [2]},
        {"watermark": 3, "beyond": [3]},
        {"watermark": -1, "beyond": []},
    ],
)
def test_unreadable_states_are_refused(value: dict) -> None:
    with pytest.raises(CheckpointError, match="delivery state"):
        TrainedGroups.from_json(value)
