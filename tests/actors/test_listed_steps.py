"""Log-probs that the SGLang plugin lists with sampled tokens, against a loop over the requests."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.sglang.plugin.listed_steps import (
    LISTED_OUTPUT_KEY,
    LISTED_OUTPUT_SWITCH,
    compute_logprobs,
    move_logprob_options,
    read_steps,
    sample,
    store_wanted,
)
from actors.sglang.plugin.row_temperatures import UnknownPassError

VOCAB = 11


def request(top: int, ids: list[int] | None, custom: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        logprob=SimpleNamespace(top_logprobs_num=top, token_ids_logprob=ids),
        sampling_params=SimpleNamespace(custom_params=custom),
    )


def opted(top: int, ids: list[int] | None) -> SimpleNamespace:
    return request(top, ids, {LISTED_OUTPUT_SWITCH: True})


def step(reqs: Sequence[SimpleNamespace], logprobs_GV: Tensor, *, spec: bool = False) -> Any:
    """The `customized_info` of a step, with the hooks around a stand-in for the sampler."""
    batch = SimpleNamespace(
        reqs=reqs,
        spec_algorithm=SimpleNamespace(is_none=lambda: not spec),
        sampling_info=SimpleNamespace(),
    )
    move_logprob_options(batch)
    move_logprob_options(batch)  # as for the next chunk of a prompt
    store_wanted(batch)
    processor, output = SimpleNamespace(), SimpleNamespace(customized_info={"other": []})

    def original(*_args: Any) -> str:
        compute_logprobs(None, processor, logprobs_GV)
        return "sampled"

    sampler = SimpleNamespace(output_logprob_processor=processor)
    assert sample(original, sampler, output, batch.sampling_info, True, None) == "sampled"
    assert output.customized_info["other"] == []
    return output.customized_info


requests_G = st.lists(
    st.none()
    | st.tuples(
        st.integers(0, 5), st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=3)
    ).filter(lambda wanted: wanted != (0, None)),
    min_size=1,
    max_size=6,
).filter(any)


@given(requests_G)
def test_a_step_lists_for_each_request_what_it_asked_for(
    asked_G: list[tuple[int, list[int] | None] | None],
) -> None:
    logprobs_GV = torch.randn(len(asked_G), VOCAB).log_softmax(1)
    reqs = [request(0, None) if asked is None else opted(*asked) for asked in asked_G]
    listed = step(reqs, logprobs_GV)[LISTED_OUTPUT_KEY]
    for g, asked in enumerate(asked_G):
        if asked is None:
            assert listed[g] is None
            continue
        top, ids = asked
        given_TE, ids_TK, logprobs_TK = read_steps([listed[g]], len(ids or ()), top)
        best_K, best_ids_K = logprobs_GV[g].topk(top)
        assert given_TE.tolist() == [logprobs_GV[g, ids or []].tolist()]
        assert ids_TK.tolist() == [best_ids_K.tolist()]
        assert logprobs_TK.tolist() == [best_K.tolist()]
        left = reqs[g].logprob
        assert (left.top_logprobs_num, left.token_ids_logprob) == (0, None), "SGLang does it again"


def test_requests_of_others_and_speculative_decoding_are_left_to_sglang() -> None:
    logprobs_GV = torch.randn(2, VOCAB).log_softmax(1)
    for reqs, spec in [
        ([request(3, [1]), request(0, None, {LISTED_OUTPUT_SWITCH: True})], False),
        ([opted(3, [1]), opted(0, [1])], True),
    ]:
        before = [(r.logprob.top_logprobs_num, r.logprob.token_ids_logprob) for r in reqs]
        assert LISTED_OUTPUT_KEY not in step(reqs, logprobs_GV, spec=spec)
        after = [(r.logprob.top_logprobs_num, r.logprob.token_ids_logprob) for r in reqs]
        assert after == before


def test_rows_that_are_not_the_requests_are_refused() -> None:
    with pytest.raises(UnknownPassError):
        step([opted(3, [1])], torch.randn(2, VOCAB).log_softmax(1))


@pytest.mark.parametrize("texts", [["!"], ["AAAA"], [None], ["AAAAAAAAAAA=", "AAAA"]])
def test_texts_that_are_no_steps_are_refused(texts: list[Any]) -> None:
    assert read_steps(["AAAAAAAAAAA="], 0, 1)[1].tolist() == [[0]]
    with pytest.raises((ValueError, TypeError)):
        read_steps(texts, 0, 1)
