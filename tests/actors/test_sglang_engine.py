"""The HTTP engine: bodies of its requests, and a server that misbehaves in every way."""

import asyncio
import base64
import pkgutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.sglang.answers import read_experts, read_sample
from actors.sglang.client import SglangClient
from actors.sglang.engine import SglangEngine
from actors.sglang.external import ExternalSglangEngine
from actors.sglang.plugin.listed_steps import LISTED_OUTPUT_KEY, LISTED_OUTPUT_SWITCH
from actors.sglang.requests import NEUTRAL, Chunks, bounded, sampling_body
from distill.engine import GenerateRequest, Score, ScoreRequest
from distill.errors import DataError, EngineError
from distill.routing import MixtureShape
from distill.sampling import TrainSampling
from distill.stops import StopTokens
from tests.actors.misbehaving_server import API_KEY, VOCAB_SIZE, MisbehavingServer
from tests.samples import TEMPERATURE, ids
from tests.waiting import DEADLINE_S

TOKENS_T = np.arange(2, 10, dtype=np.int32)
GENERATE = GenerateRequest(
    prompt_tokens_T=TOKENS_T, sampling=TrainSampling(temperature=0.7, max_new_tokens=4),
    num_samples=2, seed=0,
)  # fmt: skip
SCORE = ScoreRequest(tokens_T=TOKENS_T, start=3, temperatures=(0.7,))
SCORE_TOP = ScoreRequest(tokens_T=TOKENS_T, start=3, temperatures=(0.7,), top_k=2)

Call = Callable[[SglangEngine], Awaitable[Any]]


def generate(engine: SglangEngine) -> Awaitable[Any]:
    return engine.generate(GENERATE)


def score(engine: SglangEngine) -> Awaitable[Any]:
    return engine.score([SCORE])


def score_top(engine: SglangEngine) -> Awaitable[Any]:
    return engine.score([SCORE_TOP])


def decode_score(engine: SglangEngine) -> Awaitable[Any]:
    return engine.decode_score([SCORE])


def ask(
    server: MisbehavingServer, call: Call, *, deadline_s: float = 60, key: str | None = API_KEY
) -> Any:
    """Result of `call` on an engine of the server."""

    async def run() -> Any:
        async with server.running():
            client = SglangClient(
                lambda: server.url, api_key=key, admin_api_key=key, deadline_s=deadline_s
            )
            engine = SglangEngine(
                client, model="made up", vocab_size=VOCAB_SIZE, context_length=64,
                dtype="float32", stops=None, weights=None,
            )  # fmt: skip
            try:
                return await asyncio.wait_for(call(engine), DEADLINE_S)
            finally:
                await client.close()

    return asyncio.run(run())


def in_meta(**changes: Any) -> Callable[[list[dict]], list[dict]]:
    def spoil(answers: list[dict]) -> list[dict]:
        for answer in answers:
            answer["meta_info"] |= changes
        return answers

    return spoil


def test_proper_answers_are_taken() -> None:
    server = MisbehavingServer()
    samples = ask(server, generate)
    assert [sample.tokens_T.tolist() for sample in samples] == [[7] * 4] * 2
    assert samples[0].versions_T.tolist() == [3] * 4
    [found] = ask(server, score)
    np.testing.assert_allclose(found.logprobs_by_temperature[0], [-0.35] * 5)
    [found] = ask(server, decode_score)
    np.testing.assert_allclose(found.logprobs_by_temperature[0], [-2.5] * 5)


@pytest.mark.parametrize("call", [generate, score, decode_score])
@pytest.mark.parametrize(("failure", "deadline_s"), [("hang", 1), (500, 60)])
def test_a_server_that_hangs_or_keeps_failing_is_an_error(
    call: Call, failure: int | str, deadline_s: float
) -> None:
    server = MisbehavingServer()
    server.failures = [failure] * 9
    with pytest.raises(EngineError):
        ask(server, call, deadline_s=deadline_s)


@pytest.mark.parametrize("failure", [500, 503, "drop"])
def test_scoring_is_repeated_and_sampling_is_not(failure: int | str) -> None:
    server = MisbehavingServer()
    server.failures = [failure, failure]
    [found] = ask(server, score)
    assert isinstance(found, Score) and server.asked["/generate"] == 3
    server.asked.clear()
    server.failures = [failure]
    with pytest.raises(EngineError):
        ask(server, generate)
    assert server.asked["/generate"] == 1, "samples were drawn twice"


def input_rows(*logprobs: float | None, first_token: int = 4) -> list[list[Any]]:
    return [[value, first_token + i, None] for i, value in enumerate(logprobs)]


@pytest.mark.parametrize("temperatures", [(0.7,), (0.7, 1.0), (1.0, 0.7), (1.0,), (0.5, 0.7)])
@pytest.mark.parametrize("plugin", [True, False])
def test_the_top_is_at_the_first_temperature(temperatures: tuple[float, ...], plugin: bool) -> None:
    server = MisbehavingServer()
    if not plugin:
        server.spoil = in_meta(input_logprob_temperature=None)
    wants = ScoreRequest(tokens_T=TOKENS_T, start=3, temperatures=temperatures, top_k=2)
    wants_none = ScoreRequest(tokens_T=TOKENS_T, start=2, temperatures=temperatures)
    wanted, plain = ask(server, lambda engine: engine.score([wants, wants_none]))
    first = -1.5 - temperatures[0]
    np.testing.assert_allclose(wanted.top.logprobs_NK, [[first, first - 1]] * 5)
    assert wanted.top.ids_NK.tolist() == [[20, 21]] * 5
    assert plain.top is None
    for score, scored in ((wanted, 5), (plain, 6)):
        expected = [[-0.5 * t] * scored for t in temperatures]
        np.testing.assert_allclose(score.logprobs_by_temperature, expected)


def in_blocks(
    ids_NK: np.ndarray, logprobs_NK: np.ndarray, **changes: Any
) -> Callable[[list[dict]], list[dict]]:
    """Likeliest tokens in SGLang 0.5.23's block format."""
    fields: dict[str, Any] = {"input_top_logprobs": None}
    for name, values_NK in (("idx", ids_NK), ("val", logprobs_NK)):
        encoded = base64.b64encode(values_NK.tobytes()).decode()
        fields[f"input_top_logprobs_{name}_flat_b64"] = encoded
        fields[f"input_top_logprobs_{name}_flat_b64_dtype"] = str(values_NK.dtype)
    shape = {"shape": list(ids_NK.shape), "null_prefix": 1}
    fields |= {f"input_top_logprobs_{name}": value for name, value in shape.items()}
    return in_meta(**fields | {f"input_top_logprobs_{n}": value for n, value in changes.items()})


IDS_NK = np.array([[20, 21], [3, 4], [0, VOCAB_SIZE - 1], [8, 9], [11, 10]], np.int32)
LOGPROBS_NK = np.array([[-1, -2], [-0.1, -3], [-5, -6], [-2, -2], [-1.25, -1.5]], np.float32)


def test_blocks_of_the_likeliest_are_read_bit_for_bit() -> None:
    server = MisbehavingServer()
    server.spoil = in_blocks(IDS_NK, LOGPROBS_NK / np.float32(0.7))
    [score] = ask(server, score_top)
    np.testing.assert_array_equal(score.top.ids_NK, IDS_NK)
    np.testing.assert_array_equal(score.top.logprobs_NK, LOGPROBS_NK / np.float32(0.7))


# SGLang writes a NaN or an infinity as null.
NAN_ROW = [[None, 7, None]]
ROWS = [[-1.5, 7, None]]
TOP_ROW = [[-1.0, 20, None], [-2.0, 21, None]]
TOPS = [None, *[TOP_ROW] * 4]
SPOILT: list[tuple[Call, Callable[[Any], Any]]] = [
    (generate, lambda answers: "<html>Bad gateway</html>"),
    (generate, lambda answers: {"answers": answers}),
    (generate, lambda answers: [None] * len(answers)),
    (generate, lambda answers: answers[:-1]),
    (generate, in_meta(output_token_logprobs=ROWS * 3 + NAN_ROW)),
    (generate, in_meta(output_token_logprobs=ROWS * 3)),
    (generate, in_meta(output_token_logprobs=ROWS * 3 + [[-1.5, 8, None]])),
    (generate, in_meta(output_token_logprobs=None)),
    (generate, in_meta(output_token_logprobs=[-1.5] * 4)),
    (generate, in_meta(finish_reason=None)),
    (generate, in_meta(finish_reason={"type": "abort", "status_code": 500})),
    (generate, in_meta(weight_versions=[{"version": "3", "start": 0, "end": 2}])),
    (score, lambda answers: "not JSON"),
    (score, lambda answers: answers * 2),
    (score, in_meta(input_token_logprobs=input_rows(None, -1, -1, None, -1, -1))),
    (score, in_meta(input_token_logprobs=input_rows(None, -1))),
    (score, in_meta(input_token_logprobs=input_rows(None, -1, -1, -1, -1, -1, first_token=5))),
    (score, in_meta(input_logprob_temperature=[1.0])),
    *(
        (score_top, in_meta(input_top_logprobs=rows))
        for rows in [
            None, TOPS, [None, *[TOP_ROW[:1]] * 5], [*TOPS, TOP_ROW[:1]], [*TOPS, None],
            [*TOPS, [-1.0, -2.0]], [*TOPS, [[None, 20, None], TOP_ROW[1]]],
            [*TOPS, [TOP_ROW[0], [-2.0, VOCAB_SIZE, None]]],
            [*TOPS, [TOP_ROW[0], [-2.0, -1, None]]], [*TOPS, [TOP_ROW[0]] * 2],
            [*TOPS, [[-0.1, 20, None], [-0.2, 21, None]]],
        ]
    ),
    *(
        (score_top, in_blocks(IDS_NK, LOGPROBS_NK, **changes))
        for changes in [
            {"shape": [4, 2]}, {"shape": [10, 1]}, {"null_prefix": 2}, {"null_prefix": None},
            {"val_flat_b64": "no base64 !"}, {"idx_flat_b64_dtype": "no type"},
            {"idx_flat_b64": None},
        ]
    ),
    *(
        (decode_score, in_meta(output_token_ids_logprobs=rows))
        for rows in [None, [], [[]], [[[-1.0, 9999, None]]], [[[None, 5, None]]]]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "spoil"), SPOILT)
def test_a_malformed_answer_is_an_error(call: Call, spoil: Callable[[Any], Any]) -> None:
    server = MisbehavingServer()
    server.spoil = spoil
    with pytest.raises(EngineError):
        ask(server, call)


def test_many_rows_are_scored_with_bounded_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of five tokens: two per request, or one if tokens are listed."""
    monkeypatch.setattr("actors.sglang.requests.ANSWER_BYTES", 5 * 40 * 2)
    asked: list[int] = []

    class Counting(MisbehavingServer):
        def answer_generate(self, body: Any) -> Any:
            asked.append(len(body["input_ids"]))
            return super().answer_generate(body)

    requests = [replace(SCORE, temperatures=(t / 10,)) for t in range(5, 10)]
    found = ask(Counting(), lambda engine: engine.score(requests))
    assert sorted(asked) == [1, 2, 2]
    expected = [[-0.5 * t / 10] * 5 for t in range(5, 10)]
    np.testing.assert_allclose([s.logprobs_by_temperature[0] for s in found], expected)
    asked.clear()
    likeliest = [replace(request, top_k=2) for request in requests]
    found = ask(Counting(), lambda engine: engine.score(likeliest))
    assert asked == [1] * 5
    assert all(score.top.ids_NK.tolist() == [[20, 21]] * 5 for score in found)


def test_prompts_that_must_not_be_cut_are_sent_a_prefill_chunk_at_a_time() -> None:
    """A prompt takes whole pages of a chunk."""
    requests = [(replace(SCORE, temperatures=(0.5,)), 0.5)] * 5
    assert len(SCORE.tokens_T) == 8
    assert bounded(requests, (), Chunks(24, 3)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert bounded(requests, (), Chunks(24, 1)) == [slice(0, 3), slice(3, 5)]
    assert bounded(requests, (), Chunks(5, 1)) == [slice(i, i + 1) for i in range(5)]
    assert bounded(requests, (), Chunks(-1, 1)) == [slice(0, 5)]


def test_one_failing_request_is_the_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sglang.requests.ANSWER_BYTES", 1)
    server = MisbehavingServer()
    server.failures = [400]
    with pytest.raises(DataError):
        ask(server, lambda engine: engine.score([SCORE] * 3))


@pytest.mark.parametrize("call", [score, generate])
def test_answers_are_read_in_a_thread(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON is parsed there, so that heartbeats continue."""
    threads: dict[str, str] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **named: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*given, **named)

        return read

    for name in ("read_sample", "read_input_logprobs", "scoring_body", "loads"):
        module = "client.orjson" if name == "loads" else "engine"
        path = f"actors.sglang.{module}.{name}"
        monkeypatch.setattr(path, noted(name, pkgutil.resolve_name(path)))
    ask(MisbehavingServer(), call)
    names = {"loads", "read_sample"} if call is generate else {
        "loads", "read_input_logprobs", "scoring_body"
    }  # fmt: skip
    assert threads.keys() == names
    assert all(thread.startswith("sglang answers") for thread in threads.values())


def test_the_plugins_unscaled_logprobs_save_the_second_pass() -> None:
    server = MisbehavingServer()
    server.spoil = in_meta(input_logprobs_unscaled=[[-3.0] * 5])
    both = ScoreRequest(tokens_T=TOKENS_T, start=3, temperatures=(0.7, 1.0))
    [found] = ask(server, lambda engine: engine.score([both]))
    np.testing.assert_allclose(found.logprobs_by_temperature, [[-0.35] * 5, [-3.0] * 5])
    assert server.asked["/generate"] == 1


async def test_an_external_server_that_is_something_else_is_refused() -> None:
    server = MisbehavingServer()
    with pytest.raises(EngineError):
        async with server.running():
            engine = ExternalSglangEngine(url=server.url, api_key=API_KEY, request_deadline_s=60)
            try:
                await engine.info()
            finally:
                await engine.close()


TWO_SAMPLES = GenerateRequest(
    prompt_tokens_T=ids(4, 5, 6), sampling=TrainSampling(temperature=TEMPERATURE, max_new_tokens=9),
    num_samples=3, seed=-7,
)  # fmt: skip


def test_samples_of_one_prompt_are_one_request() -> None:
    body = sampling_body(TWO_SAMPLES, 8, stops=StopTokens(ids=(2, 9)), seeded=False)
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
        (replace(TWO_SAMPLES, top_k=3), None, 3, None),
        (replace(TWO_SAMPLES, top_k=3), event, 4, [2, 9]),
        (TWO_SAMPLES, event, None, [2, 9]),
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
    body = sampling_body(replace(TWO_SAMPLES, experts=True, known=2), 8, stops=None, seeded=False)
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 2
    assert "return_routed_experts" not in sampling_body(TWO_SAMPLES, 8, stops=None, seeded=False)


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
    body = sampling_body(TWO_SAMPLES, 8, stops=None, seeded=True)
    assert body["input_ids"] == [[4, 5, 6]] * 3
    seeds = [params["sampling_seed"] for params in body["sampling_params"]]
    assert len(set(seeds)) == 3 and all(0 <= seed < 1 << 31 for seed in seeds)
    assert all("n" not in params for params in body["sampling_params"])
    # Sample g depends on (seed, g) only, not on the number of samples.
    fewer = sampling_body(replace(TWO_SAMPLES, num_samples=2), 8, stops=None, seeded=True)
    assert fewer["sampling_params"] == body["sampling_params"][:2]
    others = sampling_body(replace(TWO_SAMPLES, seed=8), 8, stops=None, seeded=True)
    assert not {params["sampling_seed"] for params in others["sampling_params"]} & set(seeds)
