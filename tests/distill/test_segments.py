"""Turns are one segment while each extends the prefix, and a new one when it does not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.chat.segments import SegmentBuilder
from distill.errors import DataError
from distill.types import Segment
from tests.samples import Sample, ids, sample


def build(*turns: tuple[np.ndarray, Sample]) -> tuple[Segment, ...]:
    builder = SegmentBuilder(0.7)
    for observation_T, taken in turns:
        builder.append(observation_T, taken)
    return builder.build()


def test_a_new_segment_starts_at_the_break() -> None:
    made = build((ids(5), sample(7)), (ids(9), sample(8)), (ids(9, 8, 3), sample(2)))
    assert [segment.tokens_T.tolist() for segment in made] == [[5, 7], [9, 8, 3, 2]]


def test_experts_are_those_of_the_pass_that_went_on_from_the_token() -> None:
    def routed(sampled: Sample, *experts: int) -> Sample:
        return replace(sampled, experts_NLK=np.array(experts, np.uint8).reshape(-1, 1, 1))

    first, second = build(
        (ids(5, 6), routed(sample(7, 1), 10, 11, 12)),
        # Of the first turn's four tokens the last was not through the model yet.
        (ids(5, 6, 7, 1, 8), routed(sample(4, 3), 13, 14, 15)),
        (ids(9), routed(sample(2), 16)),
    )
    assert first.experts_TLK is not None and second.experts_TLK is not None
    assert first.experts_TLK.ravel().tolist() == [10, 11, 12, 13, 14, 15, 255]
    assert second.experts_TLK.ravel().tolist() == [16, 255]
    [unknown] = build((ids(5, 6), sample(7)), (ids(5, 6, 7), routed(sample(8), 10)))
    assert unknown.experts_TLK is not None
    assert unknown.experts_TLK.ravel().tolist() == [255, 255, 10, 255]
    assert build((ids(5), sample(7)))[0].experts_TLK is None


def test_nothing_trained_is_refused() -> None:
    with pytest.raises(DataError):
        build()
    builder = SegmentBuilder(0.7)
    builder.append(ids(5), sample(7), trained=False)
    with pytest.raises(DataError):
        builder.build()


def test_a_turn_that_is_not_trained_is_context() -> None:
    """Also of its own segment; a segment without trained tokens is left out."""
    builder = SegmentBuilder(0.7)
    builder.append(ids(5), sample(7, 8), row(1, 2), trained=False)
    builder.append(ids(5, 7, 8, 3), sample(6), row(4))
    builder.append(ids(9), sample(7), trained=False)
    [made] = builder.build()
    assert made.tokens_T.tolist() == [5, 7, 8, 3, 6]
    assert made.action_mask_T.tolist() == [False] * 4 + [True]
    assert made.versions_T.tolist()[:4] == [-1] * 4
    assert made.behaviour_logprobs_T.tolist()[:4] == [0] * 4
    assert made.bonuses_T is not None and made.bonuses_T.tolist() == [0, 0, 0, 0, 4]


def row(*bonuses: float) -> np.ndarray:
    return np.array(bonuses, np.float32)


def outcome(made: Segment) -> tuple[list[int], int] | None:
    if made.teacher_context_T is None:
        assert made.teacher_replaces == 0
        return None
    return made.teacher_context_T.tolist(), made.teacher_replaces


def test_the_privileged_context_is_on_every_segment_that_begins_with_the_prompt() -> None:
    """And on no other: observed tokens count, not sampled ones."""
    builder = SegmentBuilder(0.7, ids(3, 4, 2))
    for observation in [ids(5, 6), ids(5, 6, 7, 8), ids(5, 6, 1), ids(5), ids(9, 5, 6)]:
        builder.append(observation, sample(6 if len(observation) == 1 else 7))
    whole, cut, *others = builder.build()
    assert outcome(whole) == outcome(cut) == ([3, 4, 2], 2)
    assert [made.tokens_T.tolist() for made in others] == [[5, 6], [9, 5, 6, 7]]
    assert [outcome(made) for made in others] == [None, None]
    [plain] = build((ids(5), sample(7)))
    assert outcome(plain) is None


def test_an_untrained_first_segment_defines_the_prompt() -> None:
    builder = SegmentBuilder(0.7, ids(3))
    builder.append(ids(5, 6), sample(7), trained=False)
    builder.append(ids(5, 6, 1), sample(8))
    builder.append(ids(4), sample(8))
    assert [outcome(made) for made in builder.build()] == [([3], 2), None]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=4),  # newly observed
            st.lists(st.integers(0, 9), min_size=1, max_size=4),  # sampled
            st.booleans(),  # whether the context starts afresh
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_is_kept_once_with_its_context(turns: list) -> None:
    builder, context, expected = SegmentBuilder(0.7), [], []
    for observed, sampled, afresh in turns:
        context = ([] if afresh else context) + observed
        builder.append(ids(*context), sample(*sampled))
        for token in sampled:
            expected.append((tuple(context), token))
            context = [*context, token]
    made = []
    for segment in builder.build():
        for t in np.flatnonzero(segment.action_mask_T):
            made.append((tuple(segment.tokens_T[:t].tolist()), int(segment.tokens_T[t])))
    assert sorted(made) == sorted(expected)
