"""Bodies of /generate state SGLang's defaults, seeds and lists explicitly."""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.sglang.answers import read_experts, read_sample
from actors.sglang.plugin.listed_steps import LISTED_OUTPUT_KEY, LISTED_OUTPUT_SWITCH
from actors.sglang.requests import NEUTRAL, sampling_body
from distill.engine import GenerateRequest
from distill.errors import EngineError
from distill.routing import MixtureShape
from distill.sampling import TrainSampling
from distill.stops import StopTokens
from tests.samples import TEMPERATURE, ids

GENERATE = GenerateRequest(
    prompt_tokens_T=ids(4, 5, 6), sampling=TrainSampling(temperature=TEMPERATURE, max_new_tokens=9),
    num_samples=3, seed=-7,
)  # fmt: skip


def test_samples_of_one_prompt_are_one_request() -> None:
    body = sampling_body(GENERATE, 8, stops=StopTokens(ids=(2, 9)), seeded=False)
    assert body == {
        "return_logprob": True,
        "input_ids": [[4, 5, 6]],
        "sampling_params": NEUTRAL
        | {"temperature": TEMPERATURE, "max_new_tokens": 8, "stop_token_ids": [2, 9], "n": 3},
    }


@pytest.mark.parametrize("seeded", [False, True])
def test_listed_tokens_are_requested_from_sglang_and_the_plugin(seeded: bool) -> None:
    event = StopTokens(ids=(2, 9), one_event=True)
    for request, stops, top, given in [
        (replace(GENERATE, top_k=3), None, 3, None),
        (replace(GENERATE, top_k=3), event, 4, [2, 9]),
        (GENERATE, event, None, [2, 9]),
    ]:
        body = sampling_body(request, 8, stops=stops, seeded=seeded)
        assert (body.get("top_logprobs_num"), body.get("token_ids_logprob")) == (top, given)
        params = body["sampling_params"]
        for each in params if seeded else [params]:
            assert each["custom_params"] == {LISTED_OUTPUT_SWITCH: True}


def listed_answer(texts: Any) -> dict[str, Any]:
    """Sample of tokens 5 and 9 that lists token 9 and the two likeliest tokens at each step."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 5, None], [-3.0, 9, None]],
        LISTED_OUTPUT_KEY: texts,
    }
    return {"output_ids": [5, 9], "meta_info": meta}


def listed_text(*values: float | np.ndarray) -> str:
    return base64.b64encode(b"".join(np.float32(v).tobytes() for v in values)).decode()


def test_listed_tokens_of_the_plugin_are_read() -> None:
    five, seven, nine = (np.array(i, "<i4").view("<f4") for i in (5, 7, 9))
    texts = [
        listed_text(-4.0, -0.5, -1.0, five, -1.5, seven),
        listed_text(-0.25, -2.0, -0.25, nine, -3.0, five),
    ]
    read = read_sample(listed_answer(texts), (2, 9), 1, version=0)
    assert read.top_ids_TK is not None and read.top_ids_TK.tolist() == [[2], [2]]
    assert read.logprobs_T.tolist() == pytest.approx([-1.0, np.logaddexp(-0.25, -2.0)])
    for wrong in (texts[:1], [*texts[:1], "AAAA"], [*texts[:1], "?"], [None, None]):
        with pytest.raises(EngineError) as error:
            read_sample(listed_answer(wrong), (2, 9), 1, version=0)
        assert LISTED_OUTPUT_KEY in str(error.value)


def test_experts_are_asked_for_from_the_first_that_is_not_known() -> None:
    body = sampling_body(replace(GENERATE, experts=True, known=2), 8, stops=None, seeded=False)
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 2
    assert "return_routed_experts" not in sampling_body(GENERATE, 8, stops=None, seeded=False)


def answered(experts: np.ndarray | None, reason: str = "stop") -> dict[str, Any]:
    content = None if experts is None else base64.b64encode(experts.astype("<i4").tobytes())
    meta: dict[str, Any] = {"finish_reason": {"type": reason}}
    if content is not None:
        meta["routed_experts"] = content.decode()
    return {"meta_info": meta}


def test_experts_are_read_as_the_server_sends_them() -> None:
    mixture = MixtureShape(layers=2, experts=300, top_k=3)
    experts_NLK = np.arange(4 * 2 * 3).reshape(4, 2, 3) + 276
    made = read_experts(answered(experts_NLK), 4, mixture)
    assert made is not None and made.dtype == np.uint16
    np.testing.assert_array_equal(made, experts_NLK)
    assert read_experts(answered(None, "abort"), 4, mixture) is None
    small = read_experts(answered(experts_NLK - 276), 4, replace(mixture, experts=24))
    assert small is not None and small.dtype == np.uint8


@pytest.mark.parametrize(
    "experts", [None, np.ones((3, 2, 3)), np.full((4, 2, 3), 9), np.zeros((4, 2, 3))]
)
def test_experts_that_cannot_be_are_refused(experts: np.ndarray | None) -> None:
    with pytest.raises(EngineError):
        read_experts(answered(experts), 4, MixtureShape(layers=2, experts=8, top_k=3))


def test_a_seeded_server_gets_a_seed_a_sample() -> None:
    body = sampling_body(GENERATE, 8, stops=None, seeded=True)
    assert body["input_ids"] == [[4, 5, 6]] * 3
    seeds = [params["sampling_seed"] for params in body["sampling_params"]]
    assert len(set(seeds)) == 3 and all(0 <= seed < 1 << 31 for seed in seeds)
    assert all("n" not in params for params in body["sampling_params"])
    # Sample g depends on (seed, g) only, not on the number of samples.
    fewer = sampling_body(replace(GENERATE, num_samples=2), 8, stops=None, seeded=True)
    assert fewer["sampling_params"] == body["sampling_params"][:2]
    others = sampling_body(replace(GENERATE, seed=8), 8, stops=None, seeded=True)
    assert not {params["sampling_seed"] for params in others["sampling_params"]} & set(seeds)
