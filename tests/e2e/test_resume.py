"""Resume: the same command finishes an interrupted run, with every group trained once.

tests/chaos kills the driver.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.inspect.audit import audit
from cluster.store.replay_log import KeptSteps
from cluster.train import main
from distill.errors import NonFiniteError
from learner.learner import Learner
from tests.conftest import TinyPair
from tests.e2e.harness import (
    distil,
    evaluations,
    events,
    finish,
    interrupt,
    metrics,
    opd_arguments,
    process_of,
    run,
    start,
    trained_groups,
    wait_until,
)
from tests.e2e.impatient import NUMBERS
from tests.rows import write_rows
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.e2e


def fails_after(steps: int, error: Exception) -> Callable[..., Any]:
    """The learner's step, which raises the error after this many steps."""
    step, calls = Learner.step, count(1)

    def failing(self: Learner, *parts: Any) -> Any:
        if next(calls) > steps:
            raise error
        return step(self, *parts)

    return failing


def start_until_step(
    arguments: list[str], out: Path, step: int, module: str = "cluster.train"
) -> subprocess.Popen[str]:
    process = start(module, "recipe=opd", *arguments)
    wait_until(lambda: len(metrics(out)) >= step, process)
    return process


def summary(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def assert_whole(out: Path, steps: int, prompts_per_step: int = 4) -> None:
    """Assert that every step and every group occurs once, in order."""
    assert [step["step"] for step in metrics(out)] == list(range(1, steps + 1))
    assert trained_groups(out) == list(range(steps * prompts_per_step))
    assert summary(out)["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_checkpoints_and_exits_with_its_code(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str], signum: signal.Signals
) -> None:
    out = tmp_path / "run"
    if signum == signal.SIGHUP:  # nohup would have the run ignore it, as it should
        signal.signal(signum, signal.SIG_DFL)
    # Ctrl-C where an evaluation follows each step: one that is due then must not stand before the
    # checkpoint.
    evaluated = {"eval_every": 1} if signum == signal.SIGINT else {}
    arguments = opd_arguments(
        tiny_pair, out, steps=500, checkpoint_every=1000, eval_size=1, **evaluated
    )
    process = start_until_step(arguments, out, 3)
    # As timeout(1) does: to the command, and to its whole process group besides.
    process.send_signal(signum)
    os.killpg(process.pid, signum)
    output = finish(process, 128 + signum)
    assert signum.name in output
    assert summary(out)["status"] == "interrupted"
    done = len(metrics(out))
    assert (out / f"checkpoints/step-{done:06d}/manifest.json").is_file(), (
        "metrics and weights part"
    )
    if signum == signal.SIGTERM:  # sent by a scheduler
        assert main(["recipe=opd", *arguments, f"steps={done + 2}", "local=True"]) == 0, (
            capsys.readouterr()
        )
        assert_whole(out, done + 2)
        certificate = json.loads((out / "certificate.json").read_text())
        assert certificate["proven"], certificate["verdict"]  # a canary was asked at the signal


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_run(tiny_pair: TinyPair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(tiny_pair, out, steps=4, checkpoint_every=1000)
    process = start("cluster.train", "recipe=opd", *arguments, "local=True")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=DEADLINE_S) == 0
    assert_whole(out, 4)
    assert len(events(out, "output_lost")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["policy engine 0", "learner", "rollout worker 0"])
def test_too_many_deaths_end_the_run_with_the_actor_s_name(
    tiny_pair: TinyPair, tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setenv(NUMBERS, json.dumps({"max_restarts": 0}))
    arguments = opd_arguments(tiny_pair, out, steps=12, checkpoint_every=2)
    process = start_until_step([*arguments, "steps=500"], out, 3, "tests.e2e.impatient")
    os.kill(process_of(victim, out), signal.SIGKILL)
    output = finish(process, code=1)
    last = next(line for line in output.splitlines() if line.startswith("error:"))
    assert victim in last, output
    assert summary(out)["status"] == "failed"
    if victim == "learner":
        steps = len(metrics(out)) + 2
        run("cluster.train", "recipe=opd", *arguments, f"steps={steps}")
        assert_whole(out, steps)
    assert audit(out / "ledger.jsonl").problems == []


@pytest.mark.slow
def test_a_rollout_only_run_survives_deaths_of_its_actors(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    changes = {"rollout_only": True, "policy_engines": 2}
    arguments = opd_arguments(tiny_pair, out, steps=500, **changes)
    process = start_until_step(arguments, out, 3)
    for victim in ("group recorder", "policy engine 1"):
        before = len(events(out, "restart"))
        os.kill(process_of(victim, out), signal.SIGKILL)
        wait_until(lambda seen=before: len(events(out, "restart")) > seen, process)
    output = interrupt(process, signal.SIGTERM)
    assert "out/groups" in output
    assert {event["who"] for event in events(out, "restart")} == {
        "group recorder",
        "policy engine 1",
    }
    steps = len(metrics(out)) + 2
    run("cluster.train", "recipe=opd", *arguments, f"steps={steps}")
    assert_whole(out, steps)
    kept = KeptSteps(out)
    ids = [group.group_id for step in kept.steps for group in kept.groups(step)]
    assert sorted(ids) == list(range(4 * steps))
    assert audit(out / "ledger.jsonl", steps=steps).problems == []
    assert not (out / "checkpoints").exists() and not (out / "final").exists()


def test_failing_groups_are_dropped_until_they_are_too_many(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad prompt costs a group; a broken reward function ends the run with its error."""
    unanswered = write_rows(tmp_path / "eval.jsonl", {"prompt": "1 + 1 ="})
    out = tmp_path / "run"
    distil(
        tiny_pair, out, steps=5, max_staleness=0, eval_source=unanswered,
        reward="tests.e2e.rewards:refuses_zero",
    )  # fmt: skip
    life = audit(out / "ledger.jsonl")
    assert life.problems == [] and life.trained == 20
    [reason] = life.set_aside.values()
    assert "ValueError: a prompt that answers 0" in reason
    assert metrics(out)[-1]["groups/set_aside"] == 1
    [finding] = [event for event in events(out, "finding") if event["name"] == "groups_fail"]
    assert "rewards.py:" in finding["text"] and "problem" in finding["text"]
    assert list(summary(out)["set_aside"].values()) == [1]

    out = tmp_path / "broken"
    arguments = opd_arguments(
        tiny_pair, out, eval_source=unanswered, reward="tests.e2e.rewards:broken", local=True,
        smoke_test=False,
    )  # fmt: skip
    capsys.readouterr()
    assert main(["recipe=opd", *arguments]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err.splitlines()[-1]


def test_a_resumed_warm_up_continues_bit_for_bit(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher samples the same groups bit for bit as without the interruption."""

    def arguments(out: Path) -> list[str]:
        return opd_arguments(
            tiny_pair, out, steps=4, sft_steps=3, checkpoint_every=1, max_staleness=0, eval_size=0,
            local=True, rollout_workers=1, prompts_per_step=1,
        )  # fmt: skip

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["recipe=opd", *arguments(whole)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", fails_after(2, NAN))
        assert main(["recipe=opd", *arguments(cut)]) == 1
    assert len(metrics(cut)) == 2
    assert main(["recipe=opd", *arguments(cut)]) == 0
    assert_whole(cut, 4, prompts_per_step=1)
    shares = [step.get("teacher_samples/share") for step in metrics(cut)]
    assert shares == [1, 1, 1, None]
    for name in ("train/loss", "train/grad_norm"):
        assert [s[name] for s in metrics(cut)] == [s[name] for s in metrics(whole)]
    made, expected = (out / "final/model.safetensors" for out in (cut, whole))
    assert made.read_bytes() == expected.read_bytes()


NAN = NonFiniteError("the gradient norm is nan")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 MiB")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NAN, ["the gradient norm is nan", "a lower lr", "fork_from={out}:1 out=DIR lr=RATE"]),
        (FULL, ["Tried to allocate 34.00 MiB", "a smaller learner.token_budget"]),
    ],
    ids=["diverges", "no room"],
)
def test_the_error_of_a_failed_step_has_a_remedy(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: list[str],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    arguments = opd_arguments(tiny_pair, out, steps=2, checkpoint_every=1, local=True)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", fails_after(1, error))
        assert main(["recipe=opd", *arguments]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(each.format(out=out) in last for each in says), last
    assert summary(out)["status"] == "failed"
    assert main(["recipe=opd", *arguments, "learner.token_budget=96"]) == 0
    assert_whole(out, 2)


def test_a_finished_run_is_unchanged_and_can_be_prolonged(
    tiny_pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = opd_arguments(tiny_pair, out, steps=2, local=True)
    assert main(["recipe=opd", *arguments]) == 0
    manifest = json.loads((out / "checkpoints/step-000002/manifest.json").read_text())
    assert summary(out)["checkpoint"]["seal"] == manifest["seal"]
    before = summary(out)["eval before"]
    capsys.readouterr()
    assert main(["recipe=opd", *arguments]) == 0
    assert summary(out)["eval before"] == before
    assert main(["recipe=opd", *arguments, "temperature=0.9"]) == 2
    assert "temperature" in capsys.readouterr().err
    finished = summary(out)
    (out / "summary.json").unlink()  # as if killed after the evaluation
    assert main(["recipe=opd", *arguments]) == 0
    assert summary(out)["eval after"] == finished["eval after"]
    longer = opd_arguments(tiny_pair, out, steps=4, local=True)
    assert main(["recipe=opd", *longer]) == 0, capsys.readouterr()
    assert_whole(out, 4)
    assert summary(out)["eval before"] == before and "eval after" in summary(out)
    # The teacher's first, which the prolonged run recalls.
    assert [line["step"] for line in evaluations(out)] == [0, 0, 2, 4]
    assert [line.keys() >= {"eval/accuracy", "eval/reverse_kl"} for line in evaluations(out)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert "eval/teacher/accuracy" in evaluations(out)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_reward_that_kills_its_worker_costs_only_its_group(
    tiny_pair: TinyPair, tmp_path: Path
) -> None:
    unanswered = write_rows(tmp_path / "eval.jsonl", {"prompt": "1 + 1 ="})
    out = tmp_path / "run"
    distil(
        tiny_pair, out, local=False, steps=5, max_staleness=1, eval_source=unanswered,
        reward="tests.e2e.rewards:kills_at_zero",
    )  # fmt: skip
    life = audit(out / "ledger.jsonl")
    assert life.problems == [] and life.trained == 20
    [reason] = life.set_aside.values()
    assert "problem 1 of env=SingleTurn" in reason
    assert "reward=tests.e2e.rewards:kills_at_zero" in reason
    assert 3 <= len(events(out, "death")) <= 5
