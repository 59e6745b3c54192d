"""The format of kept groups: bit-equal after a round trip, and damaged files are refused."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.store.group_format import GroupRow, batch_of, groups_of, read_groups, write_groups
from distill.columns import checked, pack
from distill.errors import DataError
from distill.types import Segment, StopReason, TopLogprobs, TrajectoryGroup
from tests.distill.test_groups import assert_same
from tests.refusals import refuses
from tests.samples import group, segment, top_logprobs, trajectory

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too, as rows of users may have
METRICS = st.dictionaries(TEXT, FINITE, max_size=3)


@st.composite
def segments(draw: st.DrawFn, temperature: float, experts_dtype: type) -> Segment:
    prompt, actions = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    length, rng = prompt + actions, np.random.default_rng(draw(st.integers(0, 1 << 30)))
    changes: dict[str, Any] = {"temperature": temperature}

    def perhaps(name: str, value: Any) -> None:
        if draw(st.booleans()):
            changes[name] = value

    logprobs_T = -rng.exponential(2, length).astype(np.float32)
    for name in ("teacher_logprobs_T", "teacher_logprobs_q1_T"):
        perhaps(name, None)
    perhaps("reference_logprobs_T", logprobs_T)
    perhaps("bonuses_T", rng.normal(size=length).astype(np.float32))
    perhaps("teacher_top", top_logprobs(actions, draw(st.integers(1, 4))))
    perhaps("policy_top_ids_NK", rng.integers(0, 50, (actions, 3)).astype(np.int32))
    perhaps("teacher_context_T", rng.integers(0, 50, draw(st.integers(1, 4))).astype(np.int32))
    most = np.iinfo(experts_dtype).max
    perhaps("experts_TLK", rng.integers(0, most, (length, 2, 3)).astype(experts_dtype))
    perhaps("teacher_version", draw(st.integers(0, 1 << 40)))
    perhaps("scored_by", tuple(draw(st.lists(st.integers(0, 1 << 50), max_size=3))))
    return segment(prompt, actions, seed=draw(st.integers(0, 999)), **changes)


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    temperature = draw(st.floats(0.01, 4))
    of_run = segments(temperature, draw(st.sampled_from([np.uint8, np.uint16])))
    members = draw(st.lists(st.lists(of_run, min_size=1, max_size=3), min_size=1, max_size=3))
    return TrajectoryGroup(
        group_id=draw(st.integers(0, 1 << 50)),
        trajectories_G=tuple(
            trajectory(
                *each, reward=draw(FINITE), stop=draw(st.sampled_from(StopReason)),
                metrics=draw(METRICS), reward_counts=draw(st.booleans()),
            )
            for each in members
        ),
        metrics=draw(METRICS),
        teacher=draw(TEXT),
        tag=draw(st.none() | TEXT),
        source=draw(TEXT),
        answer=draw(st.none() | TEXT),
        by_teacher=draw(st.booleans()),
        as_text=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(made=st.lists(groups(), max_size=3))
def test_every_group_is_bit_equal_after_a_round_trip(made: list[TrajectoryGroup]) -> None:
    for each in made:
        checked(each)
    sink = pyarrow.BufferOutputStream()
    batch = batch_of([GroupRow(each, pack(each.trajectories_G)) for each in made])
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with pyarrow.ipc.open_stream(sink.getvalue()) as stream:
        read = groups_of(stream.read_next_batch())
    assert_same(tuple(read), tuple(made))
    assert batch.column("group_id").to_pylist() == [each.group_id for each in made]


MAPPINGS = [
    {"a": 1.0}, OrderedDict(a=1.0), Counter(a=2), defaultdict(float, a=1.0),
    MappingProxyType({"a": 1.0}), {"a": np.float32(0.5), "b": np.int64(3)},
]  # fmt: skip


@pytest.mark.parametrize("metrics", MAPPINGS, ids=lambda m: type(m).__name__)
def test_metrics_of_any_mapping_come_back(metrics: Mapping[str, float], tmp_path: Path) -> None:
    made = trajectory(segment(3, 4, teacher_top=top_logprobs(4, 3)), metrics=metrics)
    whole = replace(group(1, 2), trajectories_G=(made, made))
    write_groups(tmp_path / "kept" / "a.arrow", [whole, group(2)], {"why": "a test"})
    read = read_groups(tmp_path / "kept" / "a.arrow", "remove it")
    assert read.note == {"why": "a test"}
    assert_same(tuple(read.groups_P), (whole, group(2)))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Cut anywhere, or with JSON that contradicts its arrays."""
    path = tmp_path / "a.arrow"
    write_groups(path, [group(1), group(2)], {})
    written = path.read_bytes()
    lengths = written.replace(b'"segments_G":[1,1]', b'"segments_G":[1,9]')
    tokens = written.replace(b'"tokens_T":[5,', b'"tokens_T":[6,')
    cut = [written[:end] for end in range(0, len(written) - 16, 97)]
    for damaged in (*cut, lengths, tokens):
        assert damaged != written
        path.write_bytes(damaged)
        with refuses(DataError, None, names="a.arrow"):
            read_groups(path, "remove it")


def test_segments_may_have_different_numbers_of_likeliest_tokens() -> None:
    def with_top(k: int) -> Segment:
        return segment(2, 3, teacher_top=top_logprobs(3, k))

    made = replace(group(4), trajectories_G=(trajectory(with_top(1), with_top(5), segment(2, 3)),))
    [read] = groups_of(batch_of([GroupRow(made, pack(made.trajectories_G))]))
    tops = [each.teacher_top for each in read.segments()]
    assert [top and top.k for top in tops] == [1, 5, None]
    assert isinstance(tops[0], TopLogprobs)
    assert_same(read, made)
