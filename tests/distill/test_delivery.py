"""What the weights account for: a watermark, and what was set aside below it."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.delivery import TrainedGroups
from distill.errors import CheckpointError


@given(poison=st.lists(st.booleans(), max_size=12))
def test_it_remembers_what_a_set_remembers(poison: list[bool]) -> None:
    trained, plain, reasons = TrainedGroups(), set(), {}
    for group_id, poisonous in enumerate(poison):
        if poisonous:
            reasons[group_id] = f"reason {group_id}"
            trained.skip(group_id, reasons[group_id])
        else:
            plain.add(group_id)
            trained.add(group_id)
        trained = TrainedGroups.from_json(json.loads(json.dumps(trained.to_json())))
        trained = pickle.loads(pickle.dumps(trained))  # it goes to the queue
        assert {i for i in range(-2, 14) if i in trained} == plain
        assert len(trained) == len(plain)
        assert trained.watermark == group_id + 1
        assert trained.set_aside == reasons


def test_what_is_written() -> None:
    trained = TrainedGroups(17)
    trained.skip(17, "its environment raised KeyError")
    trained.add(18)
    written = {"watermark": 19, "set_aside": {"17": "its environment raised KeyError"}}
    assert trained.to_json() == written


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_group_is_never_trained_twice(again: int) -> None:
    trained = TrainedGroups(3, {1: "poison"})
    with pytest.raises(AssertionError, match=f"group {again} would be trained twice"):
        trained.add(again)
    with pytest.raises(AssertionError, match=f"group {again} would be trained twice"):
        trained.skip(again, "poison")
    assert trained.to_json() == TrainedGroups(3, {1: "poison"}).to_json()


def test_nor_is_one_left_out() -> None:
    trained = TrainedGroups(3)
    with pytest.raises(AssertionError, match="group 4 is out of order: 3 is next"):
        trained.add(4)
    with pytest.raises(AssertionError, match="group 5 is out of order: 3 is next"):
        trained.skip(5, "poison")


def test_what_is_set_aside_cannot_be_changed_from_outside() -> None:
    given_reasons = {1: "poison"}
    trained = TrainedGroups(3, given_reasons)
    given_reasons[2] = "more"
    assert dict(trained.set_aside) == {1: "poison"}
    with pytest.raises(TypeError):
        trained.set_aside[2] = "more"  # type: ignore[index]
    with pytest.raises(AssertionError, match="not all below 3"):
        TrainedGroups(3, {3: "poison"})


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"watermark": 3},
        {"watermark": "three", "set_aside": {}},
        {"watermark": None, "set_aside": {}},
        {"watermark": 3, "set_aside": None},
        {"watermark": 3, "set_aside": [1]},
        {"watermark": 3, "set_aside": {"x": "reason"}},
        {"watermark": 3, "set_aside": {"1": None}},
        {"num_rows": 8},
        {"watermark": 3, "set_aside": {"3": "reason"}},
        {"watermark": 3, "set_aside": {"-1": "reason"}},
        {"watermark": -1, "set_aside": {}},
    ],
)
def test_unreadable_states_are_refused(value: dict) -> None:
    with pytest.raises(CheckpointError, match="delivery state"):
        TrainedGroups.from_json(value)
