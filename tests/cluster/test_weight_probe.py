"""After every push: an engine that serves other weights than it acknowledged is named."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from actors.embedded.engine import EmbeddedEngine
from cluster.weights.weight_probe import WeightProbe
from distill.engine import Score, ScoreRequest
from distill.errors import CalibrationError
from learner.config import LearnerConfig
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.weights import gather_all, shared

T = 0.7


@dataclass
class Run:
    """A learner and two engines that hold its first weights."""

    learner: Learner
    engines: dict[str, EmbeddedEngine]
    runner: asyncio.Runner

    def probe(self, **changes: Any) -> WeightProbe[EmbeddedEngine, Coroutine[Any, Any, Any]]:
        arguments: dict[str, Any] = {
            "engines": self.engines,
            "info": self.runner.run(self.engines["policy engine 0"].info()),
            "temperature": T,
            "learner": self.learner.logprobs,
            "learner_dtype": "float32",
            "submit": lambda engine, requests: engine.score(requests),
            "collect": self.runner.run,
        }
        return WeightProbe(**arguments | changes)

    def learn(self) -> None:
        for parameter in self.learner.model.parameters():
            parameter.data.mul_(1.01)

    def push(self, version: int, *names: str) -> None:
        packed = shared(gather_all(self.learner.weights()))
        for name in names:
            self.runner.run(self.engines[name].load_weights(packed, version))


BOTH = ("policy engine 0", "policy engine 1")


@pytest.fixture
def run(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[Run]:
    settings = LearnerConfig(model=tiny_pair.student, total_steps=1, device="cpu")
    with asyncio.Runner() as runner:
        yield Run(
            learner=Learner(settings, str(tmp_path)),
            engines={
                name: EmbeddedEngine(model_path=tiny_pair.student, device="cpu", threads=1)
                for name in BOTH
            },
            runner=runner,
        )


def test_engines_that_hold_each_version_agree(run: Run) -> None:
    probe = run.probe()
    assert probe.settle() is None
    for version in range(3):
        run.learn()
        run.push(version, *BOTH)
        probe.ask(version)
        gap = probe.settle()
        assert gap is not None and gap < 1e-5
    assert probe.settle() is None


@pytest.mark.parametrize("behind", BOTH)
def test_an_engine_left_behind_is_named_with_version_and_gap(run: Run, behind: str) -> None:
    # Answered at once: the other engine's answer is not collected after the first failure.
    probe = run.probe(
        submit=lambda engine, requests: run.runner.run(engine.score(requests)),
        collect=lambda scores: scores,
    )
    run.learn()
    run.push(7, *(name for name in BOTH if name != behind))
    probe.ask(7)
    with pytest.raises(CalibrationError) as error:
        probe.settle()
    assert error.value.exit_code == 3
    run.push(8, *BOTH)
    probe.ask(8)  # and found well again, once it is
    probe.settle()


def test_an_engine_is_not_waited_for_until_the_next_push(run: Run) -> None:
    collected: list[Any] = []

    def collect(answer: Coroutine[Any, Any, list[Score]]) -> list[Score]:
        collected.append(answer)
        return run.runner.run(answer)

    probe = run.probe(collect=collect)
    probe.ask(0)
    assert collected == []
    probe.settle()
    assert len(collected) == 2


def test_the_learner_s_next_step_does_not_change_what_is_compared(run: Run) -> None:
    def submit(engine: EmbeddedEngine, requests: list[ScoreRequest]) -> list[Score]:
        return run.runner.run(engine.score(requests))

    probe = run.probe(submit=submit, collect=lambda scores: scores)
    probe.ask(0)
    run.learn()
    assert probe.settle() is not None


def test_asking_twice_is_a_mistake(run: Run) -> None:
    probe = run.probe(submit=lambda engine, requests: None)
    probe.ask(0)
    with pytest.raises(AssertionError):
        probe.ask(1)


def test_nan_is_a_disagreement(run: Run) -> None:
    def submit(engine: EmbeddedEngine, requests: list[ScoreRequest]) -> list[Score]:
        scores = run.runner.run(engine.score(requests))
        scores[0].logprobs_by_temperature[0][3] = float("nan")
        return scores

    probe = run.probe(submit=submit, collect=lambda scores: scores)
    probe.ask(4)
    with pytest.raises(CalibrationError):
        probe.settle()


def test_the_probe_is_two_rows_at_the_run_s_temperature(run: Run) -> None:
    asked: list[list[ScoreRequest]] = []
    probe = run.probe(submit=lambda engine, requests: asked.append(requests))
    probe.ask(0)
    [first, second] = asked  # one call an engine
    assert first is second and len(first) == 2
    for request in first:
        assert request.temperatures == (T,)
        assert 1 <= request.start < len(request.tokens_T) <= 24
