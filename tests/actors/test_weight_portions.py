"""Weights are loaded bucket by bucket: a push adds one bucket to a rank's memory."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from actors.sglang.client import SglangClient
from actors.sglang.weights import WeightSession
from distill.engine import (
    ABORTS,
    JOINING,
    SENDS,
    CheckpointDirectory,
    CollectiveBroadcast,
    GroupMember,
)
from distill.errors import EngineError
from distill.weights.model_weights import HeldWeights, plan_buckets
from learner.process_group import open_store
from tests.actors.misbehaving_server import API_KEY
from tests.actors.weights_server import WeightsServer
from tests.weights import shared

LAYERS = 40


def model(fill: float) -> dict[str, torch.Tensor]:
    """Weights of forty buckets: a matrix and a vector per layer."""
    return {
        f"model.layers.{i}.{name}": torch.full(shape, fill + i)
        for i in range(LAYERS)
        for name, shape in (("mlp.weight", (32, 15)), ("norm.weight", (32,)))
    }


BUCKET_BYTES = (32 * 15 + 32) * 4


def against(
    server: WeightsServer, call: Callable[[WeightSession], Coroutine[Any, Any, Any]]
) -> Any:
    """Result of the call of a session with the server."""

    async def ask_it() -> Any:
        async with server.running():
            client = SglangClient(
                lambda: server.url, api_key=API_KEY, admin_api_key=API_KEY, deadline_s=60
            )
            shapes = {name: tuple(tensor.shape) for name, tensor in model(0.0).items()}
            session = WeightSession(client, "continue", lambda: shapes, bucket_bytes=BUCKET_BYTES)
            try:
                return await call(session)
            finally:
                await client.close()

    return asyncio.run(ask_it())


def expect(server: WeightsServer, fill: float, version: str) -> None:
    ranks = len(server.ranks)
    for rank, part in enumerate(server.ranks):
        for name, tensor in model(fill).items():
            expected = tensor.chunk(ranks)[rank] if tensor.dim() > 1 else tensor
            assert torch.equal(part.parameters[name], expected), name
    assert server.version == version


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_s_extra_memory_is_one_bucket(ranks: int) -> None:
    server = WeightsServer(model(0.0), ranks)
    against(server, lambda session: session.load(shared(model(7.0)), 3))
    expect(server, 7.0, "3")
    for part in server.ranks:
        assert BUCKET_BYTES <= part.device.peak <= 1.05 * BUCKET_BYTES
        assert part.device.live == 0
    calls = server.bodies("/update_weights_from_tensor")
    assert len(calls) == LAYERS == len(plan_buckets(HeldWeights(model(0.0)).layouts, BUCKET_BYTES))
    assert [body["flush_cache"] for body in calls] == [False] * (LAYERS - 1) + [True]
    assert [body.get("weight_version") for body in calls] == [None] * (LAYERS - 1) + ["3"]
    changes = [path for path, _ in server.orders if path != "/server_info"]
    assert changes[:2] == ["/pause_generation", "/begin_weight_update"]
    assert changes[-2:] == ["/end_weight_update", "/continue_generation"]
    assert len(server.bodies("/begin_weight_update")) == 1  # one session, many calls


@pytest.mark.parametrize(
    "info, selector",
    [
        ({}, "target"),
        ({"speculative_algorithm": None}, "target"),
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "other"}, "target"),
        ({"speculative_algorithm": "NEXTN", "speculative_draft_model_path": None}, "all"),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "the model"}, "all"),
    ],
)
def test_a_draft_of_its_own_names_is_left_alone(info: dict[str, Any], selector: str) -> None:
    server = WeightsServer(model(0.0), **info)
    against(server, lambda session: session.load(shared(model(1.0)), 1))
    for path in ("/begin_weight_update", "/update_weights_from_tensor"):
        assert {body["selector"] for body in server.bodies(path)} == {selector}


def test_files_go_into_no_other_draft(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model(0.0).items()}
    monkeypatch.setattr("actors.sglang.weight_loads.pushed_shapes", lambda _: shapes)
    server = WeightsServer(
        model(0.0), speculative_algorithm="EAGLE3", speculative_draft_model_path="other"
    )
    with pytest.raises(EngineError):
        against(server, lambda s: s.load(CheckpointDirectory(path=str(tmp_path)), 1))
    assert [path for path, _ in server.orders] == ["/server_info"]


@pytest.mark.parametrize("word", [ABORTS, None])
@pytest.mark.parametrize("number", [JOINING, 1])
def test_no_server_waits_in_a_group_that_is_not_to_come(number: int, word: str | None) -> None:
    """The learner gives up or dies before the group is formed or a push begins.

    The server is asked to receive nothing, and continues.
    """
    server, store = WeightsServer(model(0.0)), open_store("127.0.0.1", 60)
    layouts = HeldWeights(model(0.0)).layouts
    member = GroupMember(
        address="127.0.0.1", port=store.port, name="some", backend="gloo", world_size=2,
        rank=1, join_deadline_s=60, timeout_s=60 if word else 0.2,
    )  # fmt: skip
    buckets = plan_buckets(layouts, BUCKET_BYTES)
    order = CollectiveBroadcast(member=member, number=1, buckets=buckets)

    async def push(session: WeightSession) -> None:
        if number != JOINING:
            store.set(member.word_key(JOINING), SENDS)
        loading = asyncio.create_task(session.load(order, 1))
        await asyncio.to_thread(store.wait, [member.ready_key(number)])
        assert bool(server.bodies("/begin_weight_update")) == (number != JOINING)
        if word:
            store.set(member.word_key(number), word)
        with pytest.raises(EngineError):
            await loading
        assert session.torn is None

    against(server, push)
    assert not server.bodies("/update_weights_from_distributed")
    last = [path for path, _ in server.orders][-1:]
    assert last == (["/continue_generation"] if number != JOINING else [])


def test_a_bucket_that_is_refused_tears_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's session is closed, generation continues, and nothing is served."""
    server = WeightsServer(model(0.0))
    server.refused = 20

    async def push(session: WeightSession) -> None:
        with pytest.raises(EngineError):
            await session.load(shared(model(1.0)), 1)
        assert session.torn is not None
        await session.load(shared(model(2.0)), 2)
        assert session.torn is None

    against(server, push)
    expect(server, 2.0, "2")
    changes = [path for path, _ in server.orders]
    assert changes.count("/begin_weight_update") == changes.count("/end_weight_update") == 2
