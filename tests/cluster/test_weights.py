"""The push, both ends: each transport, what it costs, and how it fails."""

import asyncio
import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayActorError

import actors.embedded.weight_group
import cluster.weights.collective
import cluster.weights.publisher
import cluster.weights.transport
import distill.durable_files
from actors.embedded.engine import EmbeddedEngine
from actors.sglang.config import SglangConfig
from actors.sglang.hosted import HostedSglangEngine
from actors.sglang.installed import sglang_installed
from actors.sglang.parallelism import Parallelism
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.weights.publisher import Attempt, Publisher
from cluster.weights.transport import PushSettings, Sending, Transport, collect
from cluster.weights.transports import (
    CollectiveTransport,
    DiskTransport,
    SharedMemoryTransport,
    choose_transports,
)
from cluster.weights.ways import Place
from distill.engine import CheckpointDirectory, GenerateRequest, WeightSource
from distill.errors import (
    CalibrationError,
    CheckpointError,
    EngineError,
    EngineLost,
    NonFiniteError,
)
from distill.models.loading import load_causal_lm, read_weights
from distill.process_groups import nccl_settings
from distill.records import TrainedGroups
from distill.sampling import TrainSampling
from distill.weights.model_weights import HeldWeights, Weights, plan_buckets
from distill.weights.shared_memory import SharedBlock
from learner.config import LearnerConfig
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.full_disk import files_of_at_most
from tests.leftovers import shared_memory_of
from tests.refusals import refuses
from tests.waiting import until
from tests.weights import gather_all, shared

pytestmark = pytest.mark.usefixtures("ray_cluster")

T = 0.7
TIMEOUT_S = 60.0
# Several broadcasts a push, of the tiny student's 20 tensors.
BUCKET_BYTES = 16 << 10


class Queue:
    """Remembers what was published, and what was pushed beside the learner."""

    def __init__(self) -> None:
        self.published: list[tuple[int, int]] = []
        self.pushed: list[tuple[int, int]] = []

    def push(self, version: int, trained: TrainedGroups) -> None:
        self.pushed.append((version, trained.watermark))

    def publish(self, version: int, trained: TrainedGroups) -> None:
        self.published.append((version, trained.watermark))


class Liar(EmbeddedEngine):
    """Acknowledges every push and loads only the first."""

    _loaded = False

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        if self._loaded:
            return 0.0
        self._loaded = True
        return await super().load_weights(weights, version)


class Troubled:
    """An engine in trouble: `hangs`, `dies`, or refuses."""

    def __init__(self, how: str) -> None:
        self._how = how

    def load_weights(self, weights: WeightSource, version: int) -> float:
        if self._how == "hangs":
            time.sleep(3600)
        if self._how == "dies":
            import os

            os._exit(1)
        raise EngineError("no room for them")


def actor(kind: type, *arguments: Any, **named: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0).remote(*arguments, **named)


@pytest.fixture
def learner(tiny_pair: TinyPair, tmp_path: Path) -> Learner:
    config = LearnerConfig.of(model=tiny_pair.student, total_steps=1, device="cpu")
    return Learner(config, str(tmp_path))


def learn(learner: Learner) -> None:
    for parameter in learner.model.parameters():
        parameter.data.mul_(1.02)


@contextmanager
def housed(pair: TinyPair, house: Callable[..., Any]) -> Iterator[Callable[..., dict[str, Any]]]:
    """make(*kinds): actors of the tiny student, named as a run names them."""
    made: list[Any] = []

    def make(*kinds: type) -> dict[str, Any]:
        for kind in kinds:
            made.append(house(kind, model_path=pair.student, device="cpu", threads=1))
        return {f"policy engine {i}": engine for i, engine in enumerate(made)}

    yield make
    for engine in made:
        calls.kill(engine)


@pytest.fixture
def engines(tiny_pair: TinyPair) -> Iterator[Callable[..., dict[str, Any]]]:
    """Function that makes engines in this process."""
    with housed(tiny_pair, LocalActor) as make:
        yield make


@pytest.fixture
def ray_engines(tiny_pair: TinyPair) -> Iterator[Callable[..., dict[str, Any]]]:
    """Function that makes engines on Ray."""
    with housed(tiny_pair, actor) as make:
        yield make


@pytest.fixture(scope="module")
def lasting(tiny_pair: TinyPair, ray_cluster: None) -> Iterator[dict[str, Any]]:
    """Three engines on Ray for tests that end none of them."""
    with housed(tiny_pair, actor) as make:
        yield make(*[EmbeddedEngine] * 3)


@pytest.fixture
def pair(lasting: dict[str, Any]) -> dict[str, Any]:
    """Two of the lasting engines."""
    return {name: lasting[name] for name in ("policy engine 0", "policy engine 1")}


def settings(**changes: Any) -> PushSettings:
    given: dict[str, Any] = {
        "choice": "auto", "served": False, "device": "cpu", "directory": "/nowhere", "model": "m",
        "temperature": T, "probe_every": 1, "prove_every": 1, "timeout_s": TIMEOUT_S,
        "dtype": "float32",
    } | changes  # fmt: skip
    return PushSettings(**given)


def publisher(
    engines: Mapping[str, Any], learner: Learner, queue: Any, *, overlaps: bool = False,
    **changes: Any,
):  # fmt: skip
    on_overlap = queue.push if overlaps else None
    push = settings(model=learner.model.name_or_path, **changes)
    return Publisher(
        engines, push, learner.logprobs, credit=queue.publish, on_overlap=on_overlap,
        lenders=learner.lender_places(),
    )  # fmt: skip


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Transport]:
    """Transports, in the order in which publishers choose them."""
    made: list[Transport] = []

    def choose(*given: Any) -> list[Transport]:
        made.extend(chosen := choose_transports(*given))
        return chosen

    monkeypatch.setattr(cluster.weights.publisher, "choose_transports", choose)
    return made


def choose_once(monkeypatch: pytest.MonkeyPatch, transport: Transport) -> None:
    """The next publisher to choose takes `transport`; later choices are its own."""

    def choose(*_given: Any) -> list[Transport]:
        monkeypatch.setattr(cluster.weights.publisher, "choose_transports", choose_transports)
        return [transport]

    monkeypatch.setattr(cluster.weights.publisher, "choose_transports", choose)


def sent(publish: Publisher, weights: Weights, version: int) -> dict[str, float]:
    """A publication of weights with four groups a version."""
    return publish(weights, version, TrainedGroups(4 * version))


def versions(engines: Mapping[str, Any]) -> list[int]:
    asked = [engine.info.remote() for engine in engines.values()]
    return [calls.get(info, timeout=TIMEOUT_S).weight_version for info in asked]


def test_a_push_reaches_every_engine_and_then_frees_slots(pair, learner: Learner) -> None:
    queue = Queue()
    publish = publisher(pair, learner, queue)
    first = sent(publish, learner.weights(), 0)
    assert queue.published == [(0, 0)] and "push/probe_gap" not in first
    assert publish.describe() == ("shared memory to policy engine 0, policy engine 1")
    for version in (1, 2):
        learn(learner)
        metrics = sent(publish, learner.weights(), version)
        assert versions(pair) == [version] * 2
        assert queue.published[-1] == (version, 4 * version)
        assert metrics["push/bytes"] == sum(p.nbytes for p in learner.model.parameters())
        assert 0 < metrics["push/pause"] <= metrics["push/seconds"]
        assert 0 <= metrics["push/probe_gap"] < 1e-5
        assert metrics["push/proven"] == 1
    gap = publish.settle()
    assert gap is not None and gap < 1e-5
    assert publish.settle() is None


def test_every_so_many_versions_are_probed(engines, learner: Learner) -> None:
    publish = publisher(engines(EmbeddedEngine), learner, Queue(), probe_every=3)
    found = []
    for version in range(5):
        metrics = sent(publish, learner.weights(), version)
        found += [version - 1] if "push/probe_gap" in metrics else []
    assert found == [0, 3] and publish.settle() is None


class Held(EmbeddedEngine):
    """Loads no weights until it is released, and refuses the first `refusals` of them."""

    def __init__(self, *, refusals: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.released = asyncio.Event()
        self.released.set()
        self.refusals = refusals
        self.loads: list[int] = []

    async def asked(self) -> list[int]:
        """Versions that it was to load."""
        return self.loads

    async def hold(self, refusals: int = 0) -> None:
        self.released.clear()
        self.refusals = refusals

    async def release(self) -> None:
        self.released.set()

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        self.loads.append(version)
        await self.released.wait()
        if self.refusals > 0:
            self.refusals -= 1
            raise EngineError("no room for them")
        return await super().load_weights(weights, version)


def on_all(engines: Mapping[str, Any], method: str, *arguments: Any) -> None:
    for engine in engines.values():
        calls.get(getattr(engine, method).remote(*arguments))


@pytest.mark.parametrize(("choice", "refusals"), [("shared_memory", 1), ("disk", 0)])
def test_a_push_goes_on_beside_the_learner_and_slots_wait_for_it(
    engines, learner: Learner, tmp_path: Path, choice: str, refusals: int
) -> None:
    """While engines load, refuse and load again, the learner's weights are other ones already."""
    pair, queue = engines(Held, Held), Queue()
    publish = publisher(
        pair, learner, queue, choice=choice, directory=str(tmp_path / "weights"), overlaps=True
    )
    sent(publish, learner.weights(), 0)  # finds out what probe and proof ask for
    assert queue.published == [(0, 0)] and queue.pushed == []
    for version in (1, 2, 3):
        learn(learner)
        on_all(pair, "hold", refusals)
        metrics = sent(publish, learner.weights(), version)
        learn(learner)  # in place, as AdamW does
        assert queue.pushed[-1] == (version, 4 * version)
        assert queue.published[-1] == (version - 1, 4 * (version - 1))
        assert versions(pair) == [version - 1] * 2
        publish.check()
        on_all(pair, "release")
        publish.wait()
        assert queue.published[-1] == (version, 4 * version)
        assert versions(pair) == [version] * 2
        if version > 1:  # what was found of the push before: it was of the weights then
            assert metrics["push/probe_gap"] < 1e-5 and metrics["push/proven"] == 1
            assert metrics["push/engines"] == 2
            assert 0 <= metrics["push/overlapped"] <= metrics["push/seconds"]
    gap = publish.settle()
    assert gap is not None and gap < 1e-5


def test_who_asks_for_the_engines_waits_for_the_push_beside_the_learner(
    engines, learner: Learner
) -> None:
    pair, queue = engines(Held), Queue()
    publish = publisher(pair, learner, queue, overlaps=True)
    sent(publish, learner.weights(), 0)
    joining = {"policy engine 1": engines(EmbeddedEngine)["policy engine 1"]}
    actions: list[Callable[[], Any]] = [
        lambda: publish.admit(joining, learner.weights(), 1),
        lambda: publish.lend(joining, learner.weights(), 2),
        lambda: publish.remove_engines(["policy engine 1"]),
        publish.settle,
        lambda: sent(publish, learner.weights(), 6),
    ]
    for version, action in enumerate(actions, start=1):
        on_all(pair, "hold")
        learn(learner)
        sent(publish, learner.weights(), version)
        assert queue.published[-1][0] == version - 1
        releasing = threading.Timer(0.1, on_all, (pair, "release"))
        releasing.start()
        action()
        releasing.join()
        assert (version, 4 * version) in queue.published


def test_a_push_that_fails_beside_the_learner_fails_whoever_asks_next(
    engines, learner: Learner
) -> None:
    pair, queue = engines(Held), Queue()
    publish = publisher(pair, learner, queue, overlaps=True)
    sent(publish, learner.weights(), 0)
    on_all(pair, "hold", 2)
    sent(publish, learner.weights(), 1)
    publish.check()
    on_all(pair, "release")
    with pytest.raises(EngineError):
        publish.wait()
    for action in (publish.check, publish.settle, lambda: sent(publish, learner.weights(), 2)):
        with pytest.raises(EngineError):
            action()
    assert queue.published == [(0, 0)] and versions(pair) == [0]


def checksums(engines: Mapping[str, Any]) -> list[Any]:
    """Checksums of all weights that each engine holds."""
    return [calls.get(engine.weight_checksums.remote()) for engine in engines.values()]


@pytest.mark.parametrize("choice", ["shared_memory", "disk"])
def test_an_engine_joins_from_the_copy_while_the_learner_computes(
    engines, learner: Learner, tmp_path: Path, choice: str
) -> None:
    """The engine holds the same bits as the others, although the learner's weights have changed."""
    directory = str(tmp_path / "weights")
    first, queue = engines(EmbeddedEngine), Queue()
    publish = publisher(first, learner, queue, choice=choice, directory=directory, overlaps=True)
    assert publish.join(first) is None  # nothing was pushed yet
    for version in (0, 1):
        sent(publish, learner.weights(), version)
        learn(learner)
    for index in (1, 2):
        pair = engines(EmbeddedEngine)
        name = f"policy engine {index}"
        assert publish.join({name: pair[name]}) == 1
        assert versions(pair) == [1] * (index + 1)
    one, *others = checksums(pair)
    assert all(other == one for other in others)
    sent(publish, learner.weights(), 2)
    publish.wait()
    assert versions(pair) == [2] * 3 and queue.published[-1] == (2, 8)
    gap = publish.settle()
    assert gap is not None and gap < 1e-5


def test_an_engine_that_joins_in_the_middle_of_a_push_gets_the_new_version(
    engines, learner: Learner
) -> None:
    first, queue = engines(Held), Queue()
    publish = publisher(first, learner, queue, overlaps=True)
    sent(publish, learner.weights(), 0)
    learn(learner)
    on_all(first, "hold")
    sent(publish, learner.weights(), 1)
    learn(learner)
    pair = engines(Held)
    joiner = {"policy engine 1": pair["policy engine 1"]}
    joining = calls.in_thread(lambda: publish.join(joiner), "join")
    assert not joining.done()
    on_all(first, "release")
    assert joining.result() == 1 and versions(pair) == [1, 1]
    one, other = checksums(pair)
    assert one == other
    publish.settle()


def test_a_push_waits_for_the_engine_that_reads_its_copy(engines, learner: Learner) -> None:
    first = engines(EmbeddedEngine)
    publish = publisher(first, learner, Queue(), overlaps=True)
    sent(publish, learner.weights(), 0)
    learn(learner)
    pair = engines(Held)
    joiner = {"policy engine 1": pair["policy engine 1"]}
    on_all(joiner, "hold")
    joining = calls.in_thread(lambda: publish.join(joiner), "join")
    until(lambda: calls.get(joiner["policy engine 1"].asked.remote()) == [0])
    releasing = threading.Timer(0.1, on_all, (joiner, "release"))
    releasing.start()
    sent(publish, learner.weights(), 1)
    publish.wait()
    assert joining.result() == 0
    assert calls.get(joiner["policy engine 1"].asked.remote()) == [0, 1]
    assert versions(pair) == [1, 1]
    releasing.join()
    gap = publish.settle()
    assert gap is not None and gap < 1e-5


class Sleeper(EmbeddedEngine):
    """Sleeps as a server does: what is asked meanwhile waits for the next weights."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.awake = asyncio.Event()
        self.awake.set()

    async def sleep(self) -> None:
        self.awake.clear()

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        seconds = await super().load_weights(weights, version)
        self.awake.set()
        return seconds

    async def score(self, requests: Any) -> Any:
        await self.awake.wait()
        return await super().score(requests)

    async def asleep(self) -> bool:
        return not self.awake.is_set()


class Restless(Sleeper):
    async def sleep(self) -> None:
        raise EngineError("it holds on to its memory")


def test_engines_sleep_until_the_next_push_and_the_probe_is_settled_before(
    engines, learner: Learner
) -> None:
    pair = engines(Sleeper, Sleeper)
    publish = publisher(pair, learner, Queue())
    sent(publish, learner.weights(), 0)
    for version in (1, 2):
        publish.sleep(version - 1)
        assert [calls.get(engine.asleep.remote()) for engine in pair.values()] == [True, True]
        learn(learner)
        metrics = sent(publish, learner.weights(), version)
        assert metrics["push/probe_gap"] < 1e-5 and versions(pair) == [version] * 2
        assert [calls.get(engine.asleep.remote()) for engine in pair.values()] == [False, False]
    assert publish.settle() is not None


def test_an_engine_that_does_not_sleep_is_ended(engines, learner: Learner) -> None:
    pair, queue = engines(Sleeper, Restless), Queue()
    publish = publisher(pair, learner, queue)
    sent(publish, learner.weights(), 0)
    publish.sleep(0)
    with pytest.raises(RayActorError):
        calls.get(pair["policy engine 1"].info.remote())
    learn(learner)
    assert sent(publish, learner.weights(), 1)["push/engines"] == 1
    assert queue.published == [(0, 0), (1, 4)]


def test_an_engine_that_does_not_hold_what_it_acknowledged(engines, learner: Learner) -> None:
    publish = publisher(engines(EmbeddedEngine, Liar), learner, Queue())
    sent(publish, learner.weights(), 0)
    learn(learner)
    sent(publish, learner.weights(), 1)
    with pytest.raises(CalibrationError):
        sent(publish, learner.weights(), 2)


def test_engines_of_a_teacher_that_follows_are_checked_by_checksums(
    engines, learner: Learner
) -> None:
    """A pool of its own: no slot is freed, and no log-prob is compared."""
    pair = engines(EmbeddedEngine, Held)
    push = settings(model=learner.model.name_or_path).for_teachers(Parallelism())
    publish = Publisher(pair, push, learner.logprobs)
    sent(publish, learner.weights(), 0)
    learn(learner)
    calls.get(pair["policy engine 1"].hold.remote(1))
    calls.get(pair["policy engine 1"].release.remote())
    assert sent(publish, learner.weights(), 3)["push/engines"] == 2  # at the second try
    assert versions(pair) == [3, 3]
    learn(learner)
    metrics = sent(publish, learner.weights(), 6)
    assert metrics["push/proven"] == 1 and "push/probe_gap" not in metrics
    publish.settle()
    pair = engines(Liar)
    publish.admit({"policy engine 2": pair["policy engine 2"]}, learner.weights(), 6)
    learn(learner)
    sent(publish, learner.weights(), 9)
    with refuses(CalibrationError, None, names="policy engine 2"):
        publish.settle()


def test_weights_that_are_not_finite_are_not_sent(engines, learner: Learner) -> None:
    only = engines(EmbeddedEngine)
    publish = publisher(only, learner, Queue())
    tensors = gather_all(learner.weights())
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("inf"))
    with pytest.raises(NonFiniteError):
        sent(publish, HeldWeights(tensors), 1)
    assert versions(only) == [0]


@pytest.mark.parametrize(
    "choice, how",
    [
        ("disk", "dies"),
        ("shared_memory", "refuses"),
        pytest.param("disk", "hangs", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_does_not_take_the_weights_is_ended_before_slots_are_freed(
    ray_engines, learner: Learner, tmp_path: Path, choice: str, how: str
) -> None:
    queue, troubled = Queue(), actor(Troubled, how)
    healthy = ray_engines(EmbeddedEngine)
    ray.get(healthy["policy engine 0"].info.remote())  # it has started: the deadline is the other's
    timeout_s = 10.0 if how == "hangs" else TIMEOUT_S
    both = healthy | {"policy engine 1": troubled}
    publish = publisher(
        both, learner, queue, choice=choice, directory=str(tmp_path), timeout_s=timeout_s
    )
    metrics = sent(publish, learner.weights(), 1)
    assert versions(healthy) == [1] and metrics["push/engines"] == 1
    assert queue.published == [(1, 4)]
    with pytest.raises(RayActorError):
        ray.get(troubled.__ray_ready__.remote(), timeout=TIMEOUT_S)
    learn(learner)
    assert sent(publish, learner.weights(), 2)["push/engines"] == 1
    assert versions(healthy) == [2]
    publish.settle()


class Ungathered:
    """Weights of which a learner worker gathers so many portions, and then no more."""

    def __init__(self, weights: Weights, portions: int) -> None:
        self.layouts, self.first_non_finite = weights.layouts, weights.first_non_finite
        self._gather, self._left = weights.gather, portions

    def gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        if not self._left:
            raise FloatingPointError
        self._left -= 1
        return dict(self._gather(names))


@pytest.mark.parametrize("choice, portions", [("shared_memory", 0), ("disk", 0), ("group", 2)])
def test_an_error_of_the_learner_s_own_is_raised_as_it_is_and_ends_no_engine(
    pair, learner: Learner, tmp_path: Path, choice: str, portions: int
) -> None:
    queue = Queue()
    publish = publisher(
        pair, learner, queue, choice=choice, directory=str(tmp_path), bucket_bytes=BUCKET_BYTES,
        timeout_s=10 * TIMEOUT_S,
    )  # fmt: skip
    sent(publish, learner.weights(), 0)
    learn(learner)
    with pytest.raises(FloatingPointError):
        sent(publish, Ungathered(learner.weights(), portions), 1)
    assert versions(pair) == [0, 0] and queue.published == [(0, 0)]
    assert sent(publish, learner.weights(), 2)["push/engines"] == 2
    assert versions(pair) == [2, 2]


class Linked(Sending):
    """A push that engines receive together; its own end tells an engine that waits."""

    linked = True
    stopped = 0

    def _run(self) -> None: ...

    def stop(self) -> None:
        super().stop()
        self.stopped += 1
        Waits.given_up.set()


class LinkedTransport(SharedMemoryTransport):
    def start(self, weights: Weights, version: int) -> dict[str, Any]:
        self.sending = Linked(TIMEOUT_S)
        self.sending.start()
        return super().start(weights, version)


@pytest.mark.slow
def test_who_is_left_in_a_collective_is_ended_with_the_peer_that_was_lost(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits until the push has timed out, and nobody is asked again."""
    monkeypatch.setattr(cluster.weights.transport, "GRACE_S", 0.5)
    pair = {name: actor(Troubled, how) for name, how in (("stuck", "hangs"), ("lost", "dies"))}
    queue = Queue()
    publish = publisher(pair, learner, queue, timeout_s=3600.0)
    choose_once(monkeypatch, LinkedTransport(pair))
    assert sent(publish, learner.weights(), 1)["push/engines"] == 0
    assert queue.published == [(1, 4)]
    assert "stuck: still in the collective that lost left" in caplog.text
    for name, engine in pair.items():
        assert any(message.startswith(f"{name} ") for message in caplog.messages)
        with pytest.raises(RayActorError):
            ray.get(engine.__ray_ready__.remote(), timeout=TIMEOUT_S)


class Waits:
    """An engine that answers when the push is given up."""

    given_up = threading.Event()

    def load_weights(self, weights: WeightSource, version: int) -> float:
        assert self.given_up.wait(TIMEOUT_S)
        raise EngineError("the learner cancelled the push; the engine continues")


def test_who_comes_out_of_a_collective_is_not_lost() -> None:
    pair = {"refuses": LocalActor(Troubled, "refuses"), "waits": LocalActor(Waits)}
    pending = {name: engine.load_weights.remote(None, 1) for name, engine in pair.items()}
    sending = Linked(TIMEOUT_S)
    answers = collect(pending, TIMEOUT_S, sending)
    assert sending.stopped == 1 and not answers.lost
    assert "no room" in answers.failures["refuses"] and "waits" in answers.failures


def test_weights_that_no_engine_takes_are_an_error(learner: Learner, tmp_path: Path) -> None:
    sick = {how: actor(Troubled, how) for how in ("refuses", "declines")}
    queue = Queue()
    publish = publisher(sick, learner, queue, choice="disk", directory=str(tmp_path))
    with pytest.raises(EngineError):
        sent(publish, learner.weights(), 1)
    assert queue.published == []
    for engine in sick.values():
        ray.kill(engine)


def test_when_every_engine_is_dead_the_version_counts_all_the_same(
    learner: Learner, tmp_path: Path
) -> None:
    queue = Queue()
    dies = {"dies": actor(Troubled, "dies")}
    publish = publisher(dies, learner, queue, choice="disk", directory=str(tmp_path))
    assert sent(publish, learner.weights(), 1)["push/engines"] == 0
    assert queue.published == [(1, 4)]


def test_an_engine_that_joins_gets_the_present_weights(engines, learner: Learner) -> None:
    first = engines(EmbeddedEngine)
    publish = publisher(first, learner, Queue())
    sent(publish, learner.weights(), 0)
    learn(learner)
    sent(publish, learner.weights(), 1)
    both = engines(EmbeddedEngine)
    joining = {"policy engine 1": both["policy engine 1"]}
    publish.admit(joining, learner.weights(), 1)
    assert versions(both) == [1, 1]
    learn(learner)
    assert sent(publish, learner.weights(), 2)["push/engines"] == 2
    assert versions(both) == [2, 2]
    gap = publish.settle()
    assert gap is not None and gap < 1e-4
    publish.remove_engines(["policy engine 0"])
    learn(learner)
    sent(publish, learner.weights(), 3)
    assert versions(both) == [2, 3]
    troubled = LocalActor(Troubled, "refuses")
    with pytest.raises(EngineError):
        publish.admit({"policy engine 2": troubled}, learner.weights(), 3)
    assert sent(publish, learner.weights(), 4)["push/engines"] == 1


def test_an_engine_that_is_lent_weights_stays_at_them(engines, learner: Learner) -> None:
    engines(EmbeddedEngine)
    both = engines(EmbeddedEngine)
    lent = {"policy engine 1": both["policy engine 1"]}
    publish = publisher({"policy engine 0": both["policy engine 0"]}, learner, Queue())
    sent(publish, learner.weights(), 0)
    assert publish.lend(lent, learner.weights(), 0) == {}
    learn(learner)
    assert sent(publish, learner.weights(), 1)["push/engines"] == 1
    assert versions(both) == [1, 0]
    assert publish.lend(lent, learner.weights(), 1) == {} and versions(both) == [1, 1]
    troubled = lent | {"policy engine 2": LocalActor(Troubled, "refuses")}
    [[name, why]] = publish.lend(troubled, learner.weights(), 1).items()
    assert name == "policy engine 2" and "no room for them" in why


def test_disk_keeps_the_newest_version_whole(engines, learner: Learner, tmp_path: Path) -> None:
    pair, directory = engines(EmbeddedEngine, EmbeddedEngine), tmp_path / "weights"
    publish = publisher(pair, learner, Queue(), choice="disk", directory=str(directory))
    for version in range(3):
        learn(learner)
        sent(publish, learner.weights(), version)
        assert [path.name for path in directory.iterdir()] == [f"version-{version:06d}"]
        assert versions(pair) == [version] * 2
    assert publish.settle() is not None
    newest = str(directory / "version-000002")
    late = engines(EmbeddedEngine)["policy engine 2"]
    calls.get(late.load_weights.remote(CheckpointDirectory(path=newest), 2))
    assert versions({"late": late}) == [2]
    written = read_weights(newest)
    model = load_causal_lm(newest, dtype=torch.float32, device="cpu")
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, written[name])


def test_a_disk_that_cannot_be_written(engines, learner: Learner, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    only = engines(EmbeddedEngine)
    publish = publisher(only, learner, Queue(), choice="disk", directory=str(tmp_path / "a file"))
    with pytest.raises(CheckpointError):
        sent(publish, learner.weights(), 3)
    assert versions(only) == [0]


def test_a_push_waits_for_room_on_a_full_disk(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill.durable_files, "PAUSE_S", 0.01)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    class FullDisk(DiskTransport):
        def start(self, weights: Weights, version: int) -> dict[str, Any]:
            if looks < 3:
                raise CheckpointError(os.strerror(errno.ENOSPC))
            return super().start(weights, version)

    transport = FullDisk({}, str(tmp_path), str(learner.model.name_or_path))
    Attempt.begin([transport], learner.weights(), 1, TIMEOUT_S, look)
    assert looks == 3
    written = read_weights(str(tmp_path / "version-000001"))
    assert written.keys() == {layout.name for layout in learner.weights().layouts}
    with files_of_at_most(1000), pytest.raises(CheckpointError):  # which no wait would lift
        Attempt.begin([transport], learner.weights(), 2, TIMEOUT_S, look)
    assert looks == 3


def on_node(node: str | None) -> Any:
    """Engine as `choose_transports` sees it: on this node, or another one."""
    own = ray.get_runtime_context().get_node_id()
    place = Place(node=own if node is None else node, nccl=nccl_settings())
    return SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _: ray.put(place)))


HERE, THERE = None, "another node"
SHARED, FILES, GROUP = SharedMemoryTransport, DiskTransport, CollectiveTransport


@pytest.mark.parametrize(
    "choice, nodes, served, expected",
    [
        ("auto", [HERE, THERE, THERE], True, [(SHARED, [0]), (GROUP, [1, 2])]),
        ("group", [HERE], False, [(GROUP, [0])]),
        ("disk", [HERE, THERE], True, [(FILES, [0, 1])]),
    ],
)
def test_the_transport_fits_the_placement(choice, nodes, served, expected) -> None:
    engines = {str(i): on_node(node) for i, node in enumerate(nodes)}
    for device in ("cpu", "cuda"):
        found = choose_transports(settings(choice=choice, served=served, device=device), engines)
        assert [(type(t), [int(name) for name in t.engines]) for t in found] == expected
        for transport in found:
            if isinstance(transport, CollectiveTransport):
                kind, address = transport.describe().split(" group from ")
                assert kind == {"cpu": "gloo", "cuda": "nccl"}[device]
                assert (address == "127.0.0.1") == (THERE not in nodes)


# ---- SGLang: one server for all that follows


def served(pair: TinyPair) -> Any:
    """A server of the student's, that has started."""
    if not sglang_installed():
        pytest.skip("SGLang is not installed")
    config = SglangConfig(
        model=pair.student, device="cpu", start_deadline_s=300, request_deadline_s=TIMEOUT_S
    )
    engine = actor(HostedSglangEngine, config=config)
    ray.get(engine.info.remote(), timeout=300)
    return engine


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair, ray_cluster: None) -> Iterator[Any]:
    engine = served(tiny_pair)
    yield engine
    ray.kill(engine)


@pytest.fixture(scope="module", params=["embedded", "SGLang"])
def receiver(
    request: pytest.FixtureRequest, tiny_pair: TinyPair, ray_cluster: None
) -> Iterator[Any]:
    """An engine of each kind, in a process of its own."""
    if request.param == "SGLang":
        yield request.getfixturevalue("server")
        return
    engine = actor(EmbeddedEngine, model_path=tiny_pair.student, device="cpu", threads=1)
    yield engine
    ray.kill(engine)


@pytest.fixture
def group(receiver: Any) -> Iterator[CollectiveTransport]:
    """A way to the receiver by a group, in several buckets."""
    made = CollectiveTransport(
        {"policy engine 0": receiver}, address="127.0.0.1", backend="gloo", timeout_s=TIMEOUT_S,
        bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    yield made
    made.abort()


@pytest.fixture
def by_group(
    receiver: Any, group: CollectiveTransport, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> Publisher:
    """A publisher that sends by the group, to a receiver that holds the learner's weights."""
    monkeypatch.setattr(cluster.weights.transport, "GRACE_S", 20.0)
    ray.get(receiver.load_weights.remote(shared(gather_all(learner.weights())), 0))
    assert len(plan_buckets(learner.weights().layouts, BUCKET_BYTES)) >= 3
    choose_once(monkeypatch, group)
    settings = {"choice": "group", "served": True, "overlaps": True}  # which a group does not
    return publisher({"policy engine 0": receiver}, learner, Queue(), **settings)


def samples(server: Any) -> Any:
    request = GenerateRequest(
        prompt_tokens_T=np.arange(5, 20, dtype=np.int32),
        sampling=TrainSampling(temperature=T, max_new_tokens=4), num_samples=2, seed=0,
    )  # fmt: skip
    return ray.get(server.generate.remote(request), timeout=TIMEOUT_S)


@pytest.mark.parametrize("choice", ["shared_memory", "disk", "group", "ipc"])
def test_every_transport_into_a_server(
    server: Any, learner: Learner, tmp_path: Path, choice: str, chosen: list[Transport]
) -> None:
    publish = publisher(
        {"policy engine 0": server}, learner, Queue(), choice=choice, served=True,
        directory=str(tmp_path / "weights"), overlaps=True,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    for version in range(3):
        metrics = sent(publish, learner.weights(), version)
        learn(learner)  # in the middle of the push, but of a group's, and of what is lent
        publish.wait()
        assert 0 < metrics["push/pause"] <= metrics["push/seconds"]
        assert all(sample.versions_T.tolist() == [version] * len(sample.tokens_T)
                   for sample in samples(server))  # fmt: skip
    assert metrics["push/proven"] == 1  # every parameter, fused ones too
    gap = publish.settle()
    assert gap is not None and gap < 1e-4
    for transport in chosen:
        transport.abort()


def leftovers(server: Any) -> tuple[int, int]:
    """Open files of the server's processes, and names in /dev/shm of theirs and of this one."""
    pid: Any = ray.get(server.__ray_call__.remote(lambda engine: engine.server.pid))
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    names = shared_memory_of(os.getpid(), *(process.pid for process in family))
    return sum(process.num_fds() for process in family), len(names)


def test_what_is_lent_leaves_nothing_in_a_server(server: Any, learner: Learner) -> None:
    """Many buckets, and no file or name more than before."""
    publish = publisher(
        {"policy engine 0": server}, learner, Queue(), choice="ipc", served=True,
        bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    assert len(plan_buckets(learner.weights().layouts, BUCKET_BYTES)) >= 3
    sent(publish, learner.weights(), 0)
    assert publish.describe() == "lent main memory, in buckets to policy engine 0"
    before = leftovers(server)
    for version in range(1, 6):
        learn(learner)
        assert sent(publish, learner.weights(), version)["push/proven"] == 1
    after = leftovers(server)
    assert after[0] <= before[0] + 2 and after[1] <= before[1]  # five buckets and more a push
    for parameter in learner.model.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        sent(publish, learner.weights(), 6)


@pytest.mark.slow
def test_a_server_that_is_lost_while_it_is_lent_weights(
    tiny_pair: TinyPair, learner: Learner, chosen: list[Transport]
) -> None:
    """A real server ends in the middle of a push: the engine is ended, the learner goes on, its
    memory is free."""
    engine = served(tiny_pair)
    publish = publisher(
        {"policy engine 0": engine}, learner, Queue(), choice="ipc", served=True,
        bucket_bytes=BUCKET_BYTES, probe_every=0, prove_every=0,
    )  # fmt: skip
    sent(publish, learner.weights(), 0)
    [transport] = chosen
    weights = learner.weights()
    lend, lent = weights.lend, []  # pyright: ignore[reportAttributeAccessIssue]

    def lend_two_and_kill(names: Any, readers: Any) -> Any:
        lent.append(names)
        if len(lent) == 2:
            calls.get(engine.__ray_call__.remote(kill_server))
        return lend(names, readers)

    weights.lend = lend_two_and_kill  # pyright: ignore[reportAttributeAccessIssue]
    before = len(os.listdir("/proc/self/fd"))
    answers = Attempt.begin([transport], weights, 1, TIMEOUT_S).answers()
    assert answers.failures.keys() == {"policy engine 0"}, answers
    assert len(lent) == 2
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert sent(publish, learner.weights(), 1)["push/engines"] == 0  # nobody is left
    ray.kill(engine)


def kill_server(engine: Any) -> None:
    server = psutil.Process(engine.server.pid)
    for process in [server, *server.children(recursive=True)]:
        process.kill()


def test_a_tensor_that_was_skipped_is_found_in_a_server(
    server: Any, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One float of a fused matrix differs in its last bit: no log-prob shows that."""
    name = "model.layers.0.self_attn.k_proj.weight"
    publish = publisher({"policy engine 0": server}, learner, Queue(), served=True)
    sent(publish, learner.weights(), 0)
    old = dict(learner.model.named_parameters())[name].detach().clone()
    write = SharedBlock.write

    def skip(block: SharedBlock, weights: Weights) -> None:
        write(block, HeldWeights(gather_all(weights) | {name: old}))

    monkeypatch.setattr(SharedBlock, "write", skip)
    bits = dict(learner.model.named_parameters())[name].detach().view(torch.int32)
    bits[3, 4] += 1
    sent(publish, learner.weights(), 1)
    fused = name.replace("k_proj", "qkv_proj")
    with refuses(CalibrationError, None, names=fused):
        publish.settle()


@pytest.mark.parametrize("when", ["before the group", "in the group"])
def test_what_an_engine_refuses_never_hangs_the_learner(
    by_group, learner: Learner, receiver: Any, when: str
) -> None:
    if when == "in the group":
        sent(by_group, learner.weights(), 1)
    version = versions({"receiver": receiver})[0]
    tensors = gather_all(learner.weights()) | {"model.norm.weight": torch.ones(7)}
    started = time.monotonic()
    with pytest.raises(EngineError):
        sent(by_group, HeldWeights(tensors), 9)
    assert time.monotonic() - started < TIMEOUT_S / 2
    assert versions({"receiver": receiver}) == [version]
    assert len(samples(receiver)) == 2
    sent(by_group, learner.weights(), 10)  # by a new group
    assert by_group.settle() < 1e-4


def test_a_broadcast_that_breaks_off_is_made_good(
    by_group, learner: Learner, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one bucket, so that a server is torn. By a new group it gets the weights whole."""
    sent(by_group, learner.weights(), 1)
    by_group.settle()
    broadcast, broken = torch.distributed.broadcast, []

    def break_off(*arguments: Any, **named: Any) -> None:
        broken.append(len(broken))
        if len(broken) == 2:
            raise RuntimeError("the network is down")
        broadcast(*arguments, **named)

    monkeypatch.setattr(torch.distributed, "broadcast", break_off)
    learn(learner)
    assert sent(by_group, learner.weights(), 2)["push/engines"] == 1
    assert len(broken) > 2
    assert versions({"receiver": receiver}) == [2]
    assert by_group.settle() < 1e-4


def test_a_version_that_is_pushed_again_waits_for_the_engines_anew(
    by_group, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(by_group, learner.weights(), 1)
    by_group.settle()
    broadcasts: list[Any] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda flat, **_: broadcasts.append(flat))
    tensors = gather_all(learner.weights()) | {"model.norm.weight": torch.ones(7)}
    with pytest.raises(EngineError):
        sent(by_group, HeldWeights(tensors), 1)
    assert not broadcasts


@pytest.mark.parametrize("survives", [0, 1])
def test_a_broadcast_that_breaks_off_again_and_again(
    by_group: Any, group: CollectiveTransport, learner: Learner, receiver: Any,
    monkeypatch: pytest.MonkeyPatch, survives: int,
) -> None:  # fmt: skip
    sent(by_group, learner.weights(), 1)
    by_group.settle()
    broadcast, made = torch.distributed.broadcast, []

    def break_off(*arguments: Any, **named: Any) -> None:
        if len(made) == survives:
            raise RuntimeError("the network is down")
        made.append(1)
        broadcast(*arguments, **named)

    monkeypatch.setattr(torch.distributed, "broadcast", break_off)
    learn(learner)
    answers = Attempt.begin([group], learner.weights(), 2, TIMEOUT_S).answers()
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    assert "the network is down" in answers.describe_failures()
    if survives and calls.get(receiver.info.remote()).is_server:
        assert "restart the engine" in answers.failures["policy engine 0"]
        with pytest.raises(EngineLost):
            samples(receiver)
    else:
        assert "keeps its current weights" in answers.failures["policy engine 0"]
        assert all((sample.versions_T == 1).all() for sample in samples(receiver))
    sent(by_group, learner.weights(), 3)
    assert by_group.settle() < 1e-4
    assert len(samples(receiver)) == 2


def test_an_engine_that_has_left_its_group_is_told_at_the_next_push(
    by_group, group: CollectiveTransport, learner: Learner, receiver: Any
) -> None:
    """The engine does not wait for a group that is formed already."""
    sent(by_group, learner.weights(), 1)
    by_group.settle()
    assert by_group.lend({"policy engine 0": receiver}, learner.weights(), 1) == {}
    [(_, why)] = Attempt.begin([group], learner.weights(), 2, TIMEOUT_S).answers().failures.items()
    assert "the learner" in why
    assert sent(by_group, learner.weights(), 2)["push/engines"] == 1
    assert by_group.settle() < 1e-4


class Mortal(EmbeddedEngine):
    """Dies when it is to load version 2."""

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        if version == 2:
            os._exit(1)
        return await super().load_weights(weights, version)


class Declines(EmbeddedEngine):
    """Takes no weights, and lives."""

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        raise EngineError("no room for them")


def test_a_group_is_formed_without_an_engine_that_refuses(
    ray_engines, learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are not left in a group that nobody forms, and are asked again."""
    queue, crew = Queue(), ray_engines(EmbeddedEngine, Declines, EmbeddedEngine)
    publish = publisher(crew, learner, queue, choice="group", bucket_bytes=BUCKET_BYTES)
    assert sent(publish, learner.weights(), 1)["push/engines"] == 2
    assert any(message.startswith("policy engine 1 ") for message in caplog.messages)
    assert versions({n: crew[n] for n in ("policy engine 0", "policy engine 2")}) == [1, 1]
    assert queue.published == [(1, 4)]


def test_embedded_engines_in_a_group_survive_one_that_dies_and_take_in_another(
    ray_engines, learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    queue, crew = Queue(), ray_engines(EmbeddedEngine, Mortal, EmbeddedEngine)
    publish = publisher(crew, learner, queue, choice="group", bucket_bytes=BUCKET_BYTES)
    for version in (0, 1):
        assert sent(publish, learner.weights(), version)["push/engines"] == 3
        learn(learner)
    assert publish.describe().startswith("gloo group from 127.0.0.1 to")
    assert sent(publish, learner.weights(), 2)["push/engines"] == 2
    assert any(message.startswith("policy engine 1 ") for message in caplog.messages)
    assert queue.published == [(0, 0), (1, 4), (2, 8)]
    joining = {"policy engine 3": ray_engines(EmbeddedEngine)["policy engine 3"]}
    assert publish.join(joining) is None  # a group leaves no copy
    publish.admit(joining, learner.weights(), 2)
    learn(learner)
    metrics = sent(publish, learner.weights(), 3)
    assert metrics["push/engines"] == 3 and metrics["push/proven"] == 1
    alive = {name: crew[name] for name in ("policy engine 0", "policy engine 2")} | joining
    assert versions(alive) == [3, 3, 3]
    gap = publish.settle()
    assert gap is not None and gap < 1e-5


class DiesJoining(EmbeddedEngine):
    """Dies after it has announced that it joins the group, which the others wait for."""

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        actors.embedded.weight_group.join_group = lambda *_: os._exit(1)
        return await super().load_weights(weights, version)


def test_engines_that_join_a_group_survive_one_that_dies_in_it(
    ray_engines, learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    crew = ray_engines(EmbeddedEngine, DiesJoining, EmbeddedEngine)
    publish = publisher(crew, learner, Queue(), choice="group", bucket_bytes=BUCKET_BYTES)
    assert sent(publish, learner.weights(), 1)["push/engines"] == 2
    [terminated] = [record for record in caplog.messages if record.endswith("is terminated")]
    assert terminated.startswith("policy engine 1 ")
    [failed] = [record for record in caplog.messages if record.endswith("trying again")]
    assert failed.count("policy engine 1") == len(crew)  # each failure names the cause
    alive = {name: crew[name] for name in ("policy engine 0", "policy engine 2")}
    assert versions(alive) == [1, 1]


def test_groups_that_were_replaced_leave_no_threads_at_the_learner(
    lasting, learner: Learner
) -> None:
    first, second, lent = ({name: engine} for name, engine in lasting.items())
    publish = publisher(first, learner, Queue(), choice="group", bucket_bytes=BUCKET_BYTES)
    gc.collect()  # groups of other tests

    def held() -> int:
        names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo" in name or "tcpstore" in name for name in names)

    others = held()
    sent(publish, learner.weights(), 0)
    one_group = held() - others
    for version in (1, 3):
        publish.admit(second, learner.weights(), version - 1)
        sent(publish, learner.weights(), version)
        assert not publish.lend(lent, learner.weights(), version)
        assert not publish.lend({}, learner.weights(), version)
        publish.remove_engines(list(second))
        sent(publish, learner.weights(), version + 1)
    until(lambda: held() - others <= one_group, failing=f"{held()} threads, not {one_group}")


def test_an_embedded_engine_generates_until_all_of_the_weights_have_come(
    lasting, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lasting["policy engine 0"]
    publish = publisher(
        {"policy engine 0": engine}, learner, Queue(), choice="group", bucket_bytes=BUCKET_BYTES
    )
    sent(publish, learner.weights(), 0)
    broadcast, sampled_by = torch.distributed.broadcast, []

    def sample_first(*arguments: Any, **named: Any) -> None:
        sampled_by.append(samples(engine)[0].versions_T[-1])
        time.sleep(0.1)  # much longer than the engine stands still
        broadcast(*arguments, **named)

    monkeypatch.setattr(torch.distributed, "broadcast", sample_first)
    metrics = sent(publish, learner.weights(), 1)
    assert len(sampled_by) >= 3 and set(sampled_by) == {0}
    assert metrics["push/pause"] < metrics["push/seconds"] / 2
    assert versions({"engine": engine}) == [1]
