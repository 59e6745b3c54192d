"""Proof of a push: a tensor that was skipped and a rank's old shard are found, in bfloat16 too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.sglang.client import SglangClient
from actors.sglang.weights import WeightSession
from cluster.weights.proof import PushProof
from distill.errors import CalibrationError, EngineError
from distill.weights.digests import digest
from distill.weights.model_weights import HeldWeights
from distill.weights.served_parameters import expected_digests, find_recipes
from tests.actors.misbehaving_server import API_KEY
from tests.actors.weights_server import WeightsServer
from tests.refusals import refuses

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
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                "self_attn.q_norm": (HEAD,),
                "mlp.gate_proj": (WIDTH, HIDDEN),
                "mlp.up_proj": (WIDTH, HIDDEN),
                "mlp.down_proj": (HIDDEN, WIDTH),
            }.items()
        }
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def serve(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's parameters, written out one by one: what a server makes of a checkpoint."""
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


def prove(engines: dict[str, Any]) -> PushProof[str, Any]:
    """A proof with engines that answer what `engines` says at the time."""
    return PushProof(engines={name: name for name in engines}, submit=engines.get,
                     collect=lambda answer: answer)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_server_makes_of_a_checkpoint_is_found_out(ranks: int) -> None:
    first, second = HeldWeights(checkpoint(0)), HeldWeights(checkpoint(1))
    recipes = find_recipes(digests(checkpoint(0), ranks), first)
    served = digests(checkpoint(1), ranks)
    assert served[0].keys() - recipes.keys() == {"model.scales"}
    for rank, expected in enumerate(expected_digests(recipes, second, ranks)):
        assert len(expected) == 2 + 5 * LAYERS
        assert expected == {name: served[rank][name] for name in expected}


def nudged(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """One weight is the next bfloat16: a step at a learning rate of 1e-6."""
    changed = tensors[name].clone()
    changed.view(torch.int16).flatten()[-1] += 1
    return tensors | {name: changed}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "skipped, parameter",
    [
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.2.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_a_tensor_that_was_skipped(ranks: int, skipped: str, parameter: str) -> None:
    sent = checkpoint(0)
    engines = {"policy engine 0": digests(sent, ranks)}
    proof = prove(engines)
    proof.ask(0, HeldWeights(sent))
    assert proof.settle() == pytest.approx(1 - 1 / (3 + 5 * LAYERS))
    stepped = nudged(sent, skipped)
    engines["policy engine 0"] = digests(stepped, ranks)
    proof.ask(1, HeldWeights(stepped))
    assert proof.settle() is not None
    proof.ask(2, HeldWeights(nudged(stepped, skipped)))
    with pytest.raises(CalibrationError):
        proof.settle()


def test_one_rank_that_kept_its_old_shard() -> None:
    engines: dict[str, Any] = {"policy engine 0": digests(checkpoint(0), 2)}
    proof = prove(engines)
    proof.ask(0, HeldWeights(checkpoint(0)))
    proof.settle()
    engines["policy engine 0"] = [digests(checkpoint(1), 2)[0], digests(checkpoint(0), 2)[1]]
    proof.ask(1, HeldWeights(checkpoint(1)))
    with pytest.raises(CalibrationError):
        proof.settle()


def test_a_tensor_that_the_first_push_skipped() -> None:
    """The other layers tell how the parameter is made."""
    served = checkpoint(0) | {
        "model.layers.1.mlp.up_proj.weight": torch.ones(WIDTH, HIDDEN).bfloat16()
    }
    proof = prove({"policy engine 0": digests(served, 2)})
    proof.ask(5, HeldWeights(checkpoint(0)))
    with pytest.raises(CalibrationError):
        proof.settle()


def test_engines_are_compared_in_what_cannot_be_worked_out() -> None:
    good = digests(checkpoint(0), 2)
    bad = [dict(rank) for rank in good]
    bad[1]["model.scales"] = "0" * 16
    proof = prove({"policy engine 0": good, "policy engine 1": bad})
    proof.ask(4, HeldWeights(checkpoint(0)))
    with refuses(CalibrationError, None, names="model.scales"):
        proof.settle()


def test_an_engine_that_says_nothing_proves_nothing() -> None:
    engines: dict[str, Any] = {"policy engine 0": None}
    proof = prove(engines)
    proof.ask(0, HeldWeights(checkpoint(0)))
    assert proof.settle() is None
    engines["policy engine 0"] = digests(checkpoint(0), 1)
    proof.ask(1, HeldWeights(checkpoint(0)))
    assert proof.settle() == pytest.approx(17 / 18)


def test_a_server_s_checksums_arrive_rank_by_rank() -> None:
    tensors = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}
    server = WeightsServer(tensors, ranks=2)

    async def ask() -> list[dict[str, str]]:
        async with server.running():
            client = SglangClient(
                lambda: server.url, api_key=API_KEY, admin_api_key=API_KEY, deadline_s=60
            )
            session = WeightSession(client, "continue", dict)
            try:
                made = await session.checksums()
                server.ranks = []
                with pytest.raises(EngineError):
                    await session.checksums()
                return made
            finally:
                await client.close()

    assert asyncio.run(ask()) == [
        {"w": digest(tensors["w"][:2]), "b": digest(tensors["b"])},
        {"w": digest(tensors["w"][2:]), "b": digest(tensors["b"])},
    ]
