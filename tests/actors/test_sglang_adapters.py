"""LoRA adapters on SGLang servers: the protocol on a fake server, log-probs on real ones."""

import asyncio
import base64
import hashlib
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from actors.sglang.client import SglangClient
from actors.sglang.config import SglangConfig
from actors.sglang.engine import SglangEngine
from actors.sglang.flags import adapter_flags
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from actors.sglang.weights import WeightSession
from distill.engine import GenerateRequest, ScoreRequest
from distill.errors import EngineError
from distill.models.loading import load_causal_lm
from distill.sampling import TrainSampling
from distill.types import FloatArray, TokenArray
from distill.weights.adapter import AdapterForm, AdapterTensors, AdapterWeights
from learner.config import LearnerConfig, LoraSettings
from learner.learner import Learner
from learner.lora import adapter_tensors, save_adapter
from tests.actors.misbehaving_server import API_KEY, VOCAB_SIZE, MisbehavingServer
from tests.families import SIZES
from tests.naive import naive_logprobs
from tests.tiny import save_tokenizer
from tests.waiting import DEADLINE_S

FORM = AdapterForm(rank=2, alpha=4.0, targets=("q_proj", "v_proj"), parameters=8)
TENSORS = {
    "q_proj.lora_A.weight": torch.arange(4.0).view(2, 2),
    "v_proj.lora_A.weight": torch.ones(2, 2),
}
ASK = GenerateRequest(
    prompt_tokens_T=np.arange(2, 10, dtype=np.int32),
    sampling=TrainSampling(temperature=0.7, max_new_tokens=4), num_samples=2, seed=0,
)  # fmt: skip
SCORE = ScoreRequest(tokens_T=np.arange(2, 10, dtype=np.int32), start=3, temperatures=(0.7, 1.0))


# ---- the protocol


class AdapterServer(MisbehavingServer):
    """Hold and refuse adapters as SGLang does; delay requests on demand."""

    def __init__(self, **info: Any) -> None:
        super().__init__()
        self.info: dict[str, Any] = {
            "tp_size": 2, "enable_lora": True, "max_loaded_loras": 3,
        } | info  # fmt: skip
        self.held: dict[str, dict[str, torch.Tensor]] = {}
        self.named: list[str | None] = []  # the adapter of each request, in order
        self.released = asyncio.Event()
        self.released.set()
        self.in_use: list[str | None] = []
        self.refuses = ""  # an order
        self.loses = ""  # an order, after it was carried out
        self.unloads = asyncio.Event()
        self.unloads.set()
        self.asked_to_unload = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/server_info":
            return web.json_response(self.info)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            name = body.get("lora_path")
            assert name is None or name in self.held, f"SGLang would look for {name} on the hub"
            self.named.append(name)
            self.in_use.append(name)
            await self.released.wait()
            self.in_use.remove(name)
        elif request.path == "/unload_lora_adapter":
            self.asked_to_unload += 1
            await self.unloads.wait()
        if request.path.endswith("lora_adapter") or "lora_adapter_from" in request.path:
            refusal = "on purpose" if request.path == self.refuses else self.order(body)
            if request.path == self.loses:
                return web.Response(status=500, text="the answer is lost")
            reply = {"success": refusal is None, "error_message": refusal}
            return web.json_response(reply, status=400 if refusal else 200)
        return await super().handle(request)

    def order(self, body: dict[str, Any]) -> str | None:
        name = body["lora_name"]
        if "config_dict" not in body:
            assert name not in self.in_use, "later loads would wait behind this unload"
            return None if self.held.pop(name, None) else f"LoRA with name {name} does not exist"
        first, second = body["serialized_named_tensors"]  # one for each rank
        assert first == second
        tensors = pickle.loads(base64.b64decode(first))
        for tensor_name, tensor in tensors.items():
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            assert body["expected_checksums"][tensor_name] == digest
        self.held[name] = tensors
        assert len(self.held) <= self.info["max_loaded_loras"], "SGLang would evict one"
        return None


@asynccontextmanager
async def engine_of(server: AdapterServer) -> AsyncIterator[SglangEngine]:
    """Engine of the server, which runs as long as the context."""
    async with asyncio.timeout(DEADLINE_S), server.running():
        client = SglangClient(
            lambda: server.url, api_key=API_KEY, admin_api_key=API_KEY, deadline_s=30
        )
        try:
            yield SglangEngine(
                client, model="made up", vocab_size=VOCAB_SIZE, context_length=64,
                dtype="float32", stops=None, weights=WeightSession(client, "continue", dict),
            )  # fmt: skip
        finally:
            server.released.set()
            await client.close()


def adapter(factor: float = 1.0) -> AdapterTensors:
    return AdapterWeights({n: factor * t for n, t in TENSORS.items()}, FORM).copied()


async def test_samples_are_of_the_adapter_that_they_name_while_another_is_unloaded() -> None:
    server = AdapterServer()
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        server.unloads.clear()
        load = asyncio.create_task(engine.load_weights(adapter(2), 2))
        while not server.asked_to_unload:
            await asyncio.sleep(0.01)
        samples = await engine.generate(ASK)
        [newest] = {name for name in server.named if name is not None}
        assert newest.startswith("v2.")
        assert {v for sample in samples for v in sample.versions_T.tolist()} == {2}
        server.unloads.set()
        await load


@asynccontextmanager
async def in_progress(server: AdapterServer, engine: SglangEngine, name: str | None):
    """Generation that the server delays; ends with the context."""
    server.released.clear()
    task = asyncio.create_task(engine.generate(ASK))
    while name not in server.in_use:
        await asyncio.sleep(0.01)
    try:
        yield task
    finally:
        server.released.set()
        await task


async def test_requests_name_the_newest_adapter_and_samples_are_of_its_version() -> None:
    server = AdapterServer()
    async with engine_of(server) as engine:
        await engine.generate(ASK)
        for version in (4, 5):
            assert await engine.load_weights(adapter(version), version) == 0
            samples = await engine.generate(ASK)
            assert {v for sample in samples for v in sample.versions_T} == {version}
            [score] = await engine.score([SCORE])
            assert score.version == version
    assert server.named[0] is None
    [held] = server.held.values()
    assert torch.equal(held["v_proj.lora_A.weight"], 5 * torch.ones(2, 2))


async def test_an_adapter_is_unloaded_after_its_last_request() -> None:
    server = AdapterServer()
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        [first] = server.held
        async with in_progress(server, engine, first) as old:
            await engine.load_weights(adapter(), 2)
            assert first in server.held and len(server.held) == 2
            new = asyncio.create_task(engine.generate(ASK))
            while len(server.named) < 2:
                await asyncio.sleep(0.01)
        assert {v for sample in await old for v in sample.versions_T} == {1}
        assert {v for sample in await new for v in sample.versions_T} == {2}
        await engine.load_weights(adapter(), 3)
        assert first not in server.held and len(server.held) == 1


async def test_a_full_server_takes_another_adapter_when_the_oldest_s_requests_end() -> None:
    server = AdapterServer(max_loaded_loras=2)
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        [first] = server.held
        async with in_progress(server, engine, first):
            await engine.load_weights(adapter(), 2)
            load = asyncio.create_task(engine.load_weights(adapter(), 3))
            await asyncio.sleep(0.2)
            assert not load.done() and len(server.held) == 2
        await load
        assert first not in server.held


async def test_the_passes_of_a_scoring_call_name_one_adapter() -> None:
    """A server without the plugin needs a second pass, for T = 1; a load comes between."""
    server = AdapterServer()
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        [first] = server.held
        server.released.clear()
        task = asyncio.create_task(engine.score([SCORE]))
        while first not in server.in_use:
            await asyncio.sleep(0.01)
        await engine.load_weights(adapter(), 2)
        server.released.set()
        [score] = await task
        assert score.version == 1
        assert server.named == [first] * 2


async def test_an_adapter_that_does_not_load_leaves_the_one_before() -> None:
    server = AdapterServer()
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        [first] = server.held
        server.refuses = "/load_lora_adapter_from_tensors"
        with pytest.raises(EngineError):
            await engine.load_weights(adapter(), 2)
        samples = await engine.generate(ASK)
        assert server.named[-1] == first
        assert {v for sample in samples for v in sample.versions_T} == {1}
        server.refuses = ""
        await engine.load_weights(adapter(), 2)  # tried again
        assert (await engine.generate(ASK))[0].versions_T[0] == 2


async def test_an_unload_without_an_answer_keeps_no_later_adapter_out() -> None:
    server = AdapterServer(max_loaded_loras=2)
    async with engine_of(server) as engine:
        await engine.load_weights(adapter(), 1)
        server.loses = "/unload_lora_adapter"
        await engine.load_weights(adapter(), 2)
        for version in (3, 4):
            server.loses = ""
            await engine.load_weights(adapter(), version)
            assert (await engine.generate(ASK))[0].versions_T[0] == version
        assert len(server.held) == 1


async def test_a_server_that_was_not_started_for_adapters_refuses_them() -> None:
    server = AdapterServer(enable_lora=False)
    async with engine_of(server) as engine:
        with pytest.raises(EngineError):
            await engine.load_weights(adapter(), 1)
        await engine.generate(ASK)


# ---- real servers

T = 0.7
FAMILIES = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
}  # fmt: skip


def checkpoint(directory: Path, family: str) -> str:
    """Random model whose output depends on its layers; Qwen models are tied."""
    torch.manual_seed(0)
    tied = family.startswith("qwen")
    head = {"head_dim": 64} if family == "qwen3" else {"hidden_size": 256}
    config = FAMILIES[family](**(SIZES | head | {"tie_word_embeddings": tied}))
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=1.0 if "embed" in name else 0.2)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


class Adapted:
    """A learner's adapter, and peft's output for each saved version."""

    def __init__(self, base: str, targets: str | None, out: Path) -> None:
        lora = LoraSettings(rank=4, targets=targets)
        config = LearnerConfig.of(model=base, lora=lora, total_steps=1, device="cpu")
        self._base, self._out = base, out
        self.learner = Learner(config, str(out))

    def next(self, version: int) -> AdapterTensors:
        """Change the adapter, save it in peft's format, and return the tensors to push."""
        lora = self.learner.worker.lora
        assert lora is not None
        generator = torch.Generator().manual_seed(version)
        for weight in lora.parameters():
            if weight.requires_grad:
                weight.data = torch.randn(weight.shape, generator=generator) * 0.2
        save_adapter(self._out / f"v{version}", lora, adapter_tensors(lora))
        return self.learner.adapter(torch.float32).copied()

    def logprobs(self, tokens_T: TokenArray, temperature: float, version: int | None) -> FloatArray:
        """log p_T of each token but the first, by transformers and peft; None is the base."""
        model: Any = load_causal_lm(self._base, dtype=torch.float32, device="cpu")
        if version is not None:
            model = PeftModel.from_pretrained(model, str(self._out / f"v{version}"))
        return naive_logprobs(model.eval(), tokens_T, 1, temperature)


TOKENS_T = np.random.default_rng(0).integers(3, 60, size=40).astype(np.int32)


@pytest.fixture
def needs_sglang() -> Iterator[None]:
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sglang")
@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", None), ("mistral", None), ("qwen2", "q_proj,v_proj,down_proj"), ("qwen3", None)],
)
def test_log_probs_are_those_of_transformers_and_peft_after_each_push(
    family: str, targets: str | None, tmp_path: Path
) -> None:
    asyncio.run(pushes(checkpoint(tmp_path / "base", family), targets, tmp_path))


async def pushes(base: str, targets: str | None, out: Path) -> None:
    adapted = Adapted(base, targets, out)
    flags = adapter_flags(adapted.learner.adapter(torch.float32).form, 3, "cpu")
    config = SglangConfig(
        model=base,
        device="cpu",
        server_flags=flags,
        start_deadline_s=DEADLINE_S,
        request_deadline_s=120,
    )
    engine = HostedSglangEngine(config)
    try:
        await expect(engine, adapted, None)
        for version in (1, 2, 3, 4):
            old = asyncio.create_task(engine.generate(ask(64)))
            await asyncio.sleep(0.2)
            await engine.load_weights(adapted.next(version), version)
            await expect(engine, adapted, version)
            assert (await engine.info()).weight_version == version
            for sample in [*await engine.generate(ask(8)), *await old]:
                of = int(sample.versions_T[0])
                assert (sample.versions_T == of).all()
                whole_T = np.concatenate([TOKENS_T, sample.tokens_T])
                expected_T = adapted.logprobs(whole_T, T, of or None)[len(TOKENS_T) - 1 :]
                np.testing.assert_allclose(sample.logprobs_T, expected_T, atol=1e-3)
            assert {int(s.versions_T[0]) for s in await old} == {version - 1}
        wrong = adapted.next(5)
        damaged = AdapterTensors(
            form=wrong.form, pickled=adapted.next(6).pickled, checksums=wrong.checksums
        )
        with pytest.raises(EngineError):
            await engine.load_weights(damaged, 6)
    finally:
        await engine.close()


def ask(tokens: int) -> GenerateRequest:
    sampling = TrainSampling(temperature=T, max_new_tokens=tokens)
    return GenerateRequest(prompt_tokens_T=TOKENS_T, sampling=sampling, num_samples=2, seed=0)


async def expect(engine: HostedSglangEngine, adapted: Adapted, version: int | None) -> None:
    """Assert that the server scores as this version at two temperatures, and not as the base."""
    temperatures = (T, 1.5)
    request = ScoreRequest(tokens_T=TOKENS_T, start=1, temperatures=temperatures)
    [score] = await asyncio.wait_for(engine.score([request]), timeout=360)  # its start included
    for temperature, scored_N in zip(temperatures, score.logprobs_by_temperature, strict=True):
        expected_N = adapted.logprobs(TOKENS_T, temperature, version)
        np.testing.assert_allclose(scored_N, expected_N, atol=1e-3)
        if version is not None:
            base_N = adapted.logprobs(TOKENS_T, temperature, None)
            assert np.abs(base_N - expected_N).max() > 0.1, "the adapter changes nothing"
