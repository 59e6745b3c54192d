"""A real SGLang server of two tensor-parallel ranks: plugin, top-k, pushes and checksums.

Once on one node, with pushes from memory, and once over two nodes, whose processes know one
another by address, with pushes from disk.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from actors.sglang.nodes import SglangFollower
from distill.engine import (
    CheckpointDirectory,
    LentWeights,
    ScoreRequest,
    WeightSource,
)
from distill.models.loading import load_causal_lm
from distill.types import FloatArray
from distill.weights.model_weights import HeldWeights, names_of, plan_buckets
from distill.weights.served_parameters import expected_digests, find_shard_rules
from learner.process_group import LOOPBACK
from tests.naive import naive_distribution
from tests.states import expect_states, states_request
from tests.tiny import VOCAB_SIZE, save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S
from tests.weights import LendableWeights, shared

pytestmark = pytest.mark.slow

T = TypeVar("T")
CONTEXT = 256
BUCKET_BYTES = 64 << 10
TOKENS_T = np.random.default_rng(0).integers(2, VOCAB_SIZE, size=60).astype(np.int32)
START = 20


@dataclass
class Served:
    engine: HostedSglangEngine
    follower: SglangFollower | None
    models: list[PreTrainedModel]
    runner: asyncio.Runner
    directory: Path

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, timeout=DEADLINE_S))

    def logprobs(self, model: int, temperature: float) -> FloatArray:
        return naive_distribution(self.models[model], TOKENS_T, START, temperature)

    def weights(self, model: int) -> HeldWeights:
        return HeldWeights(dict(self.models[model].named_parameters()))

    def push(self, model: int, version: int) -> None:
        """Push as a run would: shared memory is for servers of one node."""
        source: WeightSource = shared(dict(self.models[model].named_parameters()))
        if self.follower is not None:
            source = CheckpointDirectory(path=str(self.directory / f"version-{version}"))
            self.models[model].save_pretrained(source.path)
        self.run(self.engine.load_weights(source, version))


@pytest.fixture(scope="module", params=[1, 2], ids=["one node", "two nodes"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    root = tmp_path_factory.mktemp("models")
    directories = [
        tiny_model_dir(root, seed=seed, context_length=CONTEXT, heads=4) for seed in (1, 2)
    ]
    for directory in directories:
        save_tokenizer(directory)
    models = [load_causal_lm(d, dtype=torch.float32, device="cpu").eval() for d in directories]
    config = SglangConfig(
        model=directories[0], device="cpu", request_deadline_s=120,
        server_flags="--tp-size 2" + " --nnodes 2" * (request.param == 2),
    )  # fmt: skip
    with asyncio.Runner() as runner:
        engine = HostedSglangEngine(
            config, push_bucket_bytes=BUCKET_BYTES, address=lambda: LOOPBACK
        )
        follower = None
        try:
            if request.param == 2:
                follower = SglangFollower(config, runner.run(engine.meeting_point()), 1)
            runner.run(asyncio.wait_for(engine.info(), timeout=600))
            yield Served(engine, follower, models, runner, root)
        finally:
            runner.run(engine.close())
            if follower is not None:
                runner.run(follower.close())


def expect(server: Served, model: int) -> None:
    """Assert that the server scores as the model at T, over both ranks' halves."""
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
    rules = find_shard_rules(served, server.weights(0))
    assert rules.keys() == served[0].keys()  # every parameter is verified
    assert len(plan_buckets(server.weights(1).layouts, BUCKET_BYTES)) >= 3
    server.push(1, 1)
    expect(server, 1)
    assert server.run(server.engine.weight_checksums()) == list(
        expected_digests(rules, server.weights(1), 2)
    )


def test_each_rank_opens_a_bucket_that_is_lent_it(server: Served) -> None:
    """Each rank opens another worker's memory, as ranks on GPUs would."""
    if server.follower is not None:
        pytest.skip("what lies in this node's memory is for servers of one node")
    first, second = (LendableWeights(server.weights(1).tensors) for _ in range(2))
    buckets = plan_buckets(server.weights(1).layouts, BUCKET_BYTES)
    order = LentWeights(push="p", buckets=buckets, timeout_s=60)

    async def push() -> None:
        loading = asyncio.create_task(server.engine.load_weights(order, 7))
        for i, bucket in enumerate(buckets):
            names = names_of(bucket)
            handles = [first.lend(names, [1])[0][0], second.lend(names, [1])[0][0]]
            await server.engine.load_bucket("p", i, handles)
        await loading

    server.push(0, 6)
    served = server.run(server.engine.weight_checksums())
    rules = find_shard_rules(served, server.weights(0))
    server.run(push())
    expect(server, 1)
    assert server.run(server.engine.weight_checksums()) == list(
        expected_digests(rules, server.weights(1), 2)
    )
    assert server.run(server.engine.info()).weight_version == 7


def test_each_rank_has_the_hidden_states_and_one_returns_them(server: Served) -> None:
    server.push(0, 9)
    requests = [states_request(60, 20, (0.7, 1.5)), states_request(33, 32)]
    for request, score in zip(requests, server.run(server.engine.score(requests)), strict=True):
        expect_states(server.models[0], request, score)
