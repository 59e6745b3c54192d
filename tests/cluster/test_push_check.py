"""The check of a push: log-probs find wrong weights, and checksums find a single wrong bit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.embedded.engine import EmbeddedEngine
from actors.sglang.client import SglangClient
from actors.sglang.weights import WeightSession
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.weights.check import PushCheck
from cluster.weights.transport import PushSettings
from distill.engine import Score, ScoreRequest
from distill.errors import CalibrationError, EngineError
from distill.pace import Progress
from distill.weights.digests import digest
from distill.weights.model_weights import HeldWeights
from distill.weights.served_parameters import Digests
from distill.weights.shared_memory import SharedTensors
from learner.config import LearnerConfig, LoraSettings
from learner.learner import Learner
from tests.actors.misbehaving_server import API_KEY
from tests.actors.weights_server import WeightsServer
from tests.conftest import TinyPair
from tests.refusals import refuses
from tests.weights import gather_all, shared

T = 0.7
FIRST, SECOND = "policy engine 0", "policy engine 1"


def settings(**given: Any) -> PushSettings:
    defaults = {"choice": "auto", "model": "", "probe_every": 0, "prove_every": 0}
    return PushSettings(
        served=False, device="cpu", directory="", temperature=T,
        dtype="float32", timeout_s=60.0, **(defaults | given),
    )  # fmt: skip


# ---- log-probs


class Engine(EmbeddedEngine):
    """An engine that can be told to score NaN."""

    broken = False

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        scores = await super().score(requests)
        if self.broken:
            scores[0].logprobs_by_temperature[0][3] = float("nan")
        return scores


@dataclass
class Run:
    """A learner and two engines with its first weights, checked by log-probs."""

    learner: Learner
    engines: dict[str, Any]
    check: PushCheck

    def learn(self) -> None:
        for parameter in self.learner.model.parameters():
            parameter.data.mul_(1.01)

    def push(self, version: int, *names: str) -> None:
        source = shared(gather_all(self.learner.weights()))
        for name in names:
            calls.get(self.engines[name].load_weights.remote(source, version))

    def ask(self, version: int) -> None:
        self.check.ask(self.check.expect(version, self.learner.weights()))


@pytest.fixture
def run(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[Run]:
    config = LearnerConfig.of(model=tiny_pair.student, total_steps=1, device="cpu")
    learner = Learner(config, str(tmp_path))
    engines: dict[str, Any] = {
        name: LocalActor(Engine, model_path=tiny_pair.student, device="cpu", threads=1)
        for name in (FIRST, SECOND)
    }
    push = settings(model=tiny_pair.student, probe_every=1)
    check = PushCheck(engines, push, learner.logprobs, Progress())
    yield Run(learner=learner, engines=engines, check=check)
    for engine in engines.values():
        calls.kill(engine)


def test_engines_with_the_pushed_weights_agree(run: Run) -> None:
    assert run.check.settle() == {}
    for version in range(3):
        run.learn()
        run.push(version, FIRST, SECOND)
        run.ask(version)
        run.learn()  # the next step does not change the expected log-probs
        assert 0 <= run.check.settle()["push/probe_gap"] < 1e-5
    assert run.check.settle() == {}


@pytest.mark.parametrize("behind", [FIRST, SECOND])
def test_an_engine_with_old_weights_is_found(run: Run, behind: str) -> None:
    run.learn()
    run.push(7, *{FIRST, SECOND} - {behind})
    run.ask(7)
    with refuses(CalibrationError, None, names=behind) as refusal:
        run.check.settle()
    assert refusal.value.exit_code == 3
    run.push(8, FIRST, SECOND)
    run.ask(8)
    assert run.check.settle()["push/probe_gap"] < 1e-5


@pytest.fixture
def adapted(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[Run]:
    """A learner of an adapter, and an engine that holds merged weights in its place."""
    lora = LoraSettings(rank=2)
    config = LearnerConfig.of(model=tiny_pair.student, lora=lora, total_steps=1, device="cpu")
    learner = Learner(config, str(tmp_path))
    engine = LocalActor(Engine, model_path=tiny_pair.student, device="cpu", threads=1)
    check = PushCheck(
        {FIRST: engine},
        settings(choice="adapter", model=tiny_pair.student, probe_every=1, prove_every=1),
        learner.logprobs, Progress(), learner.base_logprobs,
    )  # fmt: skip
    yield Run(learner=learner, engines={FIRST: engine}, check=check)
    calls.kill(engine)


def test_an_engine_that_ignores_its_adapter_is_found(adapted: Run) -> None:
    for name, weight in adapted.learner.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    adapted.push(1, FIRST)
    adapted.ask(1)
    assert adapted.check.settle()["push/void"] == 0
    [engine] = adapted.engines.values()
    calls.get(engine.load_weights.remote(base_of(adapted.learner), 2))
    adapted.ask(2)
    with refuses(CalibrationError, None, names=FIRST):
        adapted.check.settle()


def test_the_proof_of_an_adapter_that_changes_nothing_is_void(adapted: Run) -> None:
    adapted.ask(0)  # B is zero: the engine has the base alone
    found = adapted.check.settle()
    assert found["push/void"] == 1 and found["push/probe_gap"] < 1e-5


def base_of(learner: Learner) -> SharedTensors:
    """The learner's model without its adapter."""
    lora = learner.worker.lora
    assert lora is not None
    with torch.no_grad():
        for name, weight in lora.named_parameters():
            if "lora_B" in name:
                weight.mul_(0)
        base = shared(gather_all(learner.weights()))
        for name, weight in lora.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight)
    return base


def test_nan_is_a_disagreement(run: Run) -> None:
    for engine in run.engines.values():
        calls.get(engine.__ray_call__.remote(lambda plain: setattr(plain, "broken", True)))
    run.ask(4)
    with pytest.raises(CalibrationError):
        run.check.settle()


# ---- checksums

LAYERS, HIDDEN, HEAD, HEADS, KV_HEADS, WIDTH, VOCAB = 3, 8, 4, 4, 2, 24, 100


def checkpoint(seed: int) -> dict[str, Tensor]:
    """A dense model's tensors in bfloat16, as checkpoints name them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD), "self_attn.q_norm": (HEAD,),
                "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
                "mlp.down_proj": (HIDDEN, WIDTH),
            }.items()
        }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def serve(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Parameters that a server makes of a checkpoint for a rank, written out one by one."""
    padded = torch.zeros(128, HIDDEN).bfloat16()
    padded[:VOCAB] = tensors["model.embed_tokens.weight"]
    rows = 128 // ranks
    made = {
        "model.embed_tokens.weight": padded[rank * rows : (rank + 1) * rows],
        "model.norm.weight": tensors["model.norm.weight"],
        "model.scales": torch.ones(rank + 1),  # known to the server alone
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        q, k, v, o, gate, up, down = (
            tensors[f"{layer}{name}_proj.weight"]
            for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o",
                         "mlp.gate", "mlp.up", "mlp.down")
        )  # fmt: skip
        n_q, n_mlp = HEADS * HEAD // ranks, WIDTH // ranks
        kv_ranks = min(ranks, KV_HEADS)
        n_kv, kv_rank = KV_HEADS * HEAD // kv_ranks, rank * kv_ranks // ranks
        kv = slice(kv_rank * n_kv, (kv_rank + 1) * n_kv)
        mlp = slice(rank * n_mlp, (rank + 1) * n_mlp)
        heads = slice(rank * n_q, (rank + 1) * n_q)
        made |= {
            f"{layer}self_attn.qkv_proj.weight": torch.cat([q[heads], k[kv], v[kv]]),
            f"{layer}self_attn.o_proj.weight": o[:, heads],
            f"{layer}self_attn.q_norm.weight": tensors[f"{layer}self_attn.q_norm.weight"],
            f"{layer}mlp.gate_up_proj.weight": torch.cat([gate[mlp], up[mlp]]),
            f"{layer}mlp.down_proj.weight": down[:, mlp],
        }
    return made


def digests(tensors: dict[str, Tensor], ranks: int) -> list[dict[str, str]]:
    return [
        {name: digest(tensor) for name, tensor in serve(tensors, rank, ranks).items()}
        for rank in range(ranks)
    ]


class Server:
    """A server with the digests that it was given last."""

    def __init__(self, served: Digests | None) -> None:
        self._served = served

    def hold(self, served: Digests | None) -> None:
        self._served = served

    def weight_checksums(self) -> Digests | None:
        return self._served


class Proof:
    """A check of servers by checksums alone."""

    def __init__(self, *served: Digests | None) -> None:
        self._servers = [LocalActor(Server, each) for each in served]
        engines = {f"policy engine {i}": server for i, server in enumerate(self._servers)}
        self._check = PushCheck(engines, settings(prove_every=1), lambda _: [], Progress())

    def hold(self, served: Digests) -> None:
        """Change the weights of the first server."""
        calls.get(self._servers[0].hold.remote(served))

    def ask(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._check.ask(self._check.expect(version, HeldWeights(tensors)))

    def settle(self) -> float | None:
        return self._check.settle().get("push/proven")


def nudged(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors with one weight moved to the next bfloat16, as at a learning rate of 1e-6."""
    changed = tensors[name].clone()
    changed.view(torch.int16).flatten()[-1] += 1
    return tensors | {name: changed}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "skipped",
    [
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_skipped_tensor_is_found(ranks: int, skipped: str) -> None:
    sent = checkpoint(0)
    proof = Proof(digests(sent, ranks))
    proof.ask(0, sent)
    assert proof.settle() == pytest.approx(1 - 1 / (3 + 5 * LAYERS))
    stepped = nudged(sent, skipped)
    proof.hold(digests(stepped, ranks))
    proof.ask(1, stepped)
    assert proof.settle() is not None
    proof.ask(2, nudged(stepped, skipped))
    with pytest.raises(CalibrationError):
        proof.settle()


def test_a_tensor_skipped_by_the_first_push_is_found() -> None:
    """The other layers show how the parameter is made."""
    served = checkpoint(0) | {
        "model.layers.1.mlp.up_proj.weight": torch.ones(WIDTH, HIDDEN).bfloat16()
    }
    proof = Proof(digests(served, 2))
    proof.ask(5, checkpoint(0))
    with pytest.raises(CalibrationError):
        proof.settle()


def test_engines_must_agree_about_parameters_without_a_known_source() -> None:
    good = digests(checkpoint(0), 2)
    bad = [dict(rank) for rank in good]
    bad[1]["model.scales"] = "0" * 16
    proof = Proof(good, bad)
    proof.ask(4, checkpoint(0))
    with refuses(CalibrationError, None, names="model.scales"):
        proof.settle()


def test_an_engine_without_checksums_proves_nothing() -> None:
    proof = Proof(None, digests(checkpoint(0), 2))
    proof.ask(0, checkpoint(0))
    assert proof.settle() == pytest.approx(17 / 18)  # of the other engine
    proof = Proof(None)
    proof.ask(0, checkpoint(0))
    assert proof.settle() is None
    proof.hold(digests(checkpoint(0), 1))
    proof.ask(1, checkpoint(0))
    assert proof.settle() == pytest.approx(17 / 18)


async def test_a_server_reports_checksums_by_rank() -> None:
    tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}
    server = WeightsServer(tensors, ranks=2)
    async with server.running():
        client = SglangClient(
            lambda: server.url, api_key=API_KEY, admin_api_key=API_KEY, deadline_s=60
        )
        session = WeightSession(client, "continue", dict)
        try:
            assert await session.checksums() == [
                {"w": digest(tensors["w"][:2]), "b": digest(tensors["b"])},
                {"w": digest(tensors["w"][2:]), "b": digest(tensors["b"])},
            ]
            server.ranks = []
            with pytest.raises(EngineError):
                await session.checksums()
        finally:
            await client.close()
