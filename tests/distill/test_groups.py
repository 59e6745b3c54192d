"""Groups: refusals by field, packed columns, shares by id, and records of trained ones."""

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.columns import GroupColumns, checked, joined, pack
from distill.errors import CheckpointError, DataError, IsothermError
from distill.group_share import EVERY_GROUP, NO_TEACHER_SAMPLES, GroupShare, TeacherSamples
from distill.objective.sums import meta_of
from distill.records import TrainedGroups
from distill.types import LOGPROB_SLACK, Segment, StopReason, TrajectoryGroup
from tests.samples import group, ids, segment, segment_of, top_logprobs, trajectory

ARRAYS = [
    "tokens_T", "action_mask_T", "behaviour_logprobs_T", "versions_T", "teacher_logprobs_T",
    "teacher_logprobs_q1_T",
]  # fmt: skip
LOGPROBS = [name for name in ARRAYS if "logprobs" in name]


def among_others(made: Segment) -> TrajectoryGroup:
    """Group in which this segment (3 observed, 4 sampled tokens) is neither first nor last."""
    others = segment(2, 6, seed=1), segment(5, 2, seed=2, teacher_logprobs_T=None)
    members = trajectory(others[0], made), trajectory(others[1])
    return TrajectoryGroup(group_id=4, trajectories_G=members)


def changed(name: str, index: int, value: Any) -> Segment:
    values = np.array(getattr(segment(), name))
    values[index] = value
    return replace(segment(), **{name: values})


def refused(made: TrajectoryGroup) -> DataError:
    with pytest.raises(DataError) as raised:
        checked(made)
    return raised.value


def test_valid_groups_pass() -> None:
    checked(group(4))
    checked(among_others(segment(bonuses_T=[0.0] * 7, teacher_top=top_logprobs(4, 2))))


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("tokens_T", 2, -5),
        ("versions_T", 4, -1),
        *((name, 5, bad) for name in LOGPROBS for bad in (math.nan, math.inf, -math.inf)),
        *((name, 5, 2 * LOGPROB_SLACK) for name in LOGPROBS),
    ],
)
def test_an_impossible_value_is_named_with_its_place(name: str, index: int, value: float) -> None:
    error = refused(among_others(changed(name, index, value)))
    assert error.field == name and f"{name}[{index}]" in str(error)


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize(("index", "value"), [(0, math.nan), (2, 9.0), (5, 0.5 * LOGPROB_SLACK)])
def test_observed_tokens_and_rounding_pass(name: str, index: int, value: float) -> None:
    checked(among_others(changed(name, index, value)))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("change", [lambda v: v[None], lambda v: v[:-1], lambda v: v.astype("f8")])
def test_arrays_have_one_value_of_their_type_for_each_token(name: str, change: Any) -> None:
    made = replace(segment(), **{name: change(getattr(segment(), name))})
    if name == "tokens_T" and len(made.tokens_T) == 6:
        assert refused(among_others(made)).field == "action_mask_T"
    else:
        assert refused(among_others(made)).field == name


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("action_mask_T", {"action_mask_T": [True] * 7, "versions_T": [0] * 7}),
        ("action_mask_T", {"action_mask_T": [False] * 7, "versions_T": [0] * 7}),
        ("first_action", {"first_action": 4}),
        ("first_action", {"first_action": 2}),
        ("bonuses_T", {"bonuses_T": [0, 0, 0, 0, math.inf, 0, 0]}),
        ("teacher_top", {"teacher_top": top_logprobs(3, 2)}),
        ("policy_top_ids_NK", {"policy_top_ids_NK": np.zeros((5, 2), np.int32)}),
        ("experts_TLK", {"experts_TLK": np.zeros((7, 2, 2), np.int32)}),
        ("experts_TLK", {"experts_TLK": np.zeros((6, 2, 2), np.uint8)}),
    ],
)
def test_a_broken_rule_of_a_segment_names_the_field(field: str, changes: dict[str, Any]) -> None:
    assert refused(among_others(segment(**changes))).field == field


def test_the_last_segment_must_have_an_action_too() -> None:
    nothing = segment(action_mask_T=[False] * 7)
    assert refused(replace(group(), trajectories_G=(trajectory(nothing),))).field == "action_mask_T"


def test_an_empty_segment_is_refused() -> None:
    empty = {name: [] for name in ARRAYS}
    made = segment_of(**empty | {"action_mask_T": [], "temperature": 0.7, "first_action": 1})
    assert refused(among_others(made)).field == "tokens_T"


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher_context_T": [5], "teacher_replaces": 0},
        {"teacher_context_T": [5], "teacher_replaces": 4},
        {"teacher_context_T": [], "teacher_replaces": 3},
        {"teacher_replaces": 3},
    ],
)
def test_a_privileged_context_replaces_the_first_observation(changes: dict[str, Any]) -> None:
    assert "teacher_" in str(refused(among_others(segment(**changes))))


@pytest.mark.parametrize("temperature", [0, -0.7, math.nan, math.inf, "0.7", None])
def test_a_segment_has_a_temperature_above_zero(temperature: Any) -> None:
    with pytest.raises(IsothermError) as raised:
        checked(group(temperature=temperature))
    assert raised.value.field == "Segment.temperature"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("segments", {"segments": ()}),
        ("temperature", {"segments": (segment(), segment(temperature=1.0))}),
        ("reward", {"reward": math.nan}),
        ("turns", {"metrics": {"turns": math.inf}}),
    ],
)
def test_trajectories_are_checked(field: str, changes: dict[str, Any]) -> None:
    member = replace(trajectory(segment()), **changes)
    assert refused(replace(group(), trajectories_G=(trajectory(segment()), member))).field == field


@pytest.mark.parametrize(
    ("field", "changes"),
    [("group_id", {"group_id": -1}), ("trajectories_G", {"trajectories_G": ()})],
)
def test_groups_are_checked(field: str, changes: dict[str, Any]) -> None:
    assert refused(replace(group(4), **changes)).field == field


def assert_same(made: Any, expected: Any) -> None:
    """Assert deep equality with types, shapes and dtypes; arrays are read-only."""
    if isinstance(expected, Mapping):
        assert made == dict(expected)
        return
    assert type(made) is type(expected)
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(made, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple):
        for one, other in zip(made, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        assert made.dtype == expected.dtype and made.shape == expected.shape
        assert made.tobytes() == expected.tobytes() and not made.flags.writeable
    else:
        assert made == expected


def experts(tokens: int, largest: int, dtype: type) -> np.ndarray:
    """Experts of two layers, three each."""
    return np.arange(largest, largest - 6 * tokens, -1).reshape(tokens, 2, 3).astype(dtype)


def varied() -> TrajectoryGroup:
    """Group of several segments, some with fields that others lack."""
    return TrajectoryGroup(
        group_id=17,
        trajectories_G=(
            trajectory(
                segment(2, 5, seed=1, teacher_context_T=ids(7, 8, 9)),
                segment(4, 3, seed=2, teacher_logprobs_T=None, teacher_logprobs_q1_T=None),
                reward=0.5,
            ),
            replace(
                trajectory(
                    segment(1, 4, seed=3, bonuses_T=np.arange(5, dtype=np.float32)),
                    stop=StopReason.LENGTH,
                ),
                metrics={"env/turns": 2.0},
            ),
            trajectory(segment(3, 2, seed=4, teacher_top=top_logprobs(2, 3))),
            trajectory(segment(1, 2, seed=5, experts_TLK=experts(3, 250, np.uint8))),
        ),
        metrics={"time/rollout": 1.5},
        teacher="maths",
        tag="hard",
    )


def travelled(made: TrajectoryGroup, least_bytes: int) -> TrajectoryGroup:
    """Group from its metadata and parts, each pickled as for another process."""
    columns = checked(made)
    meta = pickle.loads(pickle.dumps(meta_of(made, columns), protocol=5))
    parts = pickle.loads(pickle.dumps(columns.parts(least_bytes), protocol=5))
    return meta.group([each for part in parts for each in part.trajectories()])


@pytest.mark.parametrize("made", [group(3), group(0, members=1), varied()])
@pytest.mark.parametrize("least_bytes", [1, 200, 100_000])
def test_it_is_the_same_group(made: TrajectoryGroup, least_bytes: int) -> None:
    assert_same(travelled(made, least_bytes), made)
    assert_same(
        tuple(joined(pack(made.trajectories_G).parts(least_bytes)).trajectories()),
        made.trajectories_G,
    )
    segments = [each for part in pack(made.trajectories_G).parts(1) for each in segments_of(part)]
    assert_same(meta_of(made).group_of_segments(segments), made)


def segments_of(part: GroupColumns) -> list[Segment]:
    return [segment for each in part.trajectories() for segment in each.segments]


def test_parts_are_runs_of_trajectories_and_none_is_small() -> None:
    made = group(5, members=7)
    sizes = [pack([one]).nbytes for one in made.trajectories_G]
    whole = pack(made.trajectories_G)
    assert whole.nbytes == sum(sizes) > 0
    for least_bytes in (1, max(sizes), 3 * max(sizes), 10**6):
        parts = whole.parts(least_bytes)
        assert sum((part.segments_G for part in parts), ()) == whole.segments_G
        assert sum(part.nbytes for part in parts) == whole.nbytes
        assert len(parts) == 1 or min(part.nbytes for part in parts) >= least_bytes
    assert len(whole.parts(1)) == 7 and len(whole.parts(10**6)) == 1


def test_metadata_is_small() -> None:
    made = TrajectoryGroup(
        group_id=0, trajectories_G=tuple(trajectory(segment(128, 2048, seed=g)) for g in range(16))
    )
    columns = checked(made)
    assert len(pickle.dumps(meta_of(made, columns))) < 0.005 * columns.nbytes


@given(
    share=st.floats(0, 1),
    per_step=st.integers(1, 12),
    seed=st.integers(0, 9),
    first=st.integers(0, 9),
)
def test_shares_of_steps_add_up(share: float, per_step: int, seed: int, first: int) -> None:
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
