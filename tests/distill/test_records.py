"""Groups that the weights account for: a watermark, dropped ids below it, trained ids above."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.errors import CheckpointError
from distill.records import TrainedGroups


@given(
    poison=st.sets(st.integers(0, 11), max_size=6),
    order=st.permutations(range(12)),
    sizes=st.lists(st.integers(1, 4), max_size=8),
)
def test_records_equal_a_set_of_ids(poison: set[int], order: list[int], sizes: list[int]) -> None:
    """Groups in any order; the watermark is after the last trained one without a gap below."""
    reasons = {group_id: f"reason {group_id}" for group_id in poison}
    left = [group_id for group_id in order if group_id not in poison]
    trained, plain = TrainedGroups(), set[int]()
    for size in sizes:
        before, ids, left = trained, left[:size], left[size:]
        plain |= set(ids)
        trained = before.after(ids, reasons)
        assert trained.since(before) == sorted(ids)
        assert trained.since(TrainedGroups()) == sorted(plain)
        trained = TrainedGroups.from_json(json.loads(json.dumps(trained.to_json())))
        trained = pickle.loads(pickle.dumps(trained))  # it goes to the queue
        assert {i for i in range(-2, 14) if i in trained} == plain
        assert len(trained) == len(plain)
        whole = [i for i in plain if all(j in plain or j in poison for j in range(i))]
        assert trained.watermark == max([i + 1 for i in whole], default=0)
        assert trained.above == {i for i in plain if i >= trained.watermark}
        passed = {i: r for i, r in reasons.items() if i < trained.watermark}
        assert trained.set_aside == passed
        assert (trained == before) == (not ids)


def test_the_serialised_form() -> None:
    trained = TrainedGroups(17).after([18], {17: "its environment raised KeyError"})
    written = {"watermark": 19, "set_aside": {"17": "its environment raised KeyError"}}
    assert trained.to_json() == written
    assert trained.after([22, 20], {}).to_json() == {**written, "above": [20, 22]}
    assert TrainedGroups.from_json(written) == trained


def test_the_dropped_groups_are_read_only() -> None:
    given_reasons = {1: "poison"}
    trained = TrainedGroups(3, given_reasons)
    given_reasons[2] = "more"
    assert dict(trained.set_aside) == {1: "poison"}
    with pytest.raises(TypeError):
        trained.set_aside[2] = "more"  # type: ignore[index]
    with pytest.raises(AssertionError):
        TrainedGroups(3, {3: "poison"})
    with pytest.raises(AssertionError):
        TrainedGroups(3, {}, [3])


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
        {"watermark": 3, "set_aside": {}, "above": [3]},
        {"watermark": 3, "set_aside": {}, "above": ["x"]},
        {"watermark": 3, "set_aside": {}, "above": 4},
    ],
)
def test_unreadable_states_are_refused(value: dict) -> None:
    with pytest.raises(CheckpointError):
        TrainedGroups.from_json(value)
