"""Weights into a real SGLang server while it generates: no sample is lost or of mixed versions.

One server per module; each test uses its own session and mode.
"""

import asyncio
import json
import struct
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from transformers.modeling_utils import PreTrainedModel

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.client import ServerFacts, SglangClient
from actors.sglang.config import OnWeightUpdate, SglangConfig
from actors.sglang.engine import SglangEngine
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from actors.sglang.weights import WeightSession
from distill.engine import (
    CheckpointDirectory,
    CollectiveBroadcast,
    Engine,
    GenerateRequest,
    GroupMember,
    Sample,
    ScoreRequest,
    WeightSource,
)
from distill.errors import EngineError
from distill.models.loading import load_causal_lm, tensor_shapes
from distill.sampling import TrainSampling
from distill.stops import StopTokens
from distill.weights.model_weights import TensorLayout
from distill.weights.shared_memory import SharedTensors
from tests.naive import naive_logprobs
from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer, tiny_model_dir
from tests.waiting import DEADLINE_S
from tests.weights import shared

T = TypeVar("T")
MODES: tuple[OnWeightUpdate, ...] = ("continue", "restart", "finish", "in_place")
CONTEXT = 256
TEMPERATURE = 0.7


class Orders:
    """Administrative requests of a client; those to `fails` fail without reaching the server."""

    def __init__(self, client: SglangClient, fails: str) -> None:
        self._client, self.fails, self.orders = client, fails, list[str]()

    async def order(self, path: str, body: Mapping[str, Any], **more: Any) -> Any:
        self.orders.append(path)
        if path == self.fails:
            raise EngineError("on purpose")
        return await self._client.order(path, body, **more)

    async def facts(self) -> ServerFacts:
        return await self._client.facts()


@dataclass
class Served:
    """Server, and two models: even versions are the first one's weights, odd ones the other's."""

    hosted: HostedSglangEngine
    directories: list[str]
    models: list[PreTrainedModel]
    runner: asyncio.Runner
    engine: SglangEngine = field(init=False)
    client: SglangClient | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, timeout=DEADLINE_S))

    def session(self, mode: OnWeightUpdate, fails: str = "") -> Orders:
        """Put a new engine of this mode before the server; its requests to `fails` fail."""
        self.close()
        server = self.hosted.server
        self.client = SglangClient(
            lambda: server.url, api_key=server.api_key, admin_api_key=server.admin_api_key,
            deadline_s=60,
        )  # fmt: skip
        orders = Orders(self.client, fails)
        taken: Any = orders
        self.engine = SglangEngine(
            self.client, model=self.directories[0], vocab_size=VOCAB_SIZE,
            context_length=CONTEXT, dtype="float32", stops=StopTokens(ids=(EOS,)),
            weights=WeightSession(taken, mode, partial(tensor_shapes, self.directories[0])),
        )  # fmt: skip
        return orders

    def close(self) -> None:
        if self.client is not None:
            self.run(self.client.close())

    def weights(self, version: int) -> SharedTensors:
        return shared(dict(self.models[version % 2].named_parameters()))

    def generate(self, num_samples: int = 3) -> list[Sample]:
        return self.run(self.engine.generate(ask(20, num_samples)))

    async def samples(self, number: int, *tasks: asyncio.Task[Any]) -> None:
        """Wait until the server samples `number` responses at once, or a task has ended."""
        assert self.client is not None
        while (await self.client.get("/v1/loads"))["loads"][0]["num_running_reqs"] < number:
            if any(task.done() for task in tasks):  # a response may end at any token
                return
            await asyncio.sleep(0.01)

    def expect_whole(self, version: int) -> None:
        """Assert that the server serves this version only."""
        assert self.run(self.engine.info()).weight_version == version
        request = ask(20, 3)
        for sample in self.generate():
            assert (sample.versions_T == version).all()
            self.expect_own_logprobs(request, sample)

    def expect_own_logprobs(self, request: GenerateRequest, sample: Sample) -> None:
        """Assert that each token has the log-prob of the model of its version."""
        np.testing.assert_allclose(self.gaps(request, sample), 0, atol=1e-4)

    def gaps(self, request: GenerateRequest, sample: Sample) -> np.ndarray:
        """Each token's log-prob minus that of the model of its version."""
        start = len(request.prompt_tokens_T)
        tokens_T = np.concatenate([request.prompt_tokens_T, sample.tokens_T])
        gaps_T = np.zeros(len(sample.tokens_T))
        for parity, model in enumerate(self.models):
            expected_T = naive_logprobs(model, tokens_T, start, TEMPERATURE)
            mine = sample.versions_T % 2 == parity
            gaps_T[mine] = sample.logprobs_T[mine] - expected_T[mine]
        return gaps_T


def ask(prompt_length: int, num_samples: int, max_new_tokens: int = 8) -> GenerateRequest:
    prompt_T = np.random.default_rng(prompt_length).integers(2, VOCAB_SIZE, size=prompt_length)
    return GenerateRequest(
        prompt_tokens_T=prompt_T.astype(np.int32),
        sampling=TrainSampling(temperature=TEMPERATURE, max_new_tokens=max_new_tokens),
        num_samples=num_samples,
        seed=0,
    )


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    root = tmp_path_factory.mktemp("models")
    directories = [tiny_model_dir(root, seed=seed, context_length=CONTEXT) for seed in (1, 2)]
    for directory in directories:
        save_tokenizer(directory)
    models = [load_causal_lm(d, dtype=torch.float32, device="cpu").eval() for d in directories]
    with asyncio.Runner() as runner:
        config = SglangConfig(
            model=directories[0], device="cpu", start_deadline_s=DEADLINE_S, request_deadline_s=60,
        )  # fmt: skip
        engine = HostedSglangEngine(config)
        try:
            runner.run(asyncio.wait_for(engine.info(), timeout=DEADLINE_S))
            yield (served := Served(engine, directories, models, runner))
            served.close()
        finally:
            runner.run(engine.close())


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """Server at version 0, checked to be running after each test."""
    shared_server.session("continue")
    shared_server.run(shared_server.engine.load_weights(shared_server.weights(0), 0))
    yield shared_server
    assert len(shared_server.generate()) == 3, "the server was left paused"


async def push_in_the_middle(server: Served, requests: list[GenerateRequest]) -> Any:
    """(samples by request, pause of the load); the load begins after first tokens."""
    tasks = [asyncio.create_task(server.engine.generate(request)) for request in requests]
    await server.samples(sum(request.num_samples for request in requests), *tasks)
    pause = await server.engine.load_weights(server.weights(1), 1)
    unfinished = sum(not task.done() for task in tasks)
    return await asyncio.gather(*tasks), pause, unfinished


LONG = [ask(length, 4, max_new_tokens=200) for length in (5, 40)]


def test_restart_samples_again_from_the_new_weights(server: Served) -> None:
    server.session("restart")
    groups, pause, unfinished = server.run(push_in_the_middle(server, LONG))
    assert unfinished, "nothing was under way"
    assert 0 < pause < 30
    for request, group in zip(LONG, groups, strict=True):
        assert len(group) == 4
        versions = {int(v) for sample in group for v in sample.versions_T}
        assert len(versions) == 1, "a group of two versions"
        for sample in group:
            server.expect_own_logprobs(request, sample)
    assert any(group[0].versions_T[0] == 1 for group in groups)
    server.expect_whole(1)


def test_finish_waits_for_the_samples_under_way(server: Served) -> None:
    server.session("finish")
    groups, _, unfinished = server.run(push_in_the_middle(server, LONG))
    assert unfinished == 0, "the load did not wait"
    for request, group in zip(LONG, groups, strict=True):
        assert len(group) == 4
        for sample in group:
            assert (sample.versions_T == 0).all()
            server.expect_own_logprobs(request, sample)
    server.expect_whole(1)


def test_in_place_keeps_the_context_of_samples_under_way_and_of_no_others(server: Served) -> None:
    server.session("in_place")
    server.generate()  # fills the prefix cache for the requests below
    groups, pause, unfinished = server.run(push_in_the_middle(server, LONG))
    assert unfinished and 0 < pause < 30
    kept = 0.0
    for request, group in zip(LONG, groups, strict=True):
        for sample in group:
            gaps_T = server.gaps(request, sample)
            old_T = sample.versions_T == 0
            np.testing.assert_allclose(gaps_T[old_T], 0, atol=1e-4)
            if old_T.any() and not old_T.all():
                kept = max(kept, np.abs(gaps_T[~old_T]).max())
    assert kept > 1e-3, "the context was computed again"
    server.expect_whole(1)
    _, again = [server.run(server.engine.generate(ask(20, 1)))[0] for _ in range(2)]
    assert again.cached_tokens, "prefixes of present weights are of no use"


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.slow) if m == "restart" else m for m in MODES]
)
def test_many_pushes_beside_generation_lose_nothing(server: Served, mode: OnWeightUpdate) -> None:
    server.session(mode)
    last = 8
    requests = [ask(4 + 3 * i, 2, max_new_tokens=60) for i in range(12)]

    async def push() -> None:
        for version in range(1, last + 1):
            source: WeightSource = server.weights(version)
            if version % 3 == 0:
                source = CheckpointDirectory(path=server.directories[version % 2])
            await server.engine.load_weights(source, version)
            await asyncio.sleep(0.05)

    async def both() -> list[list[Sample]]:
        pushing = asyncio.create_task(push())
        groups = []
        for i in range(0, len(requests), 4):
            wave = (server.engine.generate(request) for request in requests[i : i + 4])
            groups += await asyncio.gather(*wave)
        await pushing
        return groups

    for request, group in zip(requests, server.run(both()), strict=True):
        assert len(group) == 2
        for sample in group:
            assert len(sample.tokens_T) and sample.versions_T.min() >= 0
            assert (np.diff(sample.versions_T) >= 0).all()
            if mode in ("restart", "finish"):
                assert len(set(sample.versions_T.tolist())) == 1
            if mode != "in_place":
                server.expect_own_logprobs(request, sample)
    server.expect_whole(last)


@pytest.mark.parametrize("mode", MODES)
def test_a_scoring_call_sees_one_version(server: Served, mode: OnWeightUpdate) -> None:
    server.session(mode)
    tokens_T = ask(200, 1).prompt_tokens_T
    requests = [
        ScoreRequest(tokens_T=np.roll(tokens_T, i), start=1, temperatures=(TEMPERATURE,))
        for i in range(30)
    ]

    async def all_along(engine: Engine, source: WeightSource) -> list[np.ndarray]:
        scoring = asyncio.create_task(engine.score(requests))
        await asyncio.sleep(0.02)
        await engine.load_weights(source, 1)
        return [score.logprobs_by_temperature[0] for score in await scoring]

    during = server.run(all_along(server.engine, server.weights(1)))
    plain = EmbeddedEngine(model_path=server.directories[0], device="cpu", threads=1)
    before = server.run(plain.score(requests))
    for found, expected in zip(during, before, strict=True):
        np.testing.assert_allclose(found, expected.logprobs_by_temperature[0], atol=1e-4)


def truncated(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def of_other_shapes(directory: Path) -> None:
    """Give the first tensor another shape of the same size in the header."""
    file = directory / "model.safetensors"
    content = file.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name.endswith("q_proj.weight"))
    header[name]["shape"] = [int(np.prod(header[name]["shape"]))]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def emptied(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [truncated, of_other_shapes, emptied])
def test_a_bad_directory_leaves_the_old_weights(server: Served, tmp_path: Path, spoil) -> None:
    server.models[1].save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(EngineError):
        server.run(server.engine.load_weights(CheckpointDirectory(path=str(tmp_path)), 5))
    server.expect_whole(0)


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/end_weight_update"])
def test_torn_weights_generate_nothing(server: Served, path: str) -> None:
    spy = server.session("continue", fails=path)

    async def push_and_break() -> list[Sample] | BaseException:
        task = asyncio.create_task(server.engine.generate(LONG[0]))
        await server.samples(LONG[0].num_samples, task)
        with pytest.raises(EngineError):
            await server.engine.load_weights(server.weights(1), 1)
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        return outcome

    outcome = server.run(push_and_break())
    assert isinstance(outcome, EngineError), "samples of torn weights came back"
    for call in (server.engine.generate(ask(9, 1)), server.engine.score([SCORE])):
        with pytest.raises(EngineError):
            server.run(call)
    assert spy.orders[-2:] == ["/abort_request", "/continue_generation"]
    spy.fails = ""
    if path == "/end_weight_update":  # the failure left the server's update open
        server.run(spy.order("/end_weight_update", {}))
    server.run(server.engine.load_weights(server.weights(3), 3))  # complete weights restore it
    server.expect_whole(3)


SCORE = ScoreRequest(tokens_T=ask(9, 1).prompt_tokens_T, start=2, temperatures=(TEMPERATURE,))


def test_an_update_that_cannot_begin_leaves_the_old_weights(server: Served) -> None:
    server.session("continue", fails="/begin_weight_update")
    with pytest.raises(EngineError) as error:
        server.run(server.engine.load_weights(server.weights(1), 1))
    assert "restart" not in str(error.value)
    server.expect_whole(0)


def misfit() -> CollectiveBroadcast:
    """Order for one tensor of another shape, by a group that does not exist."""
    member = GroupMember(
        address="127.0.0.1", port=9, name="nobody", backend="gloo", world_size=2, rank=1,
        join_deadline_s=3, timeout_s=3,
    )  # fmt: skip
    layout = TensorLayout(name="model.norm.weight", dtype="float32", shape=(3,))
    return CollectiveBroadcast(member=member, number=1, buckets=[[layout]])


def test_a_group_s_layout_is_checked_before_anything_is_joined(server: Served) -> None:
    spy = server.session("continue")
    with pytest.raises(EngineError) as refused:
        server.run(server.engine.load_weights(misfit(), 1))
    assert "model.norm.weight" in str(refused.value) and spy.orders == []


async def test_the_embedded_engine_checks_a_group_s_layout_before_it_joins(tmp_path: Path) -> None:
    engine = EmbeddedEngine(model_path=tiny_model_dir(tmp_path, seed=1), device="cpu", threads=1)
    with pytest.raises(EngineError) as refused:
        await engine.load_weights(misfit(), 1)
    assert "model.norm.weight" in str(refused.value)
    assert (await engine.info()).weight_version == 0
