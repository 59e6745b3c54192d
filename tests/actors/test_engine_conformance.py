"""Requirements of every engine, whose values are compared with a plain forward pass.

Only the `Engine` protocol is used. All calls run on one event loop per module, as in an actor.
"""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.config import SglangConfig
from actors.sglang.external import ExternalSglangEngine
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from distill.engine import Engine, GenerateRequest, Sample, Score, ScoreRequest
from distill.errors import DataError, EngineError
from distill.handshake.canary import FILLER_ROWS, CanaryAnswers, CanaryRows, CanaryScores
from distill.models.loading import load_causal_lm
from distill.sampling import EvalSampling, Sampling, TrainSampling
from distill.stops import StopTokens
from distill.tokenizer import load_tokenizer, probe_tokenizer
from distill.types import StopReason
from distill.weights.shared_memory import SharedTensors
from tests.naive import naive_distribution, naive_logprobs
from tests.refusals import refuses
from tests.samples import ids
from tests.states import expect_states, states_request
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S
from tests.weights import shared

T = TypeVar("T")
CONTEXT = 256
TEMPERATURES = (0.5, 0.7, 1.0, 1.5)


@dataclass
class Party:
    """An engine under test, plain models of its first and of other weights, and a loop."""

    engine: Engine
    model_dir: str
    model: PreTrainedModel
    other_model: PreTrainedModel
    runner: asyncio.Runner
    # Reasons by ability that this kind of engine lacks; tests of it are skipped with the reason.
    lacks: dict[str, str]

    def needs(self, ability: str) -> None:
        if ability in self.lacks:
            pytest.skip(self.lacks[ability])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, DEADLINE_S))

    def generate(self, *requests: GenerateRequest) -> list[list[Sample]]:
        async def all_at_once() -> list[list[Sample]]:
            return await asyncio.gather(*(self.engine.generate(r) for r in requests))

        return self.run(all_at_once())

    def load(self, model: PreTrainedModel, version: int) -> None:
        self.run(self.engine.load_weights(bundle(model), version))


def bundle(model: PreTrainedModel) -> SharedTensors:
    """Weights as a learner sends them: parameters by name, tied ones once."""
    return shared(dict(model.named_parameters()))


@contextmanager
def embedded(model_dir: str, _runner: asyncio.Runner) -> Iterator[Engine]:
    yield EmbeddedEngine(model_path=model_dir, device="cpu", threads=1)


# Defaults of a server whose owner tuned it for other clients; our requests must override them.
PREFERRED = {
    "repetition_penalty": 1.7, "frequency_penalty": 1.5, "presence_penalty": 1.5,
    "logit_bias": {"5": 3.0}, "min_new_tokens": 3, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "stop_token_ids": [7, 8, 9], "ignore_eos": True,
}  # fmt: skip


@contextmanager
def sglang_hosted(model_dir: str, runner: asyncio.Runner) -> Iterator[HostedSglangEngine]:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    engine = HostedSglangEngine(
        SglangConfig(
            model=model_dir, device="cpu", start_deadline_s=DEADLINE_S, request_deadline_s=60,
            server_flags=f"--preferred-sampling-params '{json.dumps(PREFERRED)}'",
        )
    )  # fmt: skip
    try:
        # The start, and its first request.
        runner.run(asyncio.wait_for(engine.info(), timeout=DEADLINE_S))
        yield engine
    finally:
        runner.run(engine.close())


@contextmanager
def sglang_external(hosted: HostedSglangEngine, runner: asyncio.Runner) -> Iterator[Engine]:
    server = hosted.server
    engine = ExternalSglangEngine(url=server.url, api_key=server.api_key, request_deadline_s=60)
    yield engine
    runner.run(engine.close())


_SEEDS = "SGLang seeds its samples only in its deterministic mode, which does not run on a CPU"
_NOT_OURS = "a server that is already running is not ours to change"
LACKS = {
    embedded: {},
    sglang_hosted: {"seeds": _SEEDS, "NaN weights": "a server never gets them: see the next test"},
    sglang_external: {
        "seeds": _SEEDS, "loads": _NOT_OURS, "aborts": _NOT_OURS, "NaN weights": _NOT_OURS,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Checkpoints of the first and of other weights."""
    made = [
        tiny_model_dir(tmp_path_factory.mktemp("m"), seed=seed, context_length=CONTEXT)
        for seed in (1, 2)
    ]
    for directory in made:
        save_tokenizer(directory)
    return made


@pytest.fixture(scope="module")
def hosted(directories: list[str], runner: asyncio.Runner) -> Iterator[HostedSglangEngine]:
    with sglang_hosted(directories[0], runner) as engine:
        yield engine


@pytest.fixture(scope="module", params=list(LACKS), ids=lambda start: start.__name__)
def party(
    request: pytest.FixtureRequest, directories: list[str], runner: asyncio.Runner
) -> Iterator[Party]:
    """Engine under test; the server that one engine hosts is the other's external one."""
    models = [load_causal_lm(d, dtype=torch.float32, device="cpu").eval() for d in directories]
    first, other = models
    with ExitStack() as stack:
        if request.param is embedded:
            engine: Any = stack.enter_context(embedded(directories[0], runner))
        else:
            engine = request.getfixturevalue("hosted")
            if request.param is sglang_external:
                engine = stack.enter_context(sglang_external(engine, runner))
        yield Party(engine, directories[0], first, other, runner, LACKS[request.param])


@pytest.fixture
def engine_at_version_0(party: Party) -> Iterator[Party]:
    """Party for tests that change the weights; the first ones are restored."""
    party.needs("loads")
    yield party
    party.load(party.model, 0)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, size=length).astype(np.int32)


def ask(
    prompt_T: np.ndarray, sampling: Sampling, *, num_samples: int = 1, seed: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        prompt_tokens_T=prompt_T, sampling=sampling, num_samples=num_samples, seed=seed
    )


def chain(prompt_T: np.ndarray, sample: Sample) -> np.ndarray:
    return np.concatenate([prompt_T, sample.tokens_T])


def expect_like_naive(model: PreTrainedModel, request: GenerateRequest, sample: Sample) -> None:
    temperature = request.sampling.temperature or 1.0
    tokens_T = chain(request.prompt_tokens_T, sample)
    expected_T = naive_logprobs(model, tokens_T, len(request.prompt_tokens_T), temperature)
    np.testing.assert_allclose(sample.logprobs_T, expected_T, atol=1e-4)


def test_decode_logprobs_with_mixed_temperatures_in_one_batch(party: Party) -> None:
    requests = [
        ask(prompt(5 + 9 * i, i), TrainSampling(temperature=t, max_new_tokens=20), num_samples=3)
        for i, t in enumerate(TEMPERATURES)
    ]
    requests.append(ask(prompt(30), EvalSampling(temperature=0.0, max_new_tokens=20)))
    requests.append(ask(prompt(8), EvalSampling(temperature=0.8, max_new_tokens=20, top_k=4)))
    for request, samples in zip(requests, party.generate(*requests), strict=True):
        assert len(samples) == request.num_samples
        for sample in samples:
            assert len(sample.tokens_T) == len(sample.logprobs_T) == len(sample.versions_T)
            assert (sample.versions_T == 0).all()
            expect_like_naive(party.model, request, sample)


def expect_naive_logprobs(model: PreTrainedModel, request: ScoreRequest, score: Score) -> None:
    for t, logprobs in zip(request.temperatures, score.logprobs_by_temperature, strict=True):
        expected = naive_logprobs(model, request.tokens_T, request.start, t)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_score_with_mixed_temperatures_lengths_and_starts(party: Party) -> None:
    requests = [
        ScoreRequest(tokens_T=prompt(length, length), start=start, temperatures=temperatures)
        for length, start, temperatures in [
            (2, 1, (0.7,)),
            (40, 17, TEMPERATURES),
            (CONTEXT, 1, (1.5,)),
            (90, 89, (0.5, 1.0)),
        ]
    ]
    scores = party.run(party.engine.score(requests))
    for request, score in zip(requests, scores, strict=True):
        expect_naive_logprobs(party.model, request, score)


def test_scoring_a_shared_prefix_equals_scoring_one_by_one(party: Party) -> None:
    requests = [
        ScoreRequest(
            tokens_T=np.concatenate([prompt(70, group), prompt(5 + 8 * member, member)]),
            start=70,
            temperatures=(0.7, 1.0),
        )
        for group in range(3)
        for member in range(4)
    ]

    async def concurrently() -> list[np.ndarray]:
        halves = await asyncio.gather(
            party.engine.score(requests[::2]), party.engine.score(requests[1::2])
        )
        scores = [score for pair in zip(*halves, strict=True) for score in pair]
        return [np.array(score.logprobs_by_temperature) for score in scores]

    together = party.run(concurrently())
    for request, logprobs in zip(requests, together, strict=True):
        [alone] = party.run(party.engine.score([request]))
        np.testing.assert_allclose(logprobs, np.array(alone.logprobs_by_temperature), atol=1e-5)
        expected = naive_logprobs(party.model, request.tokens_T, request.start, 0.7)
        np.testing.assert_allclose(logprobs[0], expected, atol=1e-4)


def expect_the_likeliest(model: PreTrainedModel, request: ScoreRequest, score: Score) -> None:
    assert score.top is not None
    expected_NV = naive_distribution(
        model, request.tokens_T, request.start, request.temperatures[0]
    )
    assert score.top.ids_NK.shape == (len(expected_NV), request.top_k)
    best_NK = -np.sort(-expected_NV, axis=1)[:, : request.top_k]
    np.testing.assert_allclose(score.top.logprobs_NK, best_NK, atol=1e-4)
    # Each id has its own log-prob: only tokens of almost equal log-probs may swap.
    own_NK = np.take_along_axis(expected_NV, score.top.ids_NK, axis=1)
    np.testing.assert_allclose(score.top.logprobs_NK, own_NK, atol=1e-4)
    ordered_NK = np.argsort(-expected_NV, axis=1)[:, : request.top_k + 1]
    gaps_NK = -np.diff(np.take_along_axis(expected_NV, ordered_NK, axis=1), axis=1)
    clear_N = gaps_NK.min(axis=1) > 1e-3
    k = request.top_k
    assert clear_N.any() or k == VOCAB_SIZE, "no row has clear gaps: ids are not compared"
    assert all(len(set(ids_K)) == k for ids_K in score.top.ids_NK.tolist())
    np.testing.assert_array_equal(score.top.ids_NK[clear_N], ordered_NK[clear_N, :k])


def expect_listed(log_p_NV: np.ndarray, request: ScoreRequest, score: Score) -> None:
    """Assert that the given tokens come in their order, then the likeliest others.

    `log_p_NV` is -inf for a token that is no outcome.
    """
    assert score.top is not None and request.given_NK is not None
    given = request.given_NK.shape[1]
    np.testing.assert_array_equal(score.top.ids_NK[:, :given], request.given_NK)
    own_NK = np.take_along_axis(log_p_NV, score.top.ids_NK, axis=1)
    np.testing.assert_allclose(score.top.logprobs_NK, own_NK, atol=1e-4)
    others_NV = log_p_NV.copy()
    np.put_along_axis(others_NV, request.given_NK, -np.inf, axis=1)
    best_NK = -np.sort(-others_NV, axis=1)[:, : request.top_k]
    np.testing.assert_allclose(score.top.logprobs_NK[:, given:], best_NK, atol=1e-4)
    assert score.top.k == request.listed


def some_ids(positions: int, k: int, seed: int) -> np.ndarray:
    """Distinct ids in each row."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(VOCAB_SIZE)[:k] for _ in range(positions)]
    return np.stack(rows).astype(np.int32)


def test_given_and_likeliest_tokens_beside_requests_that_want_none(party: Party) -> None:
    """Listed tokens have the log-probs of the first T of each request."""
    shared_T = prompt(70, 4)  # long enough to be run once
    requests = [
        ScoreRequest(
            tokens_T=tokens_T, start=start, temperatures=temperatures,
            given_NK=None if not given else some_ids(len(tokens_T) - start, given, seed),
            top_k=top_k,
        )
        for seed, (tokens_T, start, temperatures, given, top_k) in enumerate(
            [
                (prompt(40, 1), 17, (0.5,), 3, 0),
                (prompt(40, 2), 17, (0.5,), 0, 3),
                (prompt(90, 2), 60, (0.7, 1.0), 0, 0),
                (prompt(60, 3), 1, (0.7, 1.0), 5, 4),
                (prompt(60, 4), 1, (0.7, 1.0), 0, 7),
                (prompt(50, 5), 20, (1.0,), 6, 0),
                (prompt(50, 6), 20, (1.0, 1.5), 1, 3),
                (prompt(50, 7), 20, (1.0, 1.5), 0, 5),
                (prompt(2, 7), 1, (1.5, 0.5), 4, 4),
                (prompt(2, 8), 1, (1.5, 0.5), 0, 4),
                (np.concatenate([shared_T, prompt(30, 8)]), 70, (1.5,), 2, 1),
                (np.concatenate([shared_T, prompt(20, 9)]), 70, (0.7, 1.0), 7, 0),
                (np.concatenate([shared_T, prompt(15, 9)]), 70, (0.7,), 0, 6),
                (np.concatenate([shared_T, prompt(25, 10)]), 70, (0.7,), 0, 0),
                # All of the vocabulary, each token by its own id.
                (prompt(12, 11), 6, (0.7,), VOCAB_SIZE - 3, 3),
                (ids(5, VOCAB_SIZE - 1, 0, VOCAB_SIZE - 1), 1, (0.7,), 0, VOCAB_SIZE),
            ]
        )
    ]  # fmt: skip
    [alone] = [request for request in requests if request.temperatures == (1.0,)]
    scores = [party.run(party.engine.score(asked)) for asked in (requests, [alone])]
    for request, score in zip([*requests, alone], [*scores[0], *scores[1]], strict=True):
        expect_naive_logprobs(party.model, request, score)
        if request.given_NK is not None:
            t = request.temperatures[0]
            log_p_NV = naive_distribution(party.model, request.tokens_T, request.start, t)
            expect_listed(log_p_NV, request, score)
        elif request.top_k:
            expect_the_likeliest(party.model, request, score)
        else:
            assert score.top is None


def test_hidden_states_beside_requests_that_want_none(party: Party) -> None:
    """Mixed temperatures, lengths and starts; twice, the second time with cached prefixes."""
    shared_T = prompt(70, 4)
    tails = [prompt(20 + 10 * i, 5 + i) for i in range(3)]
    requests = [
        states_request(2, 1, (0.7,)), states_request(40, 17, TEMPERATURES),
        states_request(90, 89, (1.5, 0.5)), states_request(60, 10, (1.0,)),
        replace(states_request(50, 20, (0.5,)), states_N=None),
        replace(states_request(45, 15, (0.7, 1.0)), top_k=3),
        *(
            replace(states_request(70 + len(tail_T), 70), tokens_T=np.append(shared_T, tail_T))
            for tail_T in tails
        ),
    ]  # fmt: skip
    for _ in range(2):
        scores = party.run(party.engine.score(requests))
        for request, score in zip(requests, scores, strict=True):
            for t, logprobs in zip(
                request.temperatures, score.logprobs_by_temperature, strict=True
            ):
                expected = naive_logprobs(party.model, request.tokens_T, request.start, t)
                np.testing.assert_allclose(logprobs, expected, atol=1e-4)
            if request.states_N is None:
                assert score.states is None
            else:
                expect_states(party.model, request, score)
    assert party.run(party.engine.info()).longest_states is None


def test_invalid_given_tokens_are_refused(party: Party) -> None:
    tokens_T, ids_NK = prompt(9), some_ids(5, 3, 0)
    asked: dict[str, Any] = {"tokens_T": tokens_T, "start": 4, "temperatures": (0.7,)}
    outside_NK = np.where(ids_NK == ids_NK[2, 1], VOCAB_SIZE, ids_NK)
    with pytest.raises(DataError):
        party.run(party.engine.score([ScoreRequest(**asked, given_NK=outside_NK)]))
    with refuses(DataError, "ScoreRequest.top_k"):
        too_many = ScoreRequest(**asked, given_NK=ids_NK, top_k=VOCAB_SIZE - 2)
        party.run(party.engine.score([too_many]))
    with refuses(DataError, "ScoreRequest.given_NK"):
        ScoreRequest(**asked, given_NK=ids_NK[1:])


def expect_likeliest_where_sampled(log_p_NV: np.ndarray, sample: Sample, top_k: int) -> None:
    """Assert the likeliest tokens of each sampled one; `log_p_NV` is -inf for no outcome."""
    assert sample.top_ids_TK is not None
    assert sample.top_ids_TK.shape == (len(sample.tokens_T), top_k)
    named_TK = np.take_along_axis(log_p_NV, sample.top_ids_TK, axis=1)
    np.testing.assert_allclose(named_TK, -np.sort(-log_p_NV, axis=1)[:, :top_k], atol=1e-4)
    assert all(len(set(ids_K)) == top_k for ids_K in sample.top_ids_TK.tolist())


def test_the_likeliest_come_with_each_sampled_token(party: Party) -> None:
    requests = [
        replace(
            ask(prompt(5 + 9 * i, i), TrainSampling(temperature=t, max_new_tokens=12 + i)),
            num_samples=2,
            top_k=top_k,
        )
        for i, (t, top_k) in enumerate([(0.5, 3), (0.7, 0), (1.0, 7), (1.5, 1)])
    ]
    requests.append(
        replace(ask(prompt(30), EvalSampling(temperature=0.0, max_new_tokens=5)), top_k=4)
    )
    for request, samples in zip(requests, party.generate(*requests), strict=True):
        for sample in samples:
            expect_like_naive(party.model, request, sample)
            if not request.top_k:
                assert sample.top_ids_TK is None
                continue
            tokens_T, start = chain(request.prompt_tokens_T, sample), len(request.prompt_tokens_T)
            log_p_NV = naive_distribution(party.model, tokens_T, start, 1.0)
            expect_likeliest_where_sampled(log_p_NV, sample, request.top_k)
    too_many = replace(requests[0], top_k=VOCAB_SIZE + 1)
    with refuses(DataError, "GenerateRequest.top_k"):
        party.generate(too_many)


def test_the_stop_event_counts_as_one_token_of_the_vocabulary(stopping: Party) -> None:
    outcomes = VOCAB_SIZE - len(STOPS.ids) + 1
    scored = ScoreRequest(tokens_T=prompt(9), start=4, temperatures=(0.7,), top_k=outcomes)
    sampling = TrainSampling(temperature=0.7, max_new_tokens=4)
    sampled = replace(ask(prompt(9), sampling), top_k=outcomes)
    [score] = stopping.run(stopping.engine.score([scored]))
    [[sample]] = stopping.generate(sampled)
    assert score.top is not None and sample.top_ids_TK is not None
    expected = sorted({*range(VOCAB_SIZE)} - {*STOPS.ids[1:]})
    for ids_NK in (score.top.ids_NK, sample.top_ids_TK):
        np.testing.assert_array_equal(np.sort(ids_NK, axis=1), [expected] * len(ids_NK))
    with refuses(DataError, "ScoreRequest.top_k"):
        stopping.run(stopping.engine.score([replace(scored, top_k=outcomes + 1)]))
    with refuses(DataError, "GenerateRequest.top_k"):
        stopping.generate(replace(sampled, top_k=outcomes + 1))


def test_decode_score_with_mixed_temperatures_lengths_and_starts(party: Party) -> None:
    requests = [
        ScoreRequest(tokens_T=prompt(length, length), start=start, temperatures=temperatures)
        for length, start, temperatures in [
            (2, 1, (0.7,)),
            (40, 33, TEMPERATURES),
            (CONTEXT, CONTEXT - 3, (1.5,)),
            (90, 89, (0.5, 1.0)),
        ]
    ]
    busy = ask(prompt(12), TrainSampling(temperature=1.5, max_new_tokens=30), num_samples=3)

    async def beside_generation() -> tuple[list[Sample], list[Score]]:
        return await asyncio.gather(
            party.engine.generate(busy), party.engine.decode_score(requests)
        )

    samples, scores = party.run(beside_generation())
    for request, score in zip(requests, scores, strict=True):
        expect_naive_logprobs(party.model, request, score)
    for sample in samples:
        expect_like_naive(party.model, busy, sample)


def test_decode_score_of_every_token_is_a_distribution(party: Party) -> None:
    prompt_T = prompt(12)
    every = np.column_stack([np.tile(prompt_T, (VOCAB_SIZE, 1)), np.arange(VOCAB_SIZE)])
    requests = [
        ScoreRequest(tokens_T=tokens_T.astype(np.int32), start=12, temperatures=(0.7,))
        for tokens_T in every
    ]
    scores = party.run(party.engine.decode_score(requests))
    assert np.exp([s.logprobs_by_temperature[0][0] for s in scores]).sum() == pytest.approx(1)


def test_nothing_to_score_is_no_score(party: Party) -> None:
    assert party.run(party.engine.score([])) == party.run(party.engine.decode_score([])) == []


def test_train_sampling_is_softmax_of_z_over_t(party: Party) -> None:
    count, prompt_T = 4000, prompt(12)
    request = ask(prompt_T, TrainSampling(temperature=0.7, max_new_tokens=1), num_samples=count)
    [samples] = party.generate(request)
    observed_V = np.bincount([s.tokens_T[0] for s in samples], minlength=VOCAB_SIZE)
    every = np.column_stack([np.tile(prompt_T, (VOCAB_SIZE, 1)), np.arange(VOCAB_SIZE)])
    expected_V = count * np.exp(
        [naive_logprobs(party.model, tokens_T, len(prompt_T), 0.7)[0] for tokens_T in every]
    )
    common_V = expected_V >= 5
    observed = np.append(observed_V[common_V], observed_V[~common_V].sum())
    expected = np.append(expected_V[common_V], expected_V[~common_V].sum())
    chi_square = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert freedom > 10, "the test's distribution is too peaked to test anything"
    # Mean `freedom`, variance twice that; six sigma is a wrong distribution, not bad luck.
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom), (chi_square, freedom)


def test_greedy_is_the_argmax_loop(party: Party) -> None:
    prompt_T = prompt(9)
    tokens_T = prompt_T
    with torch.no_grad():
        for _ in range(25):
            ids_1T = torch.from_numpy(tokens_T.astype(np.int64))[None]
            best = int(party.model(input_ids=ids_1T, use_cache=False).logits[0, -1].argmax())
            tokens_T = np.append(tokens_T, np.int32(best))
            if best == EOS:
                break
    [[sample]] = party.generate(ask(prompt_T, EvalSampling(temperature=0.0, max_new_tokens=25)))
    np.testing.assert_array_equal(chain(prompt_T, sample), tokens_T)


def test_samples_do_not_depend_on_batch_mates(party: Party) -> None:
    party.needs("seeds")
    sampling = TrainSampling(temperature=1.0, max_new_tokens=40)
    request = ask(prompt(33), sampling, num_samples=4, seed=5)
    [alone] = party.generate(request)

    async def in_company() -> list[Sample]:
        early = [
            asyncio.create_task(party.engine.generate(ask(prompt(n, n), sampling, seed=n)))
            for n in (3, 60, 33)
        ]
        await asyncio.sleep(0.02)
        mine = asyncio.create_task(party.engine.generate(request))
        twin = asyncio.create_task(
            party.engine.generate(ask(prompt(33), sampling, num_samples=6, seed=6))
        )
        await asyncio.gather(*early, twin)
        return await mine

    for before, after in zip(alone, party.run(in_company()), strict=True):
        np.testing.assert_array_equal(before.tokens_T, after.tokens_T)
        np.testing.assert_allclose(before.logprobs_T, after.logprobs_T, atol=1e-5)
    assert len({tuple(sample.tokens_T) for sample in alone}) == 4
    # Sample g depends on (seed, g) only, not on the number of samples.
    [[first]] = party.generate(ask(prompt(33), sampling, num_samples=1, seed=5))
    np.testing.assert_array_equal(first.tokens_T, alone[0].tokens_T)


def test_rows_end_at_eos_or_length(party: Party) -> None:
    limit = 60
    request = ask(prompt(10), TrainSampling(temperature=1.5, max_new_tokens=limit), num_samples=100)
    [samples] = party.generate(request)
    reasons = {sample.stop_reason for sample in samples}
    assert reasons == {StopReason.EOS, StopReason.LENGTH}
    for sample in samples:
        assert EOS not in sample.tokens_T[:-1]
        if sample.stop_reason is StopReason.EOS:
            assert sample.tokens_T[-1] == EOS
        else:
            assert len(sample.tokens_T) == limit and sample.tokens_T[-1] != EOS


def test_the_context_end_stops_a_row(party: Party) -> None:
    request = ask(
        prompt(CONTEXT - 3), TrainSampling(temperature=1.0, max_new_tokens=99), num_samples=8
    )
    [samples] = party.generate(request)
    for sample in samples:
        assert len(sample.tokens_T) <= 3
        if sample.stop_reason is StopReason.LENGTH:
            assert len(sample.tokens_T) == 3
        expect_like_naive(party.model, request, sample)


@pytest.mark.parametrize(
    "prompt_T",
    [prompt(CONTEXT), np.array([5, VOCAB_SIZE], dtype=np.int32), np.array([-1, 5], dtype=np.int32)],
)
def test_a_prompt_that_cannot_be_run_is_refused(party: Party, prompt_T: np.ndarray) -> None:
    with pytest.raises(DataError):
        party.generate(ask(prompt_T, TrainSampling(temperature=1.0, max_new_tokens=5)))


def test_tokens_that_cannot_be_scored_are_refused(party: Party) -> None:
    too_long = ScoreRequest(tokens_T=prompt(CONTEXT + 1), start=1, temperatures=(1.0,))
    bad_id = ScoreRequest(
        tokens_T=np.array([3, VOCAB_SIZE + 7], dtype=np.int32), start=1, temperatures=(1.0,)
    )
    for method in (party.engine.score, party.engine.decode_score):
        with pytest.raises(DataError):
            party.run(method([too_long]))
        with pytest.raises(DataError):
            party.run(method([bad_id]))


def test_top_k_and_top_p_truncate_but_report_the_whole_distribution(party: Party) -> None:
    prompt_T = prompt(12)
    with torch.no_grad():
        logits_V = party.model(input_ids=torch.tensor(prompt_T[None].astype(np.int64))).logits[
            0, -1
        ]
    p_V = torch.softmax(logits_V / 1.2, dim=-1)
    order = p_V.argsort(descending=True).tolist()
    mass = p_V[order].cumsum(0).tolist()
    nucleus = set(order[: 1 + sum(m < 0.6 for m in mass)])
    assert 2 <= len(nucleus) < VOCAB_SIZE // 2
    cut_k = EvalSampling(temperature=1.2, max_new_tokens=1, top_k=3)
    cut_p = EvalSampling(temperature=1.2, max_new_tokens=1, top_p=0.6)
    by_k, by_p = party.generate(
        ask(prompt_T, cut_k, num_samples=150), ask(prompt_T, cut_p, num_samples=400)
    )
    assert {int(s.tokens_T[0]) for s in by_k} == set(order[:3])
    assert {int(s.tokens_T[0]) for s in by_p} == nucleus
    for sample in by_k + by_p:
        assert sample.logprobs_T[0] == pytest.approx(p_V[sample.tokens_T[0]].log().item(), abs=1e-4)


def test_new_weights_in_the_middle_of_generation(engine_at_version_0: Party) -> None:
    party = engine_at_version_0
    models = (party.model, party.other_model)
    # Different lengths and shared prompts: every kind of row has its context recomputed.
    requests = [
        replace(
            ask(prompt(n, n), TrainSampling(temperature=0.7, max_new_tokens=180), num_samples=6),
            seed=n,
            top_k=3,
        )
        for n in (4, 50, 75)
    ]

    async def load_after(delay: float) -> list[list[Sample]]:
        tasks = [asyncio.create_task(party.engine.generate(request)) for request in requests]
        await asyncio.sleep(delay)
        late = asyncio.create_task(party.engine.generate(requests[0]))
        await party.engine.load_weights(bundle(party.other_model), 1)
        assert (await party.engine.info()).weight_version == 1
        return [*await asyncio.gather(*tasks), await late]

    for delay in (0.03, 0.1, 0.3, 0.01, 1.0, 3.0):  # the last are for a slow machine
        groups = party.run(load_after(delay))
        mixed = sum(len(set(s.versions_T.tolist())) == 2 for group in groups for s in group)
        if mixed >= 3:
            break
        party.load(party.model, 0)
    assert mixed >= 3, "no load fell into the middle of a generation"
    for request, group in zip([*requests, requests[0]], groups, strict=True):
        for sample in group:
            assert (np.diff(sample.versions_T) >= 0).all()
            tokens_T = chain(request.prompt_tokens_T, sample)
            start = len(request.prompt_tokens_T)
            of_version = [naive_distribution(model, tokens_T, start, 0.7) for model in models]
            log_p_NV = np.where(sample.versions_T[:, None] == 0, *of_version)
            expected_T = np.take_along_axis(log_p_NV, sample.tokens_T[:, None], axis=1)[:, 0]
            np.testing.assert_allclose(sample.logprobs_T, expected_T, atol=1e-4)
            expect_likeliest_where_sampled(log_p_NV, sample, request.top_k)


def test_new_weights_are_used_for_scoring_and_prefixes(engine_at_version_0: Party) -> None:
    party = engine_at_version_0
    request = ask(prompt(60), TrainSampling(temperature=1.0, max_new_tokens=10), num_samples=2)
    score = ScoreRequest(tokens_T=prompt(50), start=20, temperatures=(0.5,))
    party.generate(request)
    party.load(party.other_model, 7)
    [samples] = party.generate(request)
    for sample in samples:
        assert (sample.versions_T == 7).all()
        expect_like_naive(party.other_model, request, sample)
    expected = naive_logprobs(party.other_model, score.tokens_T, 20, 0.5)
    for method in (party.engine.score, party.engine.decode_score):
        [scored] = party.run(method([score]))
        np.testing.assert_allclose(scored.logprobs_by_temperature[0], expected, atol=1e-4)
        assert scored.version == (7 if method == party.engine.score else None)


def test_canaries_see_other_weights_and_the_old_ones_again(engine_at_version_0: Party) -> None:
    """The answers of a frozen model do not depend on the other rows of a batch."""
    party = engine_at_version_0
    info = party.run(party.engine.info())
    rows = CanaryRows.of(info, 0.7, given=4, top_k=2)

    def answer(filler: int) -> CanaryScores:
        return rows.answer(party.run(party.engine.score(rows.with_filler(filler))))

    first = CanaryAnswers(info, rows, [answer(filler) for filler in FILLER_ROWS])
    assert first.measured.largest < 1e-4 and first.answers[0].listed_N.size
    assert not first.judge(answer(3)).why
    party.load(party.other_model, 1)
    assert "other weights" in first.judge(answer(0)).why
    party.load(party.model, 0)
    assert not first.judge(answer(0)).why


def test_a_bundle_that_does_not_fit_leaves_the_old_weights(party: Party) -> None:
    party.needs("loads")
    own = dict(party.other_model.named_parameters())
    first, *_, last = own
    bad = {
        "stray.weight": {**own, "stray.weight": torch.zeros(2)},
        last: {name: tensor for name, tensor in own.items() if name != last},
        first: {**own, first: torch.zeros(3, 3)},
    }
    request = ask(prompt(20), TrainSampling(temperature=1.0, max_new_tokens=10), num_samples=2)
    for offender, tensors in bad.items():
        with pytest.raises(EngineError) as refused:
            party.run(party.engine.load_weights(shared(tensors), 1))
        assert offender in str(refused.value)
    assert party.run(party.engine.info()).weight_version == 0
    [samples] = party.generate(request)
    for sample in samples:
        expect_like_naive(party.model, request, sample)


def test_abort_ends_everything_in_flight(party: Party) -> None:
    party.needs("aborts")
    sampling = TrainSampling(temperature=0.7, max_new_tokens=240)
    request = replace(ask(prompt(6), sampling, num_samples=300, seed=3), top_k=3)

    async def abort_soon() -> tuple[int, list[Sample]]:
        task = asyncio.create_task(party.engine.generate(request))
        await asyncio.sleep(0.05)
        return await party.engine.abort(), await task

    count, samples = party.run(abort_soon())
    aborted = [sample for sample in samples if sample.stop_reason is StopReason.ABORTED]
    # A server's count includes samples that ended by themselves meanwhile.
    assert len(samples) == 300 >= count >= len(aborted) > 0
    for sample in aborted:
        assert len(sample.tokens_T) == len(sample.logprobs_T) == len(sample.versions_T) < 240
    for sample in samples[::60]:
        if len(sample.tokens_T):
            expect_like_naive(party.model, request, sample)
            tokens_T, start = chain(request.prompt_tokens_T, sample), len(request.prompt_tokens_T)
            log_p_NV = naive_distribution(party.model, tokens_T, start, 0.7)
            expect_likeliest_where_sampled(log_p_NV, sample, request.top_k)
    assert party.run(party.engine.abort()) == 0


def test_nan_weights_are_an_error_and_not_a_hang(engine_at_version_0: Party) -> None:
    party = engine_at_version_0
    party.needs("NaN weights")
    request = ask(prompt(20), TrainSampling(temperature=1.0, max_new_tokens=200), num_samples=4)
    poison = {name: tensor * float("nan") for name, tensor in party.model.named_parameters()}

    async def poison_soon() -> None:
        task = asyncio.create_task(party.engine.generate(request))
        await asyncio.sleep(0.01)
        await party.engine.load_weights(shared(poison), 1)
        await task

    with pytest.raises(EngineError):
        party.run(poison_soon())
    for top_k in (0, 3):
        with pytest.raises(EngineError):
            party.run(
                party.engine.score(
                    [ScoreRequest(tokens_T=prompt(10), start=2, temperatures=(1.0,), top_k=top_k)]
                )
            )
    party.load(party.model, 0)
    [samples] = party.generate(request)
    for sample in samples:
        expect_like_naive(party.model, request, sample)


def test_info_describes_the_model(party: Party) -> None:
    info = party.run(party.engine.info())
    assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, CONTEXT)
    assert (info.weight_version, info.dtype) == (0, "float32")
    assert info.eos_token_ids in ((EOS,), None)
    assert info.tokenizer in (probe_tokenizer(load_tokenizer(party.model_dir)), None)
    assert info.kind and info.model and info.temperature_scaling


# Enough that samples of random models stop.
STOPS = StopTokens(ids=(1, *range(20, 45)), one_event=True)


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def stopping(
    request: pytest.FixtureRequest, directories: list[str], runner: asyncio.Runner
) -> Iterator[Party]:
    """Engine for which all stop tokens are one event, on the same server if it needs one."""
    model = load_causal_lm(directories[0], dtype=torch.float32, device="cpu").eval()
    if request.param == "embedded":
        engine: Any = EmbeddedEngine(
            model_path=directories[0], device="cpu", threads=1, stops=STOPS
        )
        yield Party(engine, directories[0], model, model, runner, {})
        return
    server = request.getfixturevalue("hosted").server
    engine = ExternalSglangEngine(
        url=server.url, api_key=server.api_key, request_deadline_s=60, stops=STOPS
    )
    yield Party(engine, directories[0], model, model, runner, {})
    runner.run(engine.close())


def outcome_logprobs(
    model: PreTrainedModel, tokens_T: np.ndarray, start: int, temperature: float
) -> np.ndarray:
    """Log-probs of every token; each stop token has that of all stop tokens together."""
    log_p_NV = naive_distribution(model, tokens_T, start, temperature).copy()
    stops = list(STOPS.ids)
    log_p_NV[:, stops] = np.logaddexp.reduce(log_p_NV[:, stops], axis=1)[:, None]
    return log_p_NV


def expect_outcomes(
    model: PreTrainedModel, tokens_T: np.ndarray, start: int, t: float, found_N: np.ndarray
) -> None:
    log_p_NV = outcome_logprobs(model, tokens_T, start, t)
    expected_N = np.take_along_axis(log_p_NV, tokens_T[start:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found_N, expected_N, atol=1e-4)


def test_samples_end_at_any_stop_token_with_the_log_prob_of_all(stopping: Party) -> None:
    requests = [
        ask(prompt(5 + i, i), TrainSampling(temperature=t, max_new_tokens=30), num_samples=4)
        for i, t in enumerate(TEMPERATURES)
    ]
    ends = set()
    for request, samples in zip(requests, stopping.generate(*requests), strict=True):
        for sample in samples:
            stops_T = np.isin(sample.tokens_T, STOPS.ids)
            assert stops_T.tolist() == [False] * (len(stops_T) - 1) + [
                sample.stop_reason is StopReason.EOS
            ]
            ends |= set(sample.tokens_T[stops_T].tolist())
            tokens_T, start = chain(request.prompt_tokens_T, sample), len(request.prompt_tokens_T)
            t = request.sampling.temperature
            expect_outcomes(stopping.model, tokens_T, start, t, sample.logprobs_T)
    assert len(ends) > 2


def test_given_stop_tokens_have_the_log_prob_of_all(stopping: Party) -> None:
    requests = [
        ScoreRequest(
            tokens_T=np.append(prompt(20, seed), np.int32(stop)), start=start,
            temperatures=temperatures, top_k=3,
        )
        for seed, (stop, start, temperatures) in enumerate(
            [(1, 20, (0.7, 1.0)), (44, 12, (1.5,)), (30, 1, (0.5, 1.0)), (50, 4, (1.0,))]
        )
    ]  # fmt: skip
    scores = stopping.run(stopping.engine.score(requests))
    decoded = stopping.run(stopping.engine.decode_score(requests[:1]))
    for request, score in zip([*requests, requests[0]], [*scores, *decoded], strict=True):
        for t, found_N in zip(request.temperatures, score.logprobs_by_temperature, strict=True):
            expect_outcomes(stopping.model, request.tokens_T, request.start, t, found_N)
    outcomes = [v for v in range(VOCAB_SIZE) if v not in STOPS.ids[1:]]
    for request, score in zip(requests, scores, strict=True):
        assert score.top is not None
        log_p_NV = outcome_logprobs(
            stopping.model, request.tokens_T, request.start, request.temperatures[0]
        )
        best_NK = np.sort(log_p_NV[:, outcomes], axis=1)[:, :-4:-1]
        np.testing.assert_allclose(score.top.logprobs_NK, best_NK, atol=1e-4)
        assert np.isin(score.top.ids_NK, outcomes).all()
        assert (score.top.ids_NK == STOPS.ids[0]).any(), "the event is likelier than most tokens"
        named_NK = np.take_along_axis(log_p_NV, score.top.ids_NK, axis=1)
        np.testing.assert_allclose(score.top.logprobs_NK, named_NK, atol=1e-4)


def outcomes_alone(log_p_NV: np.ndarray) -> np.ndarray:
    """Log-probs without the tokens that are no outcome of their own."""
    log_p_NV = log_p_NV.copy()
    log_p_NV[:, list(STOPS.ids[1:])] = -np.inf
    return log_p_NV


def test_a_given_stop_token_is_all_of_them_and_so_is_the_likeliest(stopping: Party) -> None:
    outcomes = np.array([v for v in range(VOCAB_SIZE) if v not in STOPS.ids], np.int32)
    requests = []
    for seed, (with_event, top_k, temperatures) in enumerate(
        [(True, 0, (0.7, 1.0)), (True, 3, (1.5,)), (False, 4, (0.5, 1.0)), (False, 0, (1.0,))]
    ):
        tokens_T = np.append(prompt(20, seed), np.int32(STOPS.ids[seed]))
        rng = np.random.default_rng(seed)
        given_NK = np.stack([rng.permutation(outcomes)[:5] for _ in range(len(tokens_T) - 7)])
        if with_event:
            given_NK[::2, 2] = STOPS.ids[0]
        requests.append(
            ScoreRequest(
                tokens_T=tokens_T, start=7, temperatures=temperatures, given_NK=given_NK,
                top_k=top_k,
            )
        )  # fmt: skip
    for request, score in zip(requests, stopping.run(stopping.engine.score(requests)), strict=True):
        t = request.temperatures[0]
        log_p_NV = outcome_logprobs(stopping.model, request.tokens_T, request.start, t)
        expect_listed(outcomes_alone(log_p_NV), request, score)


def test_stopping_is_one_of_the_likeliest_where_a_token_is_sampled(stopping: Party) -> None:
    requests = [
        replace(
            ask(prompt(5 + i, i), TrainSampling(temperature=t, max_new_tokens=30), num_samples=2),
            top_k=4,
        )
        for i, t in enumerate(TEMPERATURES)
    ]
    likely = []
    for request, samples in zip(requests, stopping.generate(*requests), strict=True):
        for sample in samples:
            tokens_T, start = chain(request.prompt_tokens_T, sample), len(request.prompt_tokens_T)
            t = request.sampling.temperature
            log_p_NV = outcome_logprobs(stopping.model, tokens_T, start, t)
            expect_likeliest_where_sampled(outcomes_alone(log_p_NV), sample, 4)
            assert sample.top_ids_TK is not None
            likely.append((sample.top_ids_TK == STOPS.ids[0]).any())
    assert any(likely)  # not in each: a sample may end at once by an unlikely stop


def test_info_has_the_stop_tokens(stopping: Party) -> None:
    info = stopping.run(stopping.engine.info())
    assert (info.eos_token_ids, info.stop_event) == (STOPS.ids, STOPS.ids)
