"""Pushes that are concurrent with the learner's next step, in whole runs in this process."""

import asyncio
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.embedded.engine import EmbeddedEngine
from cluster.base.outcomes import RunFailed
from cluster.handles import calls
from cluster.inspect.audit import audit
from cluster.queue.journal import read_journal
from cluster.weights.publisher import Publisher
from distill.engine import WeightSource
from distill.errors import EngineError
from distill.records import TrajectoryId
from learner.learner import Learner
from learner.plan import Part
from learner.rollout_share import RolloutShare, Shares
from tests.conftest import TinyPair
from tests.e2e.harness import distil, events, metrics, trained_groups
from tests.waiting import DEADLINE_S, until

STEPS, PER_STEP = 4, 2


def run(pair: TinyPair, out: Path, **changes: Any) -> list[dict[str, float]]:
    given = {
        "steps": STEPS, "prompts_per_step": PER_STEP, "max_staleness": 1, "checkpoint_every": 1,
    }  # fmt: skip
    return distil(pair, out, **given | changes)


def taken(out: Path) -> int:
    return sum(event["event"] == "take" for event in read_journal(out / "ledger.jsonl"))


def test_a_step_does_not_wait_for_the_push_before_it(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines load a version only when the step after it has been taken."""
    out, load = tmp_path / "run", EmbeddedEngine.load_weights

    async def load_late(self: EmbeddedEngine, weights: WeightSource, version: int) -> float:
        deadline = time.monotonic() + DEADLINE_S
        while 0 < version < STEPS and taken(out) <= version:
            assert time.monotonic() < deadline, f"step {version + 1} waits for version {version}"
            await asyncio.sleep(0.02)
        return await load(self, weights, version)

    monkeypatch.setattr(EmbeddedEngine, "load_weights", load_late)
    steps = run(tiny_pair, out)
    assert trained_groups(out) == list(range(STEPS * PER_STEP))
    assert all(step["push/probe_gap"] < 1e-4 for step in steps)
    assert all(step["push/overlapped"] > 0 for step in steps[1:])
    assert [step["staleness/max"] for step in steps] == [0, 1, 1, 1]
    found = audit(out / "ledger.jsonl", steps=STEPS)
    assert found.problems == [] and found.ended


def test_a_run_that_does_not_overlap_has_every_engine_acknowledge_within_the_step(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    steps = run(tiny_pair, out, steps=2, max_staleness=0)
    assert all(step["push/seconds"] <= step["time/push"] for step in steps)
    events = [event["event"] for event in read_journal(out / "ledger.jsonl")]
    assert "push" not in events and events.count("train") == 2


def test_the_next_step_s_rollouts_are_fetched_during_a_step(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step ends only when the learner has fetched those of the second."""
    out, step, prefetch = tmp_path / "run", Learner.step, RolloutShare.prefetch
    fetched: set[TrajectoryId] = set()

    def noted(self: RolloutShare, shares: Shares) -> None:
        prefetch(self, shares)
        fetched.update(share.place for share in shares.shares)

    def step_late(self: Learner, *parts: Part) -> dict[str, float]:
        until(
            lambda: taken(out) > 1 or len(fetched) == 2 * PER_STEP,
            failing="the groups of the next step are not fetched",
        )
        return step(self, *parts)

    monkeypatch.setattr(RolloutShare, "prefetch", noted)
    monkeypatch.setattr(Learner, "step", step_late)
    steps = run(tiny_pair, out, steps=2)
    assert [made["rollout/ahead_share"] for made in steps] == [0, 1]
    assert trained_groups(out) == list(range(2 * PER_STEP))
    found = audit(out / "ledger.jsonl", steps=2)
    assert found.problems == [] and found.ended


def test_a_failed_concurrent_push_ends_the_run_without_loss(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push's slots are not freed, so that the learner waits for no group."""
    out = tmp_path / "run"

    async def refuse(self: EmbeddedEngine, weights: WeightSource, version: int) -> float:
        if version == 2:
            raise EngineError("no room for them")
        return await load(self, weights, version)

    load = EmbeddedEngine.load_weights
    with monkeypatch.context() as patched:
        patched.setattr(EmbeddedEngine, "load_weights", refuse)
        with pytest.raises(RunFailed):
            run(tiny_pair, out, groups_in_flight=PER_STEP)
    assert len(metrics(out)) == 2 and audit(out / "ledger.jsonl").problems == []
    run(tiny_pair, out, groups_in_flight=PER_STEP)
    assert trained_groups(out) == list(range(STEPS * PER_STEP))
    found = audit(out / "ledger.jsonl", steps=STEPS)
    assert found.problems == [] and found.jobs == 2


@pytest.mark.slow
def test_a_dead_engine_is_restored_during_a_step(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends only when the engine serves again, so the learner cannot help."""
    out, learnt, policies = tmp_path / "run", Learner.step, {}
    steps = 0

    def remember(self: Publisher, engines: Mapping[str, Any], *given: Any, **named: Any) -> None:
        policies.update(engines)
        made(self, engines, *given, **named)

    def step_in_which_one_dies(self: Learner, *parts: Part) -> dict[str, float]:
        nonlocal steps
        steps += 1
        if steps == 2:
            calls.kill(policies["policy engine 1"])
            until(
                lambda: any(e["who"] == "policy engine 1" for e in events(out, "restart")),
                failing="it waits for the learner",
            )
        return learnt(self, *parts)

    made = Publisher.__init__
    monkeypatch.setattr(Publisher, "__init__", remember)
    monkeypatch.setattr(Learner, "step", step_in_which_one_dies)
    printed = io.StringIO()
    found = run(tiny_pair, out, policy_engines=2, console=Console(file=printed, width=200))
    assert "policy engine 1 joins: its handshake agrees to" in printed.getvalue()
    assert all(
        step["push/probe_gap"] < 1e-4 for step in found
    )  # equal log-probs in engine and learner
    assert found[-1]["push/engines"] == 2
    assert trained_groups(out) == list(range(STEPS * PER_STEP))
    assert audit(out / "ledger.jsonl", steps=STEPS).problems == []
