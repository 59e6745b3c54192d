"""Weights lent in buckets, both ends, with a server that counts live memory.

No GPU is used: a CUDA handle is followed to the call that would open it.
"""

import asyncio
import base64
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from actors.sglang.client import SglangClient
from actors.sglang.installed import sglang_installed
from actors.sglang.lent_weights import cuda_payload
from actors.sglang.weights import WeightSession
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.weights.ipc import IpcTransport
from cluster.weights.publisher import Attempt
from cluster.weights.transport import Answers
from distill.engine import LentWeights, WeightSource
from distill.errors import EngineError
from distill.weights.lending import BucketLender, CudaMemory, LenderPlace, LentBucket
from distill.weights.model_weights import HeldWeights, TensorLayout, plan_buckets
from distill.weights.shared_memory import SharedTensors, block_bytes, starts_of, views_of
from tests.actors.misbehaving_server import API_KEY
from tests.actors.test_weight_portions import BUCKET_BYTES, LAYERS, expect, model
from tests.actors.weights_server import WeightsServer
from tests.leftovers import shared_memory_of
from tests.weights import LendableWeights, shared

TIMEOUT_S = 60.0
HERE = LenderPlace(host="here", gpu=None)


class Owner:
    """A server and the session that loads it, as in an engine's actor."""

    def __init__(self, server: WeightsServer) -> None:
        self.server, self._stack = server, AsyncExitStack()

    async def open(self) -> None:
        server = self.server
        await self._stack.enter_async_context(server.running())
        client = SglangClient(
            lambda: server.url, api_key=API_KEY, admin_api_key=API_KEY, deadline_s=TIMEOUT_S
        )
        self._stack.push_async_callback(client.close)
        shapes = {name: tuple(tensor.shape) for name, tensor in model(0.0).items()}
        self.session = WeightSession(client, "continue", lambda: shapes)

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        return await self.session.load(weights, version)

    async def load_bucket(self, push: str, number: int, handles: Sequence[LentBucket]) -> None:
        await self.session.lendings.of(push).put(number, handles)

    async def end_push(self, push: str, why: str) -> None:
        self.session.lendings.end(why, push)

    async def torn(self) -> str | None:
        return self.session.torn

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
def owned() -> Iterator[Callable[..., dict[str, Any]]]:
    """make(*servers): owners of the servers by name."""
    made: list[Any] = []

    def make(*servers: WeightsServer, kind: type[Owner] = Owner) -> dict[str, Any]:
        owners = [LocalActor(kind, server) for server in servers]
        made.extend(owners)
        for owner in owners:
            calls.get(owner.open.remote())
        return {f"e{i}": owner for i, owner in enumerate(owners)}

    yield make
    for owner in made:
        calls.kill(owner)


def lent_to(
    engines: Mapping[str, Any],
    sources: Mapping[str, Sequence[int]] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> IpcTransport:
    """`sources`: the worker that lends to each rank, by engine. None is worker 0 to one rank."""
    sources = sources or {name: [0] for name in engines}
    lenders = [HERE] * (1 + max(map(max, sources.values())))
    return IpcTransport(engines, sources, lenders, timeout_s=timeout_s, bucket_bytes=BUCKET_BYTES)


def push(transport: IpcTransport, weights: Any, version: int) -> Answers:
    return Attempt.begin([transport], weights, version, TIMEOUT_S).answers()


def held() -> tuple[int, set[str]]:
    """Open files and shared memory of this process."""
    return len(os.listdir("/proc/self/fd")), shared_memory_of(os.getpid())


def expect_no_more(before: tuple[int, set[str]]) -> None:
    """A push has 40 buckets: a leak per bucket exceeds the slack of a few connections."""
    files, names = held()
    assert files <= before[0] + 4 and names <= before[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_needs_one_bucket_of_extra_memory_and_frees_it(owned, ranks: int) -> None:
    server = WeightsServer(model(0.0), ranks)
    transport = lent_to(owned(server), {"e0": [0] * ranks})
    assert not push(transport, LendableWeights(model(5.0)), 1).failures  # connections, threads
    before = held()
    server.orders.clear()
    for version in (2, 3):
        answers = push(transport, LendableWeights(model(float(version))), version)
        assert not answers.failures and answers.values["e0"] > 0
        expect(server, float(version), str(version))
    expect_no_more(before)
    for part in server.ranks:
        assert BUCKET_BYTES <= part.device.peak <= 1.05 * BUCKET_BYTES
        assert part.device.live == 0
    bodies = server.bodies("/update_weights_from_tensor")
    assert len(bodies) == 2 * LAYERS
    assert {len(body["serialized_named_tensors"]) for body in bodies} == {ranks}
    last = [False] * (LAYERS - 1) + [True]
    assert [body["flush_cache"] for body in bodies] == 2 * last
    assert [body.get("weight_version") for body in bodies[:LAYERS]] == [None] * 39 + ["2"]
    changes = [path for path, _ in server.orders]
    assert changes[:2] == ["/pause_generation", "/begin_weight_update"]
    assert changes[-2:] == ["/end_weight_update", "/continue_generation"]
    assert server.bodies("/begin_weight_update") == [{"selector": "target"}] * 2


class TwoWorkers:
    """Weights lent by two workers with different values."""

    def __init__(self, first: float, second: float) -> None:
        self.layouts = HeldWeights(model(first)).layouts
        self._workers = [LendableWeights(model(v)) for v in (first, second)]
        self.readers: set[tuple[int, ...]] = set()

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        raise AssertionError("it is lent")

    def first_non_finite(self) -> None:
        return None

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        self.readers.add(tuple(readers))
        pairs = zip(self._workers, readers, strict=True)
        return [worker.lend(names, [number])[0] for worker, number in pairs]

    def take_back(self) -> None:
        for worker in self._workers:
            worker.take_back()


def test_each_rank_reads_what_its_own_worker_lends(owned) -> None:
    server, other = WeightsServer(model(0.0), 2), WeightsServer(model(0.0), 1)
    weights = TwoWorkers(3.0, 4.0)
    transport = lent_to(owned(server, other), {"e0": [0, 1], "e1": [0]})
    assert not push(transport, weights, 1).failures
    assert weights.readers == {(2, 1)}  # rank 0 of both, rank 1 of the first
    for rank, fill in enumerate((3.0, 4.0)):
        for name, tensor in model(fill).items():
            part = tensor.chunk(2)[rank] if tensor.dim() > 1 else tensor
            assert torch.equal(server.ranks[rank].parameters[name], part), name
    expect(other, 3.0, "1")


def test_a_refused_bucket_tears_one_engine_and_delays_no_other(owned) -> None:
    bad, good = WeightsServer(model(0.0)), WeightsServer(model(0.0))
    engines = owned(bad, good)
    transport = lent_to(engines)
    assert not push(transport, LendableWeights(model(1.0)), 1).failures
    before = held()
    bad.refused = bad.loads + 20
    answers = push(transport, LendableWeights(model(2.0)), 2)
    assert answers.failures.keys() == {"e0"} and "parts of two versions" in answers.failures["e0"]
    expect(good, 2.0, "2")
    assert calls.get(engines["e0"].torn.remote()) is not None
    changes = [path for path, _ in bad.orders]
    assert changes.count("/begin_weight_update") == changes.count("/end_weight_update") == 2
    expect_no_more(before)
    assert not push(transport, LendableWeights(model(3.0)), 3).failures
    for server in (bad, good):
        expect(server, 3.0, "3")
    assert calls.get(engines["e0"].torn.remote()) is None


class Silent(Owner):
    """An owner that never returns from bucket 20."""

    async def load_bucket(self, push: str, number: int, handles: Sequence[LentBucket]) -> None:
        if number == 20:
            await asyncio.Event().wait()
        await super().load_bucket(push, number, handles)


def test_an_engine_that_does_not_answer_fails_alone(owned) -> None:
    silent, good = WeightsServer(model(0.0)), WeightsServer(model(0.0))
    engines = owned(good) | {"silent": owned(silent, kind=Silent)["e0"]}
    answers = push(lent_to(engines, timeout_s=10.0), LendableWeights(model(1.0)), 1)
    assert answers.values.keys() == {"e0"} and answers.problem is None
    assert "bucket 20 " in answers.failures["silent"]
    expect(good, 1.0, "1")


class Broken(LendableWeights):
    """Weights whose lending fails after so many buckets."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], buckets: int) -> None:
        super().__init__(tensors)
        self._left, self.taken_back = buckets, 0

    def lend(self, names: Sequence[str], readers: Sequence[int]) -> list[list[LentBucket]]:
        if not self._left:
            raise FloatingPointError
        self._left -= 1
        return super().lend(names, readers)

    def take_back(self) -> None:
        self.taken_back += 1
        super().take_back()


@pytest.mark.parametrize("buckets", [0, 7])
def test_an_error_of_the_learner_ends_the_push_and_is_raised(owned, buckets: int) -> None:
    server = WeightsServer(model(0.0))
    engines = owned(server)
    transport, weights = lent_to(engines), Broken(model(1.0), buckets)
    with pytest.raises(FloatingPointError):
        push(transport, weights, 1)
    assert weights.taken_back == 1
    assert (calls.get(engines["e0"].torn.remote()) is None) == (buckets == 0)
    assert len(server.bodies("/update_weights_from_tensor")) == buckets
    assert [path for path, _ in server.orders][-1] == "/continue_generation"
    assert not push(transport, LendableWeights(model(2.0)), 2).failures
    expect(server, 2.0, "2")


@pytest.mark.parametrize("then", ["a push", "other weights"])
def test_a_load_of_a_lost_learner_ends_at_the_next_load(owned, then: str) -> None:
    server = WeightsServer(model(0.0))
    engines = owned(server)
    transport = lent_to(engines)
    assert not push(transport, LendableWeights(model(1.0)), 1).failures
    order = LentWeights(
        push="gone", timeout_s=3600,
        buckets=plan_buckets(HeldWeights(model(0.0)).layouts, BUCKET_BYTES),
    )  # fmt: skip
    waits = engines["e0"].load_weights.remote(order, 2)
    while len(server.bodies("/begin_weight_update")) < 2:
        threading.Event().wait(0.01)
    if then == "a push":
        assert not push(transport, LendableWeights(model(3.0)), 3).failures
    else:
        calls.get(engines["e0"].load_weights.remote(shared(model(3.0)), 3))
    with pytest.raises(EngineError):
        calls.get(waits)
    expect(server, 3.0, "3")
    with pytest.raises(EngineError):
        calls.get(engines["e0"].load_bucket.remote("gone", 0, []))


def test_other_tensors_than_the_model_has_are_refused(owned) -> None:
    server = WeightsServer(model(0.0))
    transport = lent_to(owned(server))
    fewer = model(1.0)
    del fewer["model.layers.3.norm.weight"]
    answers = push(transport, LendableWeights(fewer), 1)
    assert "model.layers.3.norm.weight" in answers.failures["e0"]
    assert {path for path, _ in server.orders} <= {"/server_info"}


def test_buckets_reuse_the_lender_s_memory() -> None:
    lender = BucketLender("cpu")
    tensors = {"a": torch.arange(6.0), "b": torch.full((3, 2), 7, dtype=torch.int64)}
    layouts = HeldWeights(tensors).layouts
    waiting = [*tensors.items()]
    drawn = (waiting.pop(0) for _ in range(len(tensors)))
    first, same = lender.lend(layouts, drawn, 2)
    assert isinstance(first, SharedTensors) and first == same and not waiting
    for name, tensor in first.unpack().items():
        assert torch.equal(tensor, tensors[name])
    [second] = lender.lend(layouts[:1], [("a", torch.ones(6))], 1)
    assert isinstance(second, SharedTensors) and second.identity == first.identity
    lender.take_back()
    with pytest.raises(EngineError), second.held():
        pass


@pytest.mark.parametrize("reader", ["pickle", "SGLang's unpickler"])
def test_a_cuda_handle_is_opened_with_the_arguments_of_torch_s_reductions(
    monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """The GPU is named by its UUID."""
    layouts = (
        TensorLayout(name="a", dtype="bfloat16", shape=(3, 5)),
        TensorLayout(name="b", dtype="float32", shape=(7,)),
    )
    memory = CudaMemory(
        layouts=layouts, device="GPU-1234", handle=b"h" * 64, size=192, offset=512, counter=b"/c",
        counter_offset=3, event=b"e" * 64, synchronises=True,
    )  # fmt: skip
    payload = cuda_payload(memory)
    asked: list[tuple[Any, ...]] = []
    flat = torch.zeros(block_bytes(layouts), dtype=torch.uint8)
    views_of(flat, layouts)["a"].fill_(1.5)

    def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
        asked.append(arguments)
        return flat

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    given = pickle.loads(payload) if reader == "pickle" else read_by_sglang(payload)
    assert asked == [(
        torch.Tensor, torch.Size([128]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        "GPU-1234", b"h" * 64, 192, 512, False, b"/c", 3, b"e" * 64, True,
    )]  # fmt: skip
    assert given["flattened_tensor"] is flat
    a, b = given["metadata"]
    assert (a.name, a.shape, a.dtype) == ("a", torch.Size([3, 5]), torch.bfloat16)
    assert (a.start_idx, a.end_idx, b.start_idx, b.end_idx) == (0, 30, 64, 92)
    assert starts_of(layouts) == [0, 64]
    assert (flat[a.start_idx : a.end_idx].view(a.dtype).reshape(a.shape) == 1.5).all()


def read_by_sglang(payload: bytes) -> dict[str, Any]:
    """The bucket as a scheduler reads it: SGLang's names allowed, and its tensors the same."""
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata  # pyright: ignore[reportMissingImports]

    given = MultiprocessingSerializer.deserialize(base64.b64encode(payload).decode())
    metadata = [FlattenedTensorMetadata(**vars(each)) for each in given["metadata"]]
    bucket = FlattenedTensorBucket(flattened_tensor=given["flattened_tensor"], metadata=metadata)
    (_, a), (name, b) = bucket.reconstruct_tensors()
    assert name == "b" and a.dtype == torch.bfloat16 and b.shape == (7,) and (a == 1.5).all()
    return given
