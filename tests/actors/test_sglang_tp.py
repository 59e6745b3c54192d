"""A real SGLang server of two tensor-parallel ranks: plugin, top-k, a push in buckets, proof."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from distill.engine import GenerateRequest, ScoreRequest
from distill.models.loading import load_causal_lm
from distill.sampling import TrainSampling
from distill.types import FloatArray
from distill.weights.model_weights import HeldWeights, plan_buckets
from distill.weights.served_parameters import expected_digests, find_recipes
from distill.weights.tensors import PackedTensors
from tests.tiny import VOCAB_SIZE, save_tokenizer, tiny_model_dir

pytestmark = pytest.mark.slow

T = TypeVar("T")
CONTEXT = 256
BUCKET_BYTES = 64 << 10
TOKENS_T = np.random.default_rng(0).integers(2, VOCAB_SIZE, size=60).astype(np.int32)
START = 20


@dataclass
class Served:
    engine: HostedSglangEngine
    models: list[PreTrainedModel]
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, timeout=300))

    @torch.no_grad()
    def logprobs(self, model: int, temperature: float) -> FloatArray:
        """log p_T of all ids, at each position from START on."""
        ids_1T = torch.from_numpy(TOKENS_T.astype(np.int64))[None]
        logits_TV = self.models[model](input_ids=ids_1T, use_cache=False).logits[0].float()
        return torch.log_softmax(logits_TV / temperature, dim=-1)[START - 1 : -1].numpy()

    def weights(self, model: int) -> HeldWeights:
        return HeldWeights(dict(self.models[model].named_parameters()))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    root = tmp_path_factory.mktemp("models")
    directories = [
        tiny_model_dir(root, seed=seed, context_length=CONTEXT, heads=4) for seed in (1, 2)
    ]
    for directory in directories:
        save_tokenizer(directory)
    models = [load_causal_lm(d, dtype=torch.float32, device="cpu").eval() for d in directories]
    with asyncio.Runner() as runner:
        engine = HostedSglangEngine(
            model_path=directories[0],
            device="cpu",
            flags="--tp-size 2",
            push_bucket_bytes=BUCKET_BYTES,
            start_deadline_s=600,
            request_deadline_s=120,
        )
        try:
            runner.run(asyncio.wait_for(engine.info(), timeout=600))
            yield Served(engine, models, runner)
        finally:
            runner.run(engine.close())


def expect(server: Served, model: int) -> None:
    """The server scores and samples as the model does, at T, on both ranks' halves."""
    request = ScoreRequest(tokens_T=TOKENS_T, start=START, temperatures=(0.7, 1.0), top_k=5)
    [score] = server.run(server.engine.score([request]))
    own_N = TOKENS_T[START:, None].astype(np.int64)
    for temperature, scored_N in zip((0.7, 1.0), score.logprobs_by_temperature, strict=True):
        expected_NV = server.logprobs(model, temperature)
        expected_N = np.take_along_axis(expected_NV, own_N, axis=1)[:, 0]
        np.testing.assert_allclose(scored_N, expected_N, atol=1e-4)
    assert score.top is not None
    expected_NV = server.logprobs(model, 0.7)
    best_NK = -np.sort(-expected_NV, axis=1)[:, :5]
    np.testing.assert_allclose(score.top.logprobs_NK, best_NK, atol=1e-4)


def test_a_push_in_buckets_is_scored_at_t_and_proven(server: Served) -> None:
    expect(server, 0)
    served = server.run(server.engine.weight_checksums())
    assert len(served) == 2
    recipes = find_recipes(served, server.weights(0))
    assert recipes.keys() == served[0].keys()  # nothing is left unproven
    assert len(plan_buckets(server.weights(1).layouts, BUCKET_BYTES)) >= 3
    packed = PackedTensors.pack(dict(server.models[1].named_parameters()))
    server.run(server.engine.load_weights(packed, 1))
    expect(server, 1)
    assert server.run(server.engine.weight_checksums()) == list(
        expected_digests(recipes, server.weights(1), 2)
    )


def test_samples_have_their_own_log_probs(server: Served) -> None:
    packed = PackedTensors.pack(dict(server.models[0].named_parameters()))
    server.run(server.engine.load_weights(packed, 2))
    request = GenerateRequest(
        prompt_tokens_T=TOKENS_T[:START],
        sampling=TrainSampling(temperature=0.7, max_new_tokens=12),
        num_samples=2,
        seed=0,
    )
    for sample in server.run(server.engine.generate(request)):
        assert (sample.versions_T == 2).all()
        ids = np.concatenate([TOKENS_T[:START], sample.tokens_T]).astype(np.int64)
        with torch.no_grad():
            logits = server.models[0](input_ids=torch.from_numpy(ids)[None]).logits[0].float()
        log_p = torch.log_softmax(logits / 0.7, dim=-1)[START - 1 : -1].numpy()
        expected_T = np.take_along_axis(log_p, ids[START:, None], axis=1)[:, 0]
        np.testing.assert_allclose(sample.logprobs_T, expected_T, atol=1e-4)
