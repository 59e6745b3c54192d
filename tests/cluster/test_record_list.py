"""Lists of requests and answers are pickled as columns and equal after a round trip."""

import pickle
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cluster.handles.record_list import RecordList
from distill.engine import GenerateRequest, Sample, Score, ScoreRequest
from distill.sampling import TrainSampling
from distill.types import StopReason, TopLogprobs

RNG = np.random.default_rng(0)


def ids(*shape: int) -> Any:
    return RNG.integers(0, 9, shape, np.int32)


def logprobs(*shape: int) -> Any:
    return -RNG.random(shape, np.float32)


def sample(length: int, **more: Any) -> Sample:
    arrays = {"tokens_T": ids(length), "versions_T": ids(length), "logprobs_T": logprobs(length)}
    return Sample(**arrays, stop_reason=StopReason.LENGTH, **more)


def score(length: int, temperatures: int = 2, **more: Any) -> Score:
    scored = tuple(logprobs(length) for _ in range(temperatures))
    return Score(logprobs_by_temperature=scored, scored_by=length, **more)


def top(length: int) -> TopLogprobs:
    given_NK = np.tile(np.array([[3, 1]], np.int32), (length, 1))
    return TopLogprobs(ids_NK=given_NK, logprobs_NK=logprobs(length, 2) - np.float32(2))


def to_score(length: int, **more: Any) -> ScoreRequest:
    return ScoreRequest(tokens_T=ids(length), start=1, temperatures=(0.7, 1.0), **more)


SAMPLING = TrainSampling(temperature=0.7, max_new_tokens=4)
LISTS: dict[str, Sequence[Any]] = {
    "samples": [sample(4), sample(1, cached_tokens=3), sample(0)],
    "likeliest": [sample(2, top_ids_TK=ids(2, 3)), sample(4, top_ids_TK=ids(4, 3))],
    "some have likeliest": [sample(2, top_ids_TK=ids(2, 3)), sample(4)],
    "experts": [sample(n, experts_NLK=ids(n, 2, 3).astype(np.uint8)) for n in (3, 5)],
    "experts of two sizes": [
        sample(3, experts_NLK=ids(3, 2, 3).astype(size)) for size in (np.uint8, np.uint16)
    ],
    "scores": [score(4), score(1)],
    "scores at no temperature": [score(4, 0), score(3, 0)],
    "scores at different temperatures": [score(4, 2), score(3, 1)],
    "scores with tops": [score(4, top=top(4)), score(2, top=top(2))],
    "to generate": [
        GenerateRequest(prompt_tokens_T=ids(n), sampling=SAMPLING, num_samples=4, seed=2**63 - n)
        for n in (3, 8)
    ],
    "to score": [to_score(5), to_score(9)],
    "to score with given tokens": [
        to_score(4, given_NK=ids(3, 2)),
        to_score(4, given_NK=ids(3, 1)),
    ],
    "none": [],
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case Sample() | Score() | GenerateRequest() | ScoreRequest() | TopLogprobs():
            return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case _:
            return one == other


@pytest.mark.parametrize("name", LISTS)
def test_records_are_equal_after_a_round_trip(name: str) -> None:
    records = LISTS[name]
    assert same(pickle.loads(pickle.dumps(RecordList(records))), list(records))


def test_each_field_is_sent_as_one_array() -> None:
    buffers: list[pickle.PickleBuffer] = []
    records = RecordList(sample(4) for _ in range(50))
    pickle.dumps(records, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 3
