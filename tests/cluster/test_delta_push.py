"""Pushes of what changed: engines hold the bits of a whole push, whatever happens on the way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.embedded.engine import EmbeddedEngine
from cluster.handles import calls
from cluster.handles.local_actor import LocalActor
from cluster.weights.background import Background
from cluster.weights.publisher import Publisher
from cluster.weights.push_settings import PushSettings
from distill.delivery import TrainedGroups
from distill.engine import WeightSource
from distill.errors import EngineError, NonFiniteError
from distill.weights.delta import WeightDelta
from distill.weights.model_weights import HeldWeights, Weights, gather_all, total_bytes
from distill.weights.tensors import PackedTensors
from learner.config import LearnerConfig
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.families import family_dir

# Against hangs only.
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.weights.shared_memory.COPY_BYTES", 16 << 10)
    monkeypatch.setattr("distill.weights.shared_memory.PIECE_BYTES", 3000)


class Queue:
    """Notes the versions of which it is told."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.published: list[int] = []

    def push(self, version: int, trained: TrainedGroups) -> None:
        self.pushed.append(version)

    def publish(self, version: int, trained: TrainedGroups) -> None:
        self.published.append(version)


class Noting(EmbeddedEngine):
    """Remembers what it was sent: `whole`, or `change` of a version. Takes nothing while held."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked, self.came = 0, list[str]()
        self.released = asyncio.Event()
        self.released.set()

    async def hold(self) -> None:
        self.released.clear()

    async def release(self) -> None:
        self.released.set()

    async def load_weights(self, weights: WeightSource, version: int) -> float:
        self.asked += 1
        await self.released.wait()
        return await self.take(weights, version)

    async def take(self, weights: WeightSource, version: int) -> float:
        assert isinstance(weights, WeightDelta) and weights.version == version
        self.came.append("whole" if weights.base is None else f"change of {weights.base_version}")
        return await super().load_weights(weights, version)

    async def noted(self) -> list[str]:
        return self.came

    async def loads(self) -> int:
        """Number of times that it was to load."""
        return self.asked


class Spoilt(Noting):
    """Before version 2 a bit of its copy tips over."""

    async def take(self, weights: WeightSource, version: int) -> float:
        if version == 2 and isinstance(weights, WeightDelta) and weights.base is not None:
            next(self._received._block.pieces())[7] ^= 1
        return await super().take(weights, version)


class Misses(Noting):
    """Refuses version 2 the first time, before it has looked at it."""

    async def take(self, weights: WeightSource, version: int) -> float:
        if version == 2 and "refused" not in self.came:
            self.came.append("refused")
            raise EngineError("not now")
        return await super().take(weights, version)


class Crew:
    """A learner, its publisher, and engines in this process."""

    def __init__(self, model: str, scratch: Path, dtype: str) -> None:
        settings = LearnerConfig(model=model, total_steps=1, device="cpu")
        self.learner, self._model, self._dtype = Learner(settings, str(scratch)), model, dtype
        self.engines: dict[str, Any] = {}
        self.queue = Queue()
        self._made: list[Any] = []
        self._moves = self.version = 0

    def engine(self, kind: type = Noting) -> Any:
        settings = {"model_path": self._model, "device": "cpu", "dtype": self._dtype, "threads": 1}
        self._made.append(LocalActor(kind, **settings))
        return self._made[-1]

    def start(self, *kinds: type, overlaps: bool = False, prove_every: int = 0) -> None:
        self.engines = {f"policy engine {i}": self.engine(kind) for i, kind in enumerate(kinds)}
        push = PushSettings(
            choice="object_store", served=False, device="cpu", directory="", model=self._model,
            temperature=0.7, learner_dtype="float32", probe_every=0, prove_every=prove_every,
            timeout_s=DEADLINE_S, deltas=True,
        )  # fmt: skip
        goes_on = self.queue.push if overlaps else None
        self.publish = Publisher(self.engines, self.queue, push, self.learner.logprobs, goes_on)

    @property
    def weights(self) -> Weights:
        return self.learner.weights(getattr(torch, self._dtype))

    def learn(self, share: float = 0.03) -> None:
        """A step that moves about this share of the values, in place."""
        generator = torch.Generator().manual_seed(self._moves)
        self._moves += 1
        for parameter in self.learner.model.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < share
            parameter.data[moved] *= 1.05

    def push(self, share: float = 0.03) -> dict[str, float]:
        """A step and its push."""
        self.learn(share)
        self.pushed = {name: t.clone() for name, t in gather_all(self.weights).items()}
        metrics = self.publish(self.weights, self.version, TrainedGroups(self.version))
        self.version += 1
        return metrics

    def push_beside(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, float]:
        """A step and its push, of which engines take nothing until the next step is over, too."""
        on_all(self.engines, "hold")
        metrics = self.push()
        assert self.queue.pushed[-1] == self.version - 1
        assert self.queue.published[-1] == self.version - 2
        self.learn()
        meanwhile()
        on_all(self.engines, "release")
        self.publish.wait()
        assert self.queue.published[-1] == self.version - 1
        return metrics

    def expect_whole(self) -> None:
        """Every engine holds, bit by bit, what one holds that has got all of what was pushed."""
        fresh = self.engine(EmbeddedEngine)
        calls.get(fresh.load_weights.remote(PackedTensors.pack(self.pushed), self.version))
        expected = calls.get(fresh.weight_checksums.remote())
        for name, engine in self.engines.items():
            assert calls.get(engine.weight_checksums.remote()) == expected, name

    def came(self, name: str) -> list[str]:
        return calls.get(self.engines[name].noted.remote())

    def end(self) -> None:
        for engine in self._made:
            calls.kill(engine)


def on_all(engines: Mapping[str, Any], method: str) -> None:
    for engine in engines.values():
        calls.get(getattr(engine, method).remote())


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(model: str, dtype: str = "bfloat16") -> Crew:
        made.append(Crew(model, tmp_path, dtype))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_after_changes_upon_changes_engines_hold_the_bits_of_a_whole_push(
    crew, tmp_path: Path, family: str, dtype: str
) -> None:
    run = crew(family_dir(tmp_path, family), dtype)
    run.start(Noting, Noting)
    whole = total_bytes(run.weights)
    first = run.push()
    assert first["push/whole_engines"] == 2 and "push/changed_share" not in first
    assert first["push/bytes"] == whole
    for _ in range(3):
        metrics = run.push()
        assert metrics["push/whole_engines"] == 0 and metrics["push/engines"] == 2
        assert 0.02 < metrics["push/changed_share"] < 0.04
        assert 0.02 < metrics["push/bytes"] / whole < 0.15
    assert run.came("policy engine 1") == ["whole", *(f"change of {v}" for v in range(3))]
    run.expect_whole()


def test_one_that_was_started_again_gets_all_and_changes_from_then_on(
    crew, tiny_pair: TinyPair
) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, Noting)
    run.push()
    run.push()
    run.publish.dismiss(["policy engine 1"])
    run.engines["policy engine 1"] = run.engine()
    again = {"policy engine 1": run.engines["policy engine 1"]}
    run.publish.admit(again, run.weights, run.version - 1)
    run.expect_whole()
    assert run.push()["push/whole_engines"] == 0
    assert run.came("policy engine 0") == ["whole", "change of 0", "change of 1"]
    assert run.came("policy engine 1") == ["whole", "change of 1"]
    run.expect_whole()


def test_one_that_was_lent_an_older_version_gets_all(crew, tiny_pair: TinyPair) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting)
    run.push()
    lent = {"evaluation engine 0": run.engine()}
    assert run.publish.lend(lent, run.weights, 0) == {}
    run.push()
    run.push()
    assert run.publish.lend(lent, run.weights, 2) == {}
    run.engines |= lent
    assert run.came("evaluation engine 0") == ["whole", "whole"]
    run.expect_whole()


@pytest.mark.parametrize("kind", [Spoilt, Misses])
def test_one_that_cannot_take_a_change_gets_all_in_the_same_push(
    crew, tiny_pair: TinyPair, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, kind)
    run.push()
    run.push()
    metrics = run.push()
    assert metrics["push/engines"] == 2 and metrics["push/whole_engines"] == 1
    whole = total_bytes(run.weights)
    assert whole / 2 < metrics["push/bytes"] < 0.7 * whole  # one of two, and twice a change
    assert metrics["push/changed_share"] > 0.02
    assert run.came("policy engine 1")[-1] == "whole"
    assert "trying again" in caplog.text
    if kind is Spoilt:
        assert "what was made of weights version 2 is not what was sent" in caplog.text
    run.expect_whole()
    assert run.push()["push/whole_engines"] == 0
    assert run.came("policy engine 0") == ["whole", "change of 0", "change of 1", "change of 2"]
    run.expect_whole()


def test_where_all_changed_all_is_sent_and_said(crew, tiny_pair: TinyPair) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, Noting)
    run.push()
    metrics = run.push(share=1.0)
    assert metrics["push/whole_engines"] == 2 and metrics["push/changed_share"] > 0.9
    assert metrics["push/bytes"] == total_bytes(run.weights)
    assert run.came("policy engine 0") == ["whole", "whole"]
    assert run.push()["push/whole_engines"] == 0
    run.expect_whole()


def test_weights_that_are_not_finite_are_not_sent(crew, tiny_pair: TinyPair) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting)
    run.push()
    tensors = gather_all(run.weights)
    bad = HeldWeights(tensors | {"model.norm.weight": tensors["model.norm.weight"] * float("nan")})
    with pytest.raises(NonFiniteError, match=r"'model.norm.weight' is not finite: version 1"):
        run.publish(bad, 1, TrainedGroups(1))
    assert run.push()["push/whole_engines"] == 0
    run.expect_whole()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_beside_the_next_step_engines_get_the_bits_of_the_push(
    crew, tmp_path: Path, family: str, dtype: str
) -> None:
    """By change upon change, each taken when the learner's weights are others, and proven."""
    run = crew(family_dir(tmp_path, family), dtype)
    run.start(Noting, Noting, overlaps=True, prove_every=1)
    whole = total_bytes(run.weights)
    assert run.push()["push/whole_engines"] == 2
    assert run.queue.pushed == []  # it finds out what the proof asks for
    found = []
    for _ in range(3):
        found.append(run.push_beside())
        run.expect_whole()
    assert run.came("policy engine 1") == ["whole", *(f"change of {v}" for v in range(3))]
    first, *others = found  # each of the push before
    assert first["push/whole_engines"] == 2 and first["push/bytes"] == whole
    for metrics in others:
        assert metrics["push/whole_engines"] == 0 and metrics["push/engines"] == 2
        assert 0.02 < metrics["push/changed_share"] < 0.08
        assert 0.02 < metrics["push/bytes"] / whole < 0.25
        assert 0 < metrics["push/proven"] <= 1 and "push/overlapped" in metrics
    assert run.publish.settle() is None  # of the last version, which raises if it is not there


@pytest.mark.parametrize("kind", [Spoilt, Misses])
def test_beside_the_next_step_one_that_refuses_gets_all_of_the_push(
    crew, tiny_pair: TinyPair, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, kind, overlaps=True, prove_every=1)
    run.push()
    run.push_beside()
    run.push_beside()
    assert "trying again" in caplog.text
    assert run.came("policy engine 1")[-1] == "whole"
    run.expect_whole()
    metrics = run.push_beside()
    assert metrics["push/engines"] == 2 and metrics["push/whole_engines"] == 1
    assert metrics["push/proven"] > 0
    assert run.came("policy engine 0") == ["whole", "change of 0", "change of 1", "change of 2"]
    assert run.came("policy engine 1")[-1] == "change of 2"
    run.expect_whole()
    run.publish.settle()


def test_beside_the_next_step_one_dies_and_another_joins_with_what_was_pushed(
    crew, tiny_pair: TinyPair, caplog: pytest.LogCaptureFixture
) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, Noting, overlaps=True, prove_every=1)
    run.push()
    run.push_beside(lambda: calls.kill(run.engines.pop("policy engine 1")))
    assert "policy engine 1 did not take weights version 1: it is ended" in caplog.text
    run.engines["policy engine 1"] = run.engine()
    joiner = {"policy engine 1": run.engines["policy engine 1"]}
    assert run.publish.join(joiner) == 1
    run.expect_whole()
    assert run.push_beside()["push/engines"] == 1
    assert run.came("policy engine 1") == ["whole", "change of 1"]
    run.expect_whole()
    run.publish.settle()


def test_one_that_joins_in_the_middle_of_a_push_gets_the_new_version(
    crew, tiny_pair: TinyPair
) -> None:
    run = crew(tiny_pair.student)
    run.start(Noting, overlaps=True, prove_every=1)
    run.push()
    joiner = {"policy engine 1": run.engine()}
    joining: Background[int | None] = Background()
    run.push_beside(lambda: joining.begin(lambda: run.publish.join(joiner)))
    ended = joining.wait()
    assert ended is not None and ended.value == 1
    run.engines |= joiner
    run.expect_whole()
    run.push_beside()
    assert run.came("policy engine 1") == ["whole", "change of 1"]
    run.expect_whole()


def test_who_is_lent_weights_waits_for_one_that_joins(crew, tiny_pair: TinyPair) -> None:
    """The learner's copy changes when nobody reads it."""
    run = crew(tiny_pair.student)
    run.start(Noting, overlaps=True)
    run.push()
    run.publish.wait()
    joiner = {"policy engine 1": run.engine()}
    on_all(joiner, "hold")
    joining: Background[int | None] = Background()
    joining.begin(lambda: run.publish.join(joiner))
    deadline = time.monotonic() + DEADLINE_S
    while not calls.get(joiner["policy engine 1"].loads.remote()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.learn()
    releasing = threading.Timer(0.1, on_all, (joiner, "release"))
    releasing.start()
    assert run.publish.lend({"evaluation engine 0": run.engine()}, run.weights, 1) == {}
    releasing.join()
    ended = joining.wait()
    assert ended is not None and ended.value == 0
    run.engines |= joiner
    run.expect_whole()
