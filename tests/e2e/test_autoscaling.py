"""Pools and clusters that grow under load and shrink after it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.inspect.audit import audit
from cluster.inspect.report.run_files import read_run
from cluster.inspect.report.timeline import timeline
from tests.conftest import TinyPair
from tests.e2e import harness, rewards, scripted_scaling
from tests.e2e.harness import events, interrupt, metrics, opd_arguments, trained_groups, wait_until
from tests.e2e.impatient import NUMBERS
from tests.e2e.ray_head import ray_head

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def sizes(out: Path, pool: str) -> list[dict[str, Any]]:
    """Ready, starting and draining members after each change of the pool."""
    return [event for event in events(out, "size") if event["pool"] == pool]


def test_a_pool_and_the_cluster_follow_the_load(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are slow, then fast again; each worker node has room for one worker."""
    out, load = tmp_path / "run", tmp_path / "load"
    load.write_text("1.0")
    monkeypatch.setenv(rewards.LOAD_FILE, str(load))
    monkeypatch.setenv(NUMBERS, json.dumps({"up_after_s": 2, "down_after_s": 2}))
    arguments = {
        "student": tiny_pair.student, "prompts": tiny_pair.prompts, "out": out,
        "reward": "tests.e2e.rewards:slow",
        # The learner's step is so long that its wait for quick rewards is nothing.
        "loss": "tests.e2e.rewards:slow_loss", "temperature": 1.0, "engine": "embedded",
        "steps": 2000, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8, "eval_size": 1,
        "checkpoint_every": 100, "device": "cpu",
        "rollout_cpus": 1, "rollout_workers": "1..3",
    }  # fmt: skip
    with ray_head(dashboard=False, cpus=2, workers=3, idle_s=3) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        process = harness.start(
            "tests.e2e.impatient",
            "recipe=rl",
            *(f"{name}={value}" for name, value in arguments.items()),
        )
        wait_until(lambda: len(metrics(out)) >= 1, process)
        assert len(cluster.workers()) == 1
        wait_until(lambda: sizes(out, "rollout")[-1]["ready"] == 3, process)
        assert len(cluster.workers()) == 3
        load.unlink()
        alone = {"ready": 1, "starting": 0, "draining": 0}
        wait_until(lambda: alone.items() <= sizes(out, "rollout")[-1].items(), process)
        wait_until(lambda: len(cluster.workers()) == 1, process)
        interrupt(process)
    changes = [(event["from"], event["to"]) for event in events(out, "scale")]
    assert changes[:2] == [(1, 2), (2, 3)] and changes[-2:] == [(3, 2), (2, 1)]
    whys = [event["reason"] for event in events(out, "scale")]
    assert all("in their environments" in why for why in whys[:2]), whys
    assert all("workers lack credit" in why for why in whys[-2:]), whys
    alive = [event["alive"] for event in events(out, "nodes")]
    assert max(alive) == 4 and not events(out, "death")
    found = audit(out / "ledger.jsonl")
    assert not found.problems, found.lines()
    assert found.trained == 2 * len(metrics(out)) and not found.set_aside
    drawn = timeline(read_run(out))
    assert drawn is not None
    assert {"scaling", "weight pushes"} <= {lane["title"] for lane in drawn["lanes"]}


def test_joining_and_leaving_engines_lose_no_group(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines join with the current weights and a handshake; they leave when idle."""
    out = tmp_path / "run"
    script = [
        {"policy": policies, "teacher": teachers}
        for policies, teachers in [(1, 1), (2, 1), (2, 2), (1, 2), (1, 1)]
    ]
    monkeypatch.setenv(scripted_scaling.SCRIPT, json.dumps(script))
    monkeypatch.setenv(NUMBERS, json.dumps({"up_after_s": 2, "down_after_s": 2}))
    arguments = opd_arguments(
        tiny_pair, out, steps=100_000, lr=1e-4, checkpoint_every=100_000, group_size=4,
        max_new_tokens=48, policy_engines="1..2", teacher_engines="1..2",
    )  # fmt: skip
    process = harness.start("tests.e2e.scripted_scaling", "recipe=opd", *arguments)

    def is_over() -> bool:
        ready = {pool: [size["ready"] for size in sizes(out, pool)] for pool in script[0]}
        return all(seen and max(seen) == 2 and seen[-1] == 1 for seen in ready.values())

    wait_until(is_over, process)
    steps = len(metrics(out))
    # A push's metrics are in the line of the step beside which it went on, or in its own.
    wait_until(lambda: any(s["push/engines"] == 1 for s in metrics(out)[steps + 2 :]), process)
    output = interrupt(process)
    for joined in ("policy engine 1", "teacher engine 1"):
        assert f"{joined} joins: its handshake agrees to" in output
    pushed = [step["push/engines"] for step in metrics(out)]
    assert pushed[0] == pushed[-1] == 1 and max(pushed) == 2, pushed
    assert not events(out, "death")
    assert trained_groups(out) == list(range(4 * len(metrics(out))))
    found = audit(out / "ledger.jsonl")
    assert not found.problems, found.lines()


def test_engines_on_other_nodes_get_weights_collectively_and_recover(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has a CPU for one actor, so no policy engine is on the learner's node."""
    out = tmp_path / "run"
    arguments = opd_arguments(
        tiny_pair, out, steps=100_000, device="cpu", policy_engines=2, verify_every=1, eval_size=0,
        checkpoint_every=100_000,
    )  # fmt: skip
    with ray_head(dashboard=False, cpus=1, workers=6) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        process = harness.start("cluster.train", "recipe=opd", *arguments)
        wait_until(lambda: len(metrics(out)) >= 2, process)
        os.kill(harness.process_of("policy engine 1", out), signal.SIGKILL)
        wait_until(lambda: bool(events(out, "restart")), process)
        steps = len(metrics(out))
        wait_until(lambda: any(s["push/engines"] == 2 for s in metrics(out)[steps + 1 :]), process)
        output = interrupt(process)
    assert "gloo group from" in output
    [death] = events(out, "death")
    assert death["who"] == "policy engine 1"
    assert all(step.get("push/proven", 1) == 1 for step in metrics(out))
    assert trained_groups(out) == list(range(4 * len(metrics(out))))
    assert audit(out / "ledger.jsonl").problems == []
