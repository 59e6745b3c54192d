"""Features of the embedded engine alone: its thread, its caches, the supported models."""

import asyncio
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

from actors.embedded import scoring
from actors.embedded.decoding import DecodeBatch
from actors.embedded.engine import EmbeddedEngine
from actors.embedded.scoring import ScoreItem, plan
from actors.embedded.token_sampling import draw
from distill.engine import GenerateRequest, Sample, ScoreRequest
from distill.errors import ConfigError, EngineError
from distill.models.shared_prefix import MOST_MASK, SharedPrefixModel
from distill.sampling import Sampling, TrainSampling
from tests.naive import naive_logprobs
from tests.refusals import refuses
from tests.tiny import VOCAB_SIZE, tiny_model_dir
from tests.waiting import DEADLINE_S
from tests.weights import shared


@pytest.fixture
def engine(tmp_path: Path) -> EmbeddedEngine:
    return start(tiny_model_dir(tmp_path, seed=1, context_length=512))


def start(model_dir: str, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model_path=model_dir, device="cpu", threads=1, **settings)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, size=length).astype(np.int32)


def ask(
    length: int, new: int, *, samples: int = 1, sampling: Sampling | None = None
) -> GenerateRequest:
    return GenerateRequest(
        prompt_tokens_T=prompt(length, length),
        sampling=sampling or TrainSampling(temperature=0.8, max_new_tokens=new),
        num_samples=samples,
        seed=length,
    )


async def generate_all(
    engine: EmbeddedEngine, requests: list[GenerateRequest]
) -> list[list[Sample]]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def asked(engine: EmbeddedEngine) -> None:
    """Wait until the engine has a request."""
    while not await engine.queue_length():
        await asyncio.sleep(0)


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WIDE: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 96}
_WINDOWED: dict[str, Any] = {**_WIDE, "sliding_window": 8}
ARCHITECTURES: list[PreTrainedConfig] = [
    LlamaConfig(**_WIDE),
    MistralConfig(**_WINDOWED),
    Gemma3TextConfig(**_WINDOWED, head_dim=16, layer_types=["sliding_attention", "full_attention"]),
    GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    # Attention sinks, and position biases instead of positions: our attention has neither.
    GptOssConfig(**_WINDOWED, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
    BloomConfig(**_SIZES, n_layer=2, n_head=4),
]


@pytest.mark.parametrize("config", ARCHITECTURES, ids=lambda config: config.model_type)
async def test_every_architecture_is_scored_like_its_own_forward(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)  # otherwise attention and mistakes in it hardly matter
    model.generation_config.eos_token_id = 1
    model.save_pretrained(tmp_path)
    engine = start(str(tmp_path))
    requests = [ask(length, 25, samples=2) for length in (3, 40, 17)]
    for request, samples in zip(requests, await generate_all(engine, requests), strict=True):
        chains = [np.concatenate([request.prompt_tokens_T, s.tokens_T]) for s in samples]
        first = len(request.prompt_tokens_T)
        scores = await engine.score(
            [ScoreRequest(tokens_T=c, start=first, temperatures=(0.8,)) for c in chains]
        )
        for sample, tokens_T, score in zip(samples, chains, scores, strict=True):
            expected_T = naive_logprobs(model, tokens_T, first, 0.8)
            for given_T in (sample.logprobs_T, score.logprobs_by_temperature[0]):
                np.testing.assert_allclose(given_T, expected_T, atol=1e-4)


async def test_a_token_of_probability_zero_has_a_finite_log_prob(tmp_path: Path) -> None:
    engine = start(tiny_model_dir(tmp_path, seed=1, sharpness=400))
    requests = [
        ScoreRequest(tokens_T=np.append(prompt(9), token), start=9, temperatures=(0.3,))
        for token in range(20)
    ]
    scores = [await engine.decode_score(requests), await engine.score(requests)]
    decoded, scored = [[float(s.logprobs_by_temperature[0][0]) for s in found] for found in scores]
    assert min(scored) < -110, "exp of it is not 0 in fp32: sharpen the model"
    np.testing.assert_allclose(decoded, scored, rtol=1e-5)


async def test_abort_ends_decode_scoring_with_an_error(engine: EmbeddedEngine) -> None:
    request = ScoreRequest(tokens_T=prompt(400), start=1, temperatures=(0.5,))
    task = asyncio.create_task(engine.decode_score([request]))
    await asked(engine)
    await engine.abort()
    with pytest.raises(EngineError):
        await task


def test_more_rows_than_fit_wait_and_get_the_same_tokens(tmp_path: Path) -> None:
    model_dir = tiny_model_dir(tmp_path, seed=1)
    # Different lengths: a row that ends is replaced by a waiting one between others.
    requests = [ask(length, new, samples=5) for length, new in ((3, 7), (30, 40), (9, 22), (5, 3))]
    wide, narrow = (
        asyncio.run(generate_all(start(model_dir, max_running_requests=rows), requests))
        for rows in (64, 4)
    )
    for one, other in zip(chain(*wide), chain(*narrow), strict=True):
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-5)


def test_samples_share_a_prompt(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    run = SharedPrefixModel.run

    def counted(self: SharedPrefixModel, tokens: Any, *rest: Any) -> torch.Tensor:
        seen.append(tokens.shape)
        return run(self, tokens, *rest)

    monkeypatch.setattr(SharedPrefixModel, "run", counted)
    asyncio.run(generate_all(engine, [ask(90, 4, samples=8), ask(90, 4, samples=3)]))
    assert seen[0] == (1, 90)
    assert all(shape[1] == 1 for shape in seen[1:]), seen


async def test_a_cancelled_caller_leaves_nothing_behind(engine: EmbeddedEngine) -> None:
    long = asyncio.create_task(engine.generate(ask(20, 480, samples=32)))
    await asked(engine)
    long.cancel()
    await engine.generate(ask(5, 3))
    assert await engine.abort() == 0, "something of it is still under way"


def test_callers_see_failures(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, all_in = threading.Event(), threading.Event()

    def explode(batch: DecodeBatch, version: int) -> None:
        inside.set()
        assert all_in.wait(DEADLINE_S)
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(DecodeBatch, "step", explode)

    async def everything() -> tuple[object, ...]:
        return await asyncio.gather(
            engine.generate(ask(9, 5)), engine.generate(ask(10, 5)),
            engine.score([ScoreRequest(tokens_T=prompt(9), start=1, temperatures=(1.0,))]),
            asyncio.create_task(load_later()), return_exceptions=True,
        )  # fmt: skip

    async def load_later() -> None:
        await asyncio.to_thread(inside.wait)
        asyncio.get_running_loop().call_soon(all_in.set)  # once this has come in, too
        await engine.load_weights(shared({}), 1)

    for result in asyncio.run(asyncio.wait_for(everything(), DEADLINE_S)):
        assert isinstance(result, EngineError) and "out of memory" in str(result)
    for call in (engine.info(), engine.generate(ask(9, 5)), engine.abort()):
        with pytest.raises(EngineError):
            asyncio.run(call)


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    poison = 5
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**_WIDE, tie_word_embeddings=False))
    model.get_input_embeddings().weight.data[poison] = float("nan")
    model.save_pretrained(tmp_path)
    engine = start(str(tmp_path))
    healthy = [ask(length, 60, samples=2) for length in (30, 8)]
    poisoned_T = np.append(prompt(40), np.int32(poison))
    sick = GenerateRequest(
        prompt_tokens_T=poisoned_T, sampling=healthy[0].sampling, num_samples=2, seed=0
    )

    async def side_by_side() -> list[list[Sample]]:
        first = asyncio.create_task(engine.generate(healthy[0]))
        await asked(engine)
        with pytest.raises(EngineError):
            await engine.generate(sick)
        assert not first.done(), "the poisoned request came too late to matter"
        return [await first, await engine.generate(healthy[1])]

    together = asyncio.run(side_by_side())
    alone = asyncio.run(generate_all(engine, healthy))
    for one, other in zip(chain(*together), chain(*alone), strict=True):
        assert poison not in one.tokens_T, "choose other seeds"
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)


def test_bfloat16_runs(tmp_path: Path) -> None:
    engine = start(tiny_model_dir(tmp_path, seed=1), dtype="bfloat16")
    [[sample]] = asyncio.run(generate_all(engine, [ask(9, 20)]))
    assert np.isfinite(sample.logprobs_T).all()
    with refuses(ConfigError, "dtype"):
        start(str(tmp_path), dtype="int8")


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 64, 100, 4096, 5001])
def test_draw_inverts_the_cdf(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    weights_V = generator.random(vocab_size) * (generator.random(vocab_size) < 0.7)
    weights_V[generator.integers(vocab_size)] = 0.5  # at least one
    edges = [0.0, 0.5, 1 - 2.0**-53, 1 - 2.0**-24]
    uniforms_N = np.concatenate([edges, generator.random(2000)])
    weights_NV = torch.tensor(weights_V, dtype=torch.float32).expand(len(uniforms_N), -1)
    drawn_N = draw(weights_NV, torch.from_numpy(uniforms_N)).numpy()
    assert (weights_V[drawn_N] > 0).all()
    cdf_V = np.cumsum(weights_V.astype(np.float32).astype(np.float64))
    # u * total lies between the sums before and after the token, up to fp32 sums over blocks.
    target_N, slack = uniforms_N * cdf_V[-1], 1e-5 * cdf_V[-1]
    assert (cdf_V[drawn_N] >= target_N - slack).all()
    assert (cdf_V[drawn_N] - weights_V[drawn_N] <= target_N + slack).all()


def test_a_plan_scores_every_item_once_within_its_budget() -> None:
    generator, budget = np.random.default_rng(0), 300
    items = []
    for group in range(12):
        context_T = prompt(int(generator.integers(1, 120)), group)
        for member in range(int(generator.integers(1, 6))):
            tokens_T = np.concatenate([context_T, prompt(int(generator.integers(1, 60)), member)])
            request = ScoreRequest(tokens_T=tokens_T, start=len(context_T), temperatures=(1.0,))
            items.append(ScoreItem(None, request))
    batches = plan(items, budget, MOST_MASK)
    assert not any(batch.prefixes for batch in plan(items, budget, 0))
    assert sorted(map(id, items)) == sorted(id(item) for batch in batches for item in batch.items)
    assert any(batch.prefixes for batch in batches) and not all(b.prefixes for b in batches)
    for batch in batches:
        rows = [item.suffix_T if batch.prefixes else item.request.tokens_T for item in batch.items]
        prefixes = len(batch.prefixes) * max(map(len, batch.prefixes), default=0)
        padded = prefixes + len(rows) * max(map(len, rows))
        assert padded <= budget + len(rows) or len(rows) == 1
        for item, prefix in zip(batch.items, batch.prefix_of_item, strict=bool(batch.prefixes)):
            np.testing.assert_array_equal(item.prefix_T, batch.prefixes[prefix])


def top_requests() -> list[ScoreRequest]:
    """Requests with different T, length and top_k; every second has top_k=0."""
    return [
        ScoreRequest(
            tokens_T=prompt(30 + 7 * i, i), start=9 + i, temperatures=(t, 1.1),
            top_k=i % 2 * (i + 2),
        )
        for i, t in enumerate((0.5, 0.7, 0.9, 1.0, 1.3, 1.5))
    ]  # fmt: skip


def test_the_likeliest_do_not_depend_on_how_positions_are_cut(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = top_requests()
    whole = asyncio.run(engine.score(requests))
    monkeypatch.setattr(scoring, "positions_per_chunk", lambda device, vocab_size: 7)
    in_pieces = asyncio.run(engine.score(requests))
    for request, one, other in zip(requests, whole, in_pieces, strict=True):
        np.testing.assert_allclose(
            one.logprobs_by_temperature, other.logprobs_by_temperature, atol=1e-5
        )
        if request.top_k == 0:
            assert one.top is None and other.top is None
            continue
        assert one.top is not None and other.top is not None
        np.testing.assert_array_equal(one.top.ids_NK, other.top.ids_NK)
        np.testing.assert_allclose(one.top.logprobs_NK, other.top.logprobs_NK, atol=1e-5)
