"""Struck runs finish with the result of an undisturbed run; `make chaos` is the long form."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cluster.queue.journal import read_journal
from tests.chaos.hanging import hanging
from tests.chaos.monkey import HANGS, KILLS, LEARNER, QUEUE, WORKER, Monkey, table
from tests.chaos.tortured import TorturedRun
from tests.conftest import TinyPair
from tests.e2e.harness import opd_arguments
from tests.kept_journal import KeptInJournal

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

Start = Callable[..., TorturedRun]
PROMPTS_PER_STEP = 4


@pytest.fixture
def tortured(tiny_pair: TinyPair, tmp_path: Path) -> Iterator[Start]:
    """Start runs on the tiny pair, by name; their processes end with the test."""
    runs: list[TorturedRun] = []

    def start(name: str, hang_after_s: float = 8, **settings: Any) -> TorturedRun:
        arguments = opd_arguments(tiny_pair, tmp_path / name, **settings)
        given = dict(argument.split("=", 1) for argument in arguments)
        given.pop("out")
        numbers = {"hang_after_s": hang_after_s, "max_restarts": 50}
        run = TorturedRun(tmp_path / name, {"recipe": "opd", **given}, numbers=numbers)
        runs.append(run)
        run.start()
        return run

    yield start
    for run in runs:
        run.close()


def test_a_run_whose_every_part_dies_trains_each_group_once(tortured: Start) -> None:
    run = tortured(
        "run", steps=1_000_000, max_staleness=2, lr=1e-4, no_progress_s=300, checkpoint_every=5,
    )  # fmt: skip
    run.wait(lambda: run.step >= 2, "the first steps")
    monkey = Monkey(run, seed=20)
    killed = [kind for kind in KILLS if "evaluator" not in kind.name]
    hanging = [kind for kind in HANGS if "worker" in kind.name]
    for kind in monkey.plan([*killed, *hanging], len(killed) + len(hanging)):
        monkey.strike(kind)
    print("\n".join(table(monkey.strikes)))
    assert not monkey.finish(PROMPTS_PER_STEP)


def test_groups_on_disk_are_not_sampled_again_after_any_death(tortured: Start) -> None:
    run = tortured(
        "run", hang_after_s=300, steps=1_000_000, max_staleness=4, lr=1e-4, no_progress_s=300,
        checkpoint_every=5,
    )  # fmt: skip
    journal = run.out / "ledger.jsonl"
    run.wait(lambda: run.step >= 2, "the first steps")

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_journal(journal) if event["event"] == kind]

    def groups_wait() -> bool:
        """True if there are groups on disk that no step has taken."""
        taken = {group_id for event in events("take") for group_id in event["ids"]}
        return bool(KeptInJournal(journal).waiting - taken)

    def when_groups_wait(strike: Callable[[], None]) -> None:
        for _ in range(20):
            run.wait(lambda: {LEARNER, QUEUE} <= run.pids().keys(), "learner and queue")
            learner = run.pids()[LEARNER]
            os.kill(learner, signal.SIGSTOP)
            try:
                for _ in range(50):
                    if groups_wait():
                        return strike()
                    time.sleep(0.1)
            finally:
                os.kill(learner, signal.SIGCONT)
            run.wait_for_steps(1)  # all slots were taken before
        pytest.fail("no groups waited whenever the learner was stopped")

    for deaths in range(1, 4):
        when_groups_wait(lambda: os.kill(run.pids()[QUEUE], signal.SIGKILL))
        run.wait(lambda deaths=deaths: len(events("recover")) == deaths, "the queue")
        done = run.step
        run.wait(lambda done=done: run.step > done, "a step")
    assert all(event["kept"] for event in events("recover"))
    when_groups_wait(lambda: run.signal(signal.SIGINT))
    assert run.join() == 128 + signal.SIGINT
    steps = run.step + 5
    run.start(steps=steps)
    assert run.join() == 0
    assert events("start")[1]["adopted"]
    assert not run.problems(steps, PROMPTS_PER_STEP)


def test_restarted_groups_are_trained_once_after_any_death(tortured: Start, tmp_path: Path) -> None:
    run = tortured(
        "run", steps=1_000_000, max_staleness=2, lr=1e-4, no_progress_s=300,
        checkpoint_every=5, rollout_workers=2, **hanging(tmp_path / "tickets"),
    )  # fmt: skip
    run.wait(lambda: run.step >= 2, "the first steps")
    monkey = Monkey(run, seed=22)
    kinds = [kind for kind in KILLS if kind.victims in (WORKER, LEARNER, QUEUE)]
    for kind in monkey.plan(kinds, len(kinds)):
        run.wait_for_a_restart()
        monkey.strike(kind)
    run.wait_for_a_restart()
    monkey.kill_the_job()
    print("\n".join(table(monkey.strikes)))
    assert not monkey.finish(PROMPTS_PER_STEP)


def test_a_synchronous_run_has_the_same_result_after_any_death(tortured: Start) -> None:
    steps = 50
    # Nothing hangs here, and a busy machine must not look like a hang.
    settings = {
        "hang_after_s": 300, "steps": steps, "max_staleness": 0, "lr": 1e-4, "checkpoint_every": 7,
    }  # fmt: skip
    moments = random.Random(5)
    first, last = moments.randrange(5, 15), moments.randrange(22, 35)

    struck = tortured("struck", **settings)
    struck.wait(lambda: struck.step >= first, "the learner's last step")
    Monkey(struck, seed=5).strike(next(kind for kind in KILLS if kind.name == "learner killed"))
    struck.wait(lambda: struck.step >= last, "the driver's last step")
    struck.signal(signal.SIGKILL)
    assert struck.join() == -signal.SIGKILL
    assert not struck.left_over(but_agents=True)
    struck.start()
    assert struck.join() == 0
    assert not struck.problems(steps, PROMPTS_PER_STEP)

    whole = tortured("whole", **settings)
    assert whole.join() == 0
    assert not whole.problems(steps, PROMPTS_PER_STEP)

    rewound = [event for event in read_journal(struck.out / "ledger.jsonl") if _goes_back(event)]
    assert len(rewound) == 3, "a start, a rewind and a second start"
    assert _trained(struck.out) == _trained(whole.out)
    for name in ("train/loss", "train/tokens", "opd/reverse_kl"):
        assert [step[name] for step in struck.metrics] == pytest.approx(
            [step[name] for step in whole.metrics], rel=1e-5
        )
    weights, expected = _weights(struck.out), _weights(whole.out)
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(weights[name] - values).max() <= 1e-6, name


def _goes_back(event: dict[str, Any]) -> bool:
    return event["event"] in ("start", "rewind")


def _trained(out: Path) -> list[tuple[int, int, int]]:
    """(version, first id, watermark) of the steps in the final weights, by the journal."""
    steps: list[tuple[int, int, int]] = []
    for event in read_journal(out / "ledger.jsonl"):
        if _goes_back(event):
            steps = [step for step in steps if step[2] <= event["watermark"]]
        elif event["event"] in ("push", "train"):
            step = (event["version"], event["ids"][0], event["watermark"])
            steps += [step] if step not in steps else []  # pushed, then published
    assert [s["groups/first"] for s in _metrics(out)] == [first for _, first, _ in steps]
    return steps


def _metrics(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/step" in line]


def _weights(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "final" / "model.safetensors")
